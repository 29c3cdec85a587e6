"""What takes long says so; what is quick does not."""

from __future__ import annotations

import time

import pytest

from soli.core import progress


def test_a_line_from_the_second_second_on(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.2)
    with progress.busy("writing x", 3_000_000_000) as done:
        done(1_500_000_000)
        assert capsys.readouterr().err == ""
        time.sleep(0.3)
        assert capsys.readouterr().err == "soli: writing x: 1.5 of 3.0 GB, 0 s\n"
    with progress.busy("validation", 64, unit="batches") as done:
        done(12)
        time.sleep(0.3)
    time.sleep(0.5)
    assert capsys.readouterr().err == "soli: validation: 12 of 64 batches, 0 s\n"  # and silent once it is over
    with progress.busy("elsewhere", shown=False):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""

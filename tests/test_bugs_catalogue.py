"""The words for bugs, the mechanisms that are known, and what points to them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch

from soli import losses
from soli.bugs.catalogue import mechanism, mechanisms
from soli.bugs.taxonomy import DIMENSIONS, UNKNOWN
from soli.core.errors import SoliError
from soli.engine.engine import parallelize
from typed import soli

PACKAGE = Path(__file__).parent.parent / "src" / "soli"


def test_every_mechanism_says_what_it_is_and_has_real_fixes() -> None:
    found = mechanisms()
    assert len(found) > 10
    for name, one in found.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", name)
        for dimension, word in (("cause", one.cause), ("symptom", one.symptom), ("strategy", one.strategy)):
            assert word in set(DIMENSIONS[dimension]) - {UNKNOWN}, (name, word)
        assert one.fixes
        for text in (one.what, one.shows, one.fixed, one.found):
            assert len(text) > 10
            assert text.endswith(".")
        for fix in one.fixes:
            assert re.fullmatch("[0-9a-f]{40}", fix.commit)
            assert fix.repo in ("deepspeedai/DeepSpeed", "NVIDIA/Megatron-LM", "hpcaitech/ColossalAI")
            assert fix.lines > 0
            assert fix.subject
    commits = [fix.commit for one in found.values() for fix in one.fixes]
    assert len(set(commits)) >= 36


def test_what_points_to_a_mechanism_points_to_one_that_is_there() -> None:
    """Every word that soli's errors give as `seen`."""
    words = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "seen":
                words |= {
                    one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant) and "-" in str(one.value)
                }
    assert words
    assert words <= set(mechanisms())


def test_an_error_says_where_it_was_seen_before() -> None:
    """A loss that is a mean is what scaled gradients wrongly elsewhere."""

    def mean(output, batch):
        total, count = losses.mse("targets")(output, batch)
        return total / count, count

    model = torch.nn.Linear(5, 3)
    batch = {"input": torch.randn(8, 5), "targets": torch.ones(8, 3)}
    engine = parallelize(model, mean, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plan="dp=1")
    with pytest.raises(SoliError) as caught:
        engine.step(batch)
    assert str(caught.value).endswith("seen    before in other frameworks: soli bugs show wrong-scale")
    error = SoliError.from_json(json.loads(json.dumps(caught.value.to_json())))
    assert str(error) == str(caught.value)


def test_show() -> None:
    run = lambda *words: soli("bugs", "show", *words)
    listed = run().stdout
    assert all(name in listed for name in mechanisms())
    one = run("wrong-group").stdout
    fixes = mechanism("wrong-group").fixes
    assert all(fix.commit[:10] in one and str(fix.date) in one for fix in fixes)
    assert json.loads(run("wrong-group", "--json").stdout)[0]["fixes"][0]["commit"] == fixes[0].commit
    wrong = run("wrong-grup")
    assert wrong.returncode == 2
    assert "did you mean 'wrong-group'" in wrong.stderr

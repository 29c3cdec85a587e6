"""The slow-network laboratory of benchmarks/network: its links have their rate and latency, and it leaves nothing."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

# Before benchmarks, which other tests put there and which has a launch.py too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks" / "network"))

import commands
import lab
import launch
import stream
from network import TCP_PAYLOAD, LabError, Network

REASON = commands.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

PROGRAM = """
import os, sys, time
print(*(os.environ[name] for name in ("RANK", "SOLI_HOST", "LOCAL_RANK", "GLOO_SOCKET_IFNAME")))
if sys.argv[1] == "fails" and os.environ["RANK"] == "2":
    sys.exit("no more")
if sys.argv[1] != "well":
    time.sleep(60)
"""

LAUNCHER = """
import sys
sys.path.append(sys.argv[1])
import lab, launch
from network import Network
with lab.lab(Network(hosts=2, rate=100.0, latency=1.0)) as made:
    print(made.prefix, flush=True)
    launch.launch(made, [sys.argv[2], "waits"], 60.0)
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def left(prefix: str) -> list[str]:
    return [name for name in lab.namespaces() if name.startswith(prefix)]


def test_the_rate() -> None:
    """Bytes in a time, each way and both at once, and nothing is dropped. A link never gives more than its rate; that it
    gives as much is seen on the best of some tries, as a machine with other work to do gives less."""
    want = 100 * TCP_PAYLOAD
    with lab.lab(Network(hosts=2, rate=100.0)) as made:
        a, b = made.place(0), made.place(1)
        for pairs in ([(a, b)], [(b, a)], [(a, b), (b, a)]):
            best = [0.0 for _ in pairs]
            for _ in range(8):
                best = [max(most, found["mbit"]) for most, found in zip(best, stream.bandwidth(pairs, 1.5), strict=True)]
                if min(best) > want * 0.9:
                    break
            assert best == [pytest.approx(want, rel=0.1)] * len(pairs)
        assert statistics.median(stream.round_trips(a, b, 20)) < 10
        assert lab.figures(made)["dropped"] == 0


def fails_in_a_lab(seen: list[str]) -> None:
    with lab.lab(Network(hosts=2, rate=100.0)) as made:
        seen.extend(left(made.prefix))
        raise ZeroDivisionError


def test_nothing_is_left_after_an_exception() -> None:
    seen: list[str] = []
    with pytest.raises(ZeroDivisionError):
        fails_in_a_lab(seen)
    assert len(seen) == 3
    assert not set(seen) & set(lab.namespaces())


def test_the_latency() -> None:
    """20 ms one way, and what the machine adds."""
    with lab.lab(Network(hosts=2, rate=100.0, latency=20.0)) as made:
        assert 40 <= statistics.median(stream.round_trips(made.place(1), made.place(0), 20)) < 60
        said = lab.figures(made)["relay"]
        assert isinstance(said, dict)
        assert said["dropped"] == 0


def test_a_rate_that_the_relay_cannot_carry_is_refused() -> None:
    with (
        pytest.raises(LabError, match=r"of a core for 2 links of 500gbit"),
        lab.lab(Network(hosts=2, rate=500_000.0, latency=1.0)),
    ):
        pass


def test_ranks_and_the_first_that_fails(program: str) -> None:
    with lab.lab(Network(hosts=2, per_host=2)) as made:
        well = launch.launch(made, [program, "well"], 30.0)
        assert well.error == ""
        assert [text.split() for text in well.printed] == [
            [str(rank), f"host{rank // 2}", str(rank % 2), lab.LINK] for rank in range(4)
        ]
        found = launch.launch(made, [program, "fails"], 30.0)
        assert found.failed == 2
        assert found.error == "rank 2: exit status 1; last line: no more"
        assert found.seconds < 20
        assert launch.launch(made, [program, "waits"], 1.0).error.startswith("killed after the deadline")


def test_what_a_killed_launcher_leaves_is_swept(program: str) -> None:
    folder = str(Path(lab.__file__).parent)
    command = [sys.executable, "-c", LAUNCHER, folder, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        prefix = launcher.stdout.readline().strip()
        assert prefix in str(lab.namespaces())
        assert not any(name.startswith(prefix) for name in lab.sweep())  # it lives
        launcher.kill()
    assert any(name.startswith(prefix) for name in lab.sweep())
    assert not left(prefix)


def test_without_root_one_error_says_so() -> None:
    nobody = ["setpriv", "--reuid", "65534", "--clear-groups", "--inh-caps=-all"]  # the lab itself needs it
    done = subprocess.run(
        [*nobody, sys.executable, str(Path(lab.__file__).parent / "launch.py"), "none.py"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("launch: the network lab needs root")
    assert done.stderr.count("\n") == 1

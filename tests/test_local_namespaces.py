"""Two hosts that are network namespaces: what crosses between them goes over a wire, and a cut or a death is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def why_not() -> str:
    """What keeps this process from making network namespaces: root, the command ip, or the container."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command ip"
    name = f"soli{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

SCRIPT = """
import datetime, json, os, signal, sys, time
import torch, torch.distributed as dist
import soli.backend
rank, kind, folder = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
dist.init_process_group("local", timeout=datetime.timedelta(seconds=20))
sent = lambda: int(open("/sys/class/net/" + os.environ["GLOO_SOCKET_IFNAME"] + "/statistics/tx_bytes").read())
x = torch.arange(1_000_000.0) * (rank + 1)
dist.all_reduce(x)
assert torch.equal(x, torch.arange(1_000_000.0) * 10)
dist.barrier()
before = sent()
dist.all_reduce(x)
dist.barrier()
crossed = sent() - before
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
model(torch.full((2, 8), float(rank))).sum().backward()
grad = model.module.weight.grad
assert torch.equal(grad, torch.full_like(grad, 2 * 1.5)), grad
if kind == "killed" and rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    if kind == "late" and rank >= 2:
        time.sleep(8)
    else:
        dist.all_reduce(x, async_op=True).wait(datetime.timedelta(seconds=3) if kind == "late" else datetime.timedelta(seconds=20))
except Exception as error:
    print(json.dumps({"error": str(error), "seconds": time.monotonic() - began, "crossed": crossed}), flush=True)
    os._exit(1)
print(json.dumps({"error": "", "crossed": crossed}), flush=True)
os._exit(0)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def wire() -> Iterator[list[str]]:
    """Two namespaces with one wire between them: 10.77.0.1 and 10.77.0.2."""
    names = [f"soli{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "va", "netns", names[0], "type", "veth", "peer", "name", "vb", "netns", names[1])
        for number, (name, end) in enumerate(zip(names, ("va", "vb"), strict=True), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(wire: list[str], tmp_path: Path, kind: str) -> list[tuple[int, dict]]:
    """Two ranks in each namespace: each one's exit code and what it printed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    ranks = []
    for rank in range(4):
        host = rank // 2
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29777"}
        env |= {"SOLI_HOST": "ab"[host], "GLOO_SOCKET_IFNAME": ("va", "vb")[host], "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", wire[host], sys.executable, str(tmp_path / "script.py"), kind, str(tmp_path)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    found = []
    until = time.monotonic() + 90
    try:
        for process in ranks:
            out, err = process.communicate(timeout=until - time.monotonic())
            assert out or process.returncode < 0, err
            found.append((process.returncode, json.loads(out) if out else {}))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return found


def test_what_crosses_the_wire(wire: list[str], tmp_path: Path) -> None:
    """Each host sends half of the sum's 4 MB twice, whatever the number of its ranks (gloo alone: 1.5 times 4 MB)."""
    for code, said in start(wire, tmp_path, "well"):
        assert code == 0, said
        assert (
            4.0e6 < said["crossed"] < 5.0e6
        )  # headers and what TCP repeats are some percent; a half sent once more is 2 MB


def test_a_rank_that_dies_on_the_other_host(wire: list[str], tmp_path: Path) -> None:
    found = start(wire, tmp_path, "killed")
    assert found[3][0] == -9
    for code, said in found[:3]:
        assert code == 1
        assert "rank 3 of group" in said["error"], said
        assert "is gone" in said["error"]
        assert said["seconds"] < 15  # told by its end, and not by the time-out


def test_a_host_that_is_late(wire: list[str], tmp_path: Path) -> None:
    for code, said in start(wire, tmp_path, "late")[:2]:
        assert code == 1
        assert "[2, 3]" in said["error"], said
        assert said["seconds"] < 6

"""Two real processes: what rank 0 makes, or refuses, reaches the other rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

PROGRAM = """
import os, time
from soli.core.errors import SoliError
from soli.mesh.world import join
from soli.train.agree import from_rank_0

world = join()
def slow():
    time.sleep(1.3)
    return {"rank": world.rank, "list": [1, None, "x"]}

def refuse():
    raise SoliError("no such data", got="here", fix="there")

print(world.rank, from_rank_0(world, slow, "slow"), flush=True)
try:
    from_rank_0(world, refuse, "refused")
except SoliError as error:
    print(world.rank, error.everywhere, [p.fix for p in error.problems], flush=True)
print(world.rank, from_rank_0(world, lambda: world.rank, "again"), flush=True)
"""


def test_the_other_rank_gets_the_answer_and_the_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=60) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    for rank, (out, _) in enumerate(said):
        assert out.splitlines() == [
            f"{rank} {{'rank': 0, 'list': [1, None, 'x']}}",
            f"{rank} True ['there']",
            f"{rank} 0",
        ]

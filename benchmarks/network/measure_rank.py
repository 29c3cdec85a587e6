"""One rank of measure.py: calls of torch.distributed over the lab, timed one by one."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from link import crossed
from meeting import Meeting

SMALL = 8  # bytes of a message that is all latency


def main() -> None:
    """Write {call: {bytes: {"s": seconds of each call, "tx": bytes that the host sent in one}}} to LAB_RECORD."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--sizes", nargs="+", type=int, required=True)
    parser.add_argument("--times", type=int, required=True)
    args = parser.parse_args()
    if args.backend == "local":
        import soli.backend  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    meeting = Meeting()
    found: dict[str, dict[str, dict]] = {}
    for name, call in CALLS.items():
        sizes = [SMALL] if name == "round trip" else args.sizes
        found[name] = {str(size): timed(meeting, call, size, args.times) for size in sizes}
    Path(os.environ["LAB_RECORD"]).write_text(json.dumps(found))
    meeting.gather()


def timed(meeting: Meeting, call: Callable[[torch.Tensor], object], size: int, times: int) -> dict:
    """This rank's seconds of each of `times` calls, all ranks beginning together, after one that does not count."""
    data = torch.ones(size // 4)
    call(data)
    meeting.gather()
    before = crossed()["tx"]
    seconds = []
    for _ in range(times):
        data.fill_(1.0)
        meeting.gather()
        began = time.perf_counter()
        call(data)
        seconds.append(time.perf_counter() - began)
    meeting.gather()
    return {"s": seconds, "tx": round((crossed()["tx"] - before) / times)}


def send(data: torch.Tensor) -> None:
    """From rank 0 to the last rank, which is on the last host; the others look on."""
    last = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        dist.send(data, last)
    elif dist.get_rank() == last:
        dist.recv(data, 0)


def round_trip(data: torch.Tensor) -> None:
    """There and back."""
    last = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        dist.send(data, last)
        dist.recv(data, last)
    elif dist.get_rank() == last:
        dist.recv(data, 0)
        dist.send(data, 0)


def broadcast(data: torch.Tensor) -> None:
    """From rank 0."""
    dist.broadcast(data, 0)


CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "round trip": round_trip,
    "send": send,
    "all-reduce": dist.all_reduce,
    "broadcast": broadcast,
}


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # no interpreter teardown: it is not what is measured here

"""One rank of backend.py: every operation at every size, calls in a row; writes {operation: {bytes: seconds}}."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = [2**10, 2**13, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28]
SECONDS, REPEATS = 0.45, 3  # of a row and how many: ranks leave the meeting before it some ms apart


def main() -> None:
    """Measure one system."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    parser.add_argument("largest", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[int, float]] = {}
    run = deepspeed_run() if args.system == "deepspeed-shm" else torch_run(args.system)
    world = int(os.environ["WORLD_SIZE"])
    for size in (s for s in SIZES if s <= args.largest):
        if size * world * 3 > 12 * 2**30:
            continue
        for name, call in run(size).items():
            found.setdefault(name, {})[size] = timed(call)
    args.out.write_text(json.dumps(found))
    os._exit(0)


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call, in a row of so many that clocks do not matter; the median of some rows."""
    call()
    meet()
    began = time.perf_counter()
    call()
    once = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(once, dist.ReduceOp.MAX, group=COMMON)
    count = max(1, min(2000, int(SECONDS / REPEATS / float(once))))
    times = []
    for _ in range(REPEATS):
        meet()
        began = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - began) / count)
    return statistics.median(times)


def meet() -> None:
    """All ranks are here, whatever is measured."""
    dist.barrier(COMMON)


def torch_run(system: str) -> Callable[[int], dict[str, Callable[[], object]]]:
    """The operations of a torch backend on tensors of a size."""
    global COMMON
    import soli.backend  # noqa: F401

    backend = "gloo" if system == "gloo" else "local"
    dist.init_process_group(backend)
    COMMON = dist.new_group(backend="gloo") if backend == "local" else dist.group.WORLD
    world, rank = dist.get_world_size(), dist.get_rank()

    def make(size: int) -> dict[str, Callable[[], object]]:
        n = size // 4 // world * world
        whole = torch.zeros(n)
        if system == "local-shared":
            whole = dist.group.WORLD.allocate(4 * n).view(torch.float32).zero_()
        part, other = torch.zeros(n // world), torch.zeros(n)
        own = whole.view(world, -1)[rank]
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, own),
        }
        if system != "local-shared":
            calls["all_to_all"] = lambda: dist.all_to_all_single(other, whole)
            calls["broadcast"] = lambda: dist.broadcast(whole, 0)
        if system == "local":
            calls["copy"] = lambda: other.copy_(whole)
        if system != "local-shared" and world == 2:
            calls["send, and back"] = lambda: (
                (dist.send(whole, 1), dist.recv(whole, 1)) if rank == 0 else (dist.recv(whole, 0), dist.send(whole, 0))
            )
        return calls

    return make


def deepspeed_run() -> Callable[[int], dict[str, Callable[[], object]]]:
    """DeepSpeed's shared-memory operator: it has all-reduce alone."""
    global COMMON
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    dist.init_process_group("gloo")
    COMMON = dist.group.WORLD
    operator = ShareMemCommBuilder().load()
    operator.initialize(dist.get_world_size(), dist.get_rank())

    def make(size: int) -> dict[str, Callable[[], object]]:
        whole = torch.zeros(size // 4)
        return {"all_reduce": lambda: torch.ops.deepspeed.inference_all_reduce_(whole)}

    return make


COMMON: dist.ProcessGroup

if __name__ == "__main__":
    main()

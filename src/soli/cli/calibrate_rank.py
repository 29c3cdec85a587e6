"""One rank of `soli calibrate`: python -m soli.cli.calibrate_rank JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from soli.mesh.launch.rank import prepare

if TYPE_CHECKING:
    from soli.planner.machine import Machine


def main() -> None:
    """Measure, and let the first rank tell."""
    prepare()
    from soli.core.plan import Plan
    from soli.engine.calibrate import calibrated, folder
    from soli.mesh.mesh import build_mesh
    from soli.mesh.world import join

    given = json.loads(sys.argv[1])
    world = join()
    start = time.perf_counter()
    machine, new = calibrated(world, build_mesh(Plan(dp=world.size), world), fresh=given["fresh"])
    if not world.is_first:
        return
    if given["as_json"]:
        print(json.dumps(asdict(machine), indent=1))
        return
    _show(machine)
    path = folder() / f"machine-{machine.fingerprint}.json"
    print(f"measured in {time.perf_counter() - start:.1f} s" if new else "as it was measured before (--fresh: anew)")
    print(f"kept in {path}")


def _show(machine: Machine) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    print(
        f"{machine.ranks} ranks, each: products {machine.flops / 1e9:.1f} Gflop/s, {machine.crowd:.2f} times quicker alone; "
        f"operations {machine.launch * 1e6:.1f} us and {machine.stream / 1e9:.1f} GB/s; AdamW {machine.optimizer / 1e6:.0f} "
        f"million parameters/s; to the host {machine.host / 1e9:.1f} GB/s, to the disk {machine.disk / 1e9:.2f} GB/s; "
        f"{machine.hidden:.0%} of a collective runs behind products"
    )
    if not machine.collectives:
        return
    sizes = [int(size) for size, _ in next(iter(machine.collectives.values()))]
    table = Table(
        "milliseconds", "ranks", "apart", box=box.SIMPLE, caption="apart: the distance between two ranks of a group"
    )
    for size in sizes:
        table.add_column(f"{size // 1024} kB" if size < 1 << 20 else f"{size >> 20} MB", justify="right")
    for key, row in machine.collectives.items():
        operation, group = key.split()
        table.add_row(operation, *group.split("x"), *(f"{1e3 * seconds:.3f}" for _, seconds in row))
    Console().print(table)


if __name__ == "__main__":
    main()

"""`soli calibrate`: what this machine does with N ranks, measured, and kept for plan="auto"."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from soli.cli.options import AsJson, Backend, Ranks
from soli.cli.tables import show
from soli.mesh.launch.local import launch

if TYPE_CHECKING:
    from soli.planner.machine import Machine


def calibrate(
    ranks: Ranks = 2, fresh: Annotated[bool, Option("--fresh", help="Measure anew what was measured before.")] = False, as_json: AsJson = False,
    backend: Backend = None,
) -> None:  # fmt: skip
    """Measure this machine with N ranks: products, memory, every collective by group and size, overlap, disk.

    It takes less than 20 seconds, and is kept by a fingerprint of the hardware in SOLI_CACHE, or ~/.cache/soli.
    """
    given = json.dumps({"fresh": fresh, "as_json": as_json})
    raise Exit(launch(ranks, [sys.executable, "-m", "soli.cli.rank", "calibrate", given], backend=backend))


def of_rank(fresh: bool, as_json: bool) -> None:
    """Measure, and let the first rank tell."""
    from soli.core.plan import Plan
    from soli.engine.calibrate import calibrated, folder
    from soli.mesh.mesh import build_mesh
    from soli.mesh.world import join

    world = join()
    start = time.perf_counter()
    machine, new = calibrated(world, build_mesh(Plan(dp=world.size), world), fresh=fresh)
    if not world.is_first:
        return
    if as_json:
        print(json.dumps(asdict(machine), indent=1))
        return
    _show(machine)
    print(f"measured in {time.perf_counter() - start:.1f} s" if new else "as it was measured before (--fresh: anew)")
    print(f"kept in {folder() / f'machine-{machine.fingerprint}.json'}")


def _show(machine: Machine) -> None:
    print(
        f"{machine.ranks} ranks, each: products {machine.flops / 1e9:.1f} Gflop/s, {machine.crowd:.2f} times quicker alone; "
        f"operations {machine.launch * 1e6:.1f} us and {machine.stream / 1e9:.1f} GB/s; AdamW {machine.optimizer / 1e6:.0f} "
        f"million parameters/s; to the host {machine.host / 1e9:.1f} GB/s, to the disk {machine.disk / 1e9:.2f} GB/s; "
        f"{machine.hidden:.0%} of a collective runs behind products"
    )
    if not machine.collectives:
        return
    sizes = [int(size) for size, _ in next(iter(machine.collectives.values()))]
    titles = [f"{size // 1024} kB" if size < 1 << 20 else f"{size >> 20} MB" for size in sizes]
    rows = []
    for key, row in machine.collectives.items():
        operation, group = key.split()
        rows.append([operation, *group.split("x"), *(f"{1e3 * seconds:.3f}" for _, seconds in row)])
    show(("milliseconds", "ranks", "apart"), titles, rows, caption="apart: the distance between two ranks of a group")

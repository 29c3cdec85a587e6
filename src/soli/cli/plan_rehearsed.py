"""`soli plan FILE.py:NAME` of a program that no formulas describe: its layouts rehearsed for the devices that are asked about."""

import json
from typing import TYPE_CHECKING, Any

from rich import box

from soli.cli import programs
from soli.cli.tables import show
from soli.core.errors import Problem, SoliError
from soli.core.plan import Plan

if TYPE_CHECKING:
    from soli.engine.deciding import Option
    from soli.planner.hardware.clusters import Cluster

LOSS = "loss(output, batch) -> (sum, count), such as soli.losses.cross_entropy('targets')"
TOLD = "GB of a device, and with what allocators take beside. Of a step: products, communication that nothing hides, waiting in the pipeline; the rest are other operations and the host."


def search(
    why: SoliError, program: Any, cluster: "Cluster", batch: int, precision: str, memory: float, fix: list[str] | None, count: int, as_json: bool, asked: list[str]
) -> None:  # fmt: skip
    """Print the best plans and why others cannot be. `asked`: options that only formulas answer; SoliError where there are any, or no loss."""
    from torch import nn

    from soli.engine.elsewhere import Elsewhere, reasons, standing
    from soli.engine.taken import HEADROOM
    from soli.planner.cost.constants import spread_of

    without = [f"leave out {', '.join(asked)}, which are answered of transformers alone"] if asked else []
    without += [f"return its loss too: {programs.RETURNS}, {LOSS}"] if program[2] is None else []
    if without:
        raise SoliError([Problem(p.what, p.got, p.allowed, f"its plans can be rehearsed: {'; and '.join(without)}") for p in why.problems])
    words = [word for text in fix or [] for word in text.split(",") if word.strip()]
    fixed = {name: getattr(Plan.parse(word), name) for word in words for name in [word.partition("=")[0].strip()]}
    made = standing(*program)
    looked = Elsewhere(made, cluster, batch, memory or cluster.device.usable, tuple(fixed.get("precision", precision).split(",")), fixed)
    found = looked.search()
    best, spread = [option for option in found if not option.refused], spread_of("soli")
    if not best:
        got = "; ".join(reasons(found))[:2000] or "none is as --fix says"
        more = "more devices, a smaller --global-batch, or another --fix" if any(option.peak for option in found) else "" if found else f"degrees whose product is {cluster.size}"
        raise SoliError(f"no plan of this program is known to run on {cluster}", got=got, fix=more)
    rehearsed, cannot = [problem.got for problem in why.problems], reasons(found)  # for what formulas lack
    parameters, rows = sum(p.numel() for p in made.model.parameters()), [_row(option, batch, spread, HEADROOM) for option in best[:count]]
    left_out = ((looked.slower, "that cut the model, none of which can be 5% quicker"), (looked.left, "that cut it further, which take long to rehearse: --fix asks for them"))
    noted = [f"Left out: {number} layouts {why}" for number, why in left_out if number]
    if any(isinstance(module, nn.GRU | nn.RNN) for module in made.model.modules()):
        noted.append("GRU and RNN layers are timed by their steps, of which a GPU makes one kernel: they take less")
    if reads := next((option.reads for option in best if option.reads), ""):
        noted.append(f"Layers read values, which a rehearsal takes for 0: {reads[:300]}")
    if as_json:
        said = {"parameters": parameters, "cluster": str(cluster), "devices": cluster.size, "global_batch": batch, "rehearsed": rehearsed, "best": rows}
        print(json.dumps({**said, "noted": noted, "cannot": cannot}, indent=1, allow_nan=False))
        return
    print(f"{parameters:,} parameters, {batch} rows a step, on {cluster} ({cluster.size} devices): rehearsed, as no formulas describe it ({'; '.join(rehearsed)})")
    titles = ("step s", "from", "to", "rows/s", "GB", "up to", "products", "exposed", "bubble")
    show([" " * 2], titles, ([str(i), *_cells(row)] for i, row in enumerate(rows, 1)), box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    plans = (f"  {number:<3} {row['plan']}" for number, row in enumerate(rows, 1))
    print("\n".join([TOLD, *plans, *(f"{one}." for one in noted), *(f"Cannot be: {one}." for one in cannot)]))


def _row(option: "Option", batch: int, spread: dict[str, float], headroom: float) -> dict[str, Any]:
    times = {f"time_{end}_s": option.seconds * spread[f"time_{end}"] for end in ("low", "high")}
    memory = {"memory_gb": option.peak / 1e9, "memory_high_gb": headroom * option.peak / 1e9}
    return {"plan": option.plan, "step_time_s": option.seconds, **times, "rows_per_s": batch / option.seconds, **memory, "parts_s": option.parts}


def _cells(row: dict[str, Any]) -> list[str]:
    parts, whole = row["parts_s"], row["step_time_s"]
    shares = (parts["products"], parts["waited"] + parts["late"], parts["stages"])
    times = (f"{row[name]:#.4g}".rstrip(".") for name in ("step_time_s", "time_low_s", "time_high_s"))
    return [*times, f"{row['rows_per_s']:,.0f}", f"{row['memory_gb']:.1f}", f"{row['memory_high_gb']:.1f}", *(f"{part / whole:.0%}" for part in shares)]

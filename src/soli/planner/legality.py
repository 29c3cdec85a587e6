"""Every constraint on a plan for a world of a given size, all at once, and the nearest plan that keeps them.

Pure: no process group, no tensor. What soli has not built yet stands here as data and is refused.
"""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from math import isqrt
from typing import Any

from soli.core.errors import Problem, SoliError, listing
from soli.core.plan import SPLIT_BACKWARD, V_SHAPED, Plan, word

BUILT: dict[str, tuple[object, ...]] = {"ep": (1,), "recompute": ("none", "selective", "full"), "precision": ("fp32", "bf16", "fp16", "fp64"), "offload": ("none",)}  # fmt: skip
"""The values that this version can honour; keys that are not here have no such limit."""


@listing
def problems(plan: Plan, world: int) -> Iterator[Problem]:
    """Everything that keeps this plan from running on `world` ranks (empty: it can run)."""
    for key, built in BUILT.items():
        value = getattr(plan, key)
        if value not in built:
            allowed = ", ".join(word(v) for v in built)
            yield Problem(f"'{key}={word(value)}' is not built yet", got=word(value), allowed=allowed)
    if plan.dp is None:
        if world % plan.model_ranks:
            what = f"{world} ranks are no multiple of pp x cp x tp = {plan.model_ranks}"
            yield Problem(what, got=f"{plan} on {world} ranks")
    elif plan.dp * plan.model_ranks != world:
        takes = plan.dp * plan.model_ranks
        what = f"the plan takes {takes} {'rank' if takes == 1 else 'ranks'} and {world} are there"
        got = f"dp={plan.dp} x pp={plan.pp} x cp={plan.cp} x tp={plan.tp} = {plan.dp * plan.model_ranks}"
        yield Problem(what, got=got, allowed=f"degrees whose product is {world}")
    if plan.sp and plan.tp == 1:
        what = "'sp' cuts the sequence over the ranks of tp, and tp=1 has one"
        yield Problem(what, got="sp=on, tp=1", fix="leave sp out")
    yield from _grid_problems(plan)
    if plan.cp == 1 and plan.context != Plan.context:
        what = "'context' says how attention crosses the ranks of cp, and cp=1 has one"
        yield Problem(what, got=f"context={plan.context}, cp=1", fix="leave context out")
    yield from _pipeline_problems(plan)
    dp = plan.dp if plan.dp is not None else world // plan.model_ranks
    if plan.replicate > 1 and plan.zero == 0:
        what = "'replicate' says how many copies a sharded state has, and zero=0 shards nothing"
        yield Problem(what, got=f"replicate={plan.replicate}, zero=0", allowed="replicate with zero=1, 2 or 3")
    elif dp and dp % plan.replicate:
        allowed = ", ".join(str(d) for d in divisors(dp))
        yield Problem(f"replicate={plan.replicate} does not divide dp={dp}", allowed=allowed)


def _grid_problems(plan: Plan) -> Iterator[Problem]:
    """What keeps tp's ranks from being the grid that is asked for."""
    if plan.tensor != "2.5d" and plan.depth > 1:
        what = f"'depth' counts the copies of a grid, and tensor={plan.tensor} has one"
        yield Problem(what, got=f"depth={plan.depth}", fix="tensor=2.5d, or leave depth out")
    if plan.tensor == "1d":
        if plan.rows:
            yield Problem("'rows' are of a grid, and tensor=1d has none", got=f"rows={plan.rows}", fix="tensor=2d, or leave rows out")
        return
    if plan.tp == 1:
        what = f"'tensor={plan.tensor}' lays the ranks of tp in a grid, and tp=1 has one"
        yield Problem(what, got=f"tp=1, tensor={plan.tensor}", fix="leave tensor out")
        return
    yield from (_cube_problems if plan.tensor == "3d" else _sheet_problems)(plan)
    if plan.sp:
        what = "'sp' cuts the sequence between products, where a grid has cut rows and hidden sizes already"
        yield Problem(what, got=f"sp=on, tensor={plan.tensor}", fix="leave sp out")
    if plan.pp > 1 and plan.schedule in SPLIT_BACKWARD:
        what = f"'{plan.schedule}' computes gradients of inputs and of weights apart, which a grid's products do at once"
        got, allowed = f"schedule={plan.schedule}, tensor={plan.tensor}", "gpipe, 1f1b, interleaved"
        yield Problem(what, got=got, allowed=allowed, fix="schedule=1f1b")


def _sheet_problems(plan: Plan) -> Iterator[Problem]:
    depth = plan.depth if plan.tensor == "2.5d" else 1
    ranks, more = divmod(plan.tp, depth)
    near = lambda n: sorted({isqrt(n) ** 2, (isqrt(n) + 1) ** 2} - {0})
    fits = [f"tp={depth * n}" for n in near(max(ranks, 1))]
    if more:
        what, got = f"tp={plan.tp} is no multiple of depth={plan.depth}", f"tp={plan.tp}, depth={plan.depth}"
        fix = f"{' or '.join(fits)}, or depth={' or '.join(map(str, divisors(plan.tp)))}"
        yield Problem(what, got=got, allowed="tp = depth x rows x columns", fix=fix)
    elif plan.rows and ranks % plan.rows:
        allowed = ", ".join(map(str, divisors(ranks)))
        yield Problem(f"rows={plan.rows} does not divide the {ranks} ranks of a grid", allowed=allowed)
    elif not plan.rows and isqrt(ranks) ** 2 != ranks:
        got = f"tp={plan.tp}, tensor={plan.tensor}" + (f", depth={plan.depth}" if plan.depth > 1 else "")
        allowed = "tp = q x q (2d), depth x q x q (2.5d)"
        rows = " or ".join(map(str, divisors(ranks)[1:-1] or [1]))
        fix = f"{' or '.join(fits)}; or a grid that is not square, with rows={rows}"
        yield Problem(f"{ranks} ranks are no square grid", got=got, allowed=allowed, fix=fix)


def _cube_problems(plan: Plan) -> Iterator[Problem]:
    edge = plan.grid[0]
    if plan.rows:
        yield Problem("'rows' are of a grid, and a cube is as wide as it is deep", got=f"rows={plan.rows}", fix="leave rows out")
    if edge**3 != plan.tp:
        near = sorted({max(e, 1) ** 3 for e in (int(plan.tp ** (1 / 3) + 1e-9), int(plan.tp ** (1 / 3) + 1e-9) + 1)})
        fix = " or ".join(f"tp={n}" for n in near)
        yield Problem(f"{plan.tp} ranks are no cube", got=f"tp={plan.tp}, tensor=3d", allowed="tp = q x q x q", fix=fix)


def _pipeline_problems(plan: Plan) -> Iterator[Problem]:
    if plan.pp == 1:
        pointless = {
            "schedule": ("orders the stages of a pipeline", "leave schedule out"),
            "chunks": ("cuts a rank's part of a pipeline into stages", "leave chunks out"),
            "microbatches": ("fills a pipeline", f"accumulate={plan.microbatches} cuts the batch without one"),
        }
        for key, (what, fix) in pointless.items():
            value = getattr(plan, key)
            if value != getattr(Plan, key):
                yield Problem(f"'{key}' {what}, and pp=1 has none", got=f"pp=1, {key}={value}", fix=fix)
    elif plan.schedule == "interleaved" and plan.chunks < 2:
        yield Problem("'interleaved' needs several stages a rank", got=f"chunks={plan.chunks}", fix="chunks=2")
    elif plan.schedule in V_SHAPED and plan.chunks > 2:
        yield Problem(f"'{plan.schedule}' has two stages a rank", got=f"chunks={plan.chunks}", fix="leave chunks out")
    elif plan.schedule not in (*V_SHAPED, "interleaved") and plan.chunks > 1:
        fix = f"schedule=interleaved,chunks={plan.chunks}"
        yield Problem(f"'{plan.schedule}' has one stage a rank", got=f"chunks={plan.chunks}", fix=fix)


def resolve(plan: Plan, world: int) -> Plan:
    """The plan with every degree filled in, or one error with all its problems and the nearest plan."""
    if found := problems(plan, world):
        near = Problem("the nearest plan that can run", fix=f'plan="{nearest(plan, world)}"')
        raise SoliError([*found, near], everywhere=True)
    return plan if plan.dp is not None else plan.with_(dp=world // plan.model_ranks)


def nearest(plan: Plan, world: int) -> Plan:
    """The legal plan that keeps the most of what was asked.

    Distance: the number of keys that change, then how far degrees move, those that cut the model first.
    """
    asked = asdict(plan)
    base: dict[str, Any] = asked | {key: built[0] for key, built in BUILT.items() if asked[key] not in built}
    if plan.schedule not in (*V_SHAPED, "interleaved"):
        base["chunks"] = 1
    elif plan.chunks != 2:
        base["chunks"] = 2 if plan.schedule == "interleaved" else 1
    degrees: list[dict[str, Any]] = [
        {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
        for tp, pp, cp in product(divisors(world), repeat=3)
        if world % (tp * pp * cp) == 0
        for dp in (None, world // (tp * pp * cp))
    ]
    no_pipeline = {"schedule": Plan.schedule, "chunks": 1, "microbatches": 1}
    options: list[dict[str, Any]] = [
        base | degree | {"sp": sp, "replicate": replicate, "zero": zero, "schedule": schedule} | grid
        | (no_pipeline if degree["pp"] == 1 else {}) | ({"context": Plan.context} if degree["cp"] == 1 else {})
        for degree in degrees
        for sp, replicate, zero, schedule, grid in product(
            {False, plan.sp}, divisors(world // (degree["tp"] * degree["pp"] * degree["cp"])), {plan.zero, 0, 1},
            {base["schedule"]} if plan.tensor == "1d" else {base["schedule"], "1f1b"}, _grids(plan, degree["tp"]),
        )
    ]  # fmt: skip

    def distance(option: dict[str, Any]) -> tuple[int, int, int]:
        changed = sum(asked[key] != value for key, value in option.items())
        moved = sum(abs(option[k] - asked[k]) for k in ("replicate", "tp", "pp", "cp"))
        return changed, moved, abs((option["dp"] or world) - (plan.dp or world))

    ordered = (Plan(**option) for option in sorted(options, key=distance))
    return next(option for option in ordered if not problems(option, world))


def _grids(plan: Plan, tp: int) -> list[dict[str, Any]]:
    """The grid that was asked for, and those beside it, the likest first."""
    if plan.tensor == "1d":
        return [{"tensor": "1d", "depth": 1, "rows": 0}]
    kinds = [(plan.tensor, plan.depth, plan.rows), (plan.tensor, plan.depth, 0), (plan.tensor, 1, 0)]
    if plan.tensor != "3d":
        kinds += [(plan.tensor, plan.depth, rows) for rows in divisors(tp)[1:-1]]
    kinds += [("1d", 1, 0), ("2d", 1, 0), ("2.5d", 2, 0), ("2.5d", plan.depth, 0)]
    return [{"tensor": kind, "depth": depth, "rows": rows} for kind, depth, rows in dict.fromkeys(kinds)]


def plain(world: int, why: str) -> tuple[Plan, str]:
    """What `plan="auto"` means where it cannot choose, and one line that says so."""
    plan = Plan(dp=world)
    return plan, f"plan auto -> {plan}, not chosen but plain: {why}"


def divisors(n: int) -> list[int]:
    """All, in order."""
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})

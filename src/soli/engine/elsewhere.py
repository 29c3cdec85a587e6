"""Any program on devices that are not here: its layouts rehearsed in this process, and timed by what the devices promise.

For what the planner's formulas have no words for (planner/dimensions.py): convolutions, recurrences, an encoder beside a
decoder. Of each layout the lightest form that it needs is looked at (planner/candidates.py), then variants of the best ones.
Microbatches but the first and the last do the same, so that a step of two and one of three tell those of any number.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.core.progress import Add, busy
from soli.engine.auto import LAYOUTS, layout_of
from soli.engine.batch import rows_of, take
from soli.engine.deciding import Option, fitting, ordered, rehearsed, size
from soli.engine.rehearse import Program, rehearse, widened
from soli.engine.taken import HEADROOM
from soli.losses import LossFn
from soli.planner.candidates import bases, lighter, variants
from soli.planner.hardware.clusters import Cluster
from soli.planner.hollow import untouched
from soli.planner.legality import problems
from soli.planner.promised import promised, step_seconds
from soli.planner.rehearsal import Rehearsal

WORTH = 1.05
"""Where the best is so near to what its ranks compute alone, no way to cut the model is looked at: each computes as much."""
OPERATIONS = 300_000
"""Layouts are looked at, those that cut the model the least first, until so many operations were rehearsed: some minutes."""


@dataclass
class Elsewhere:
    """A search: of a program, on a cluster, with so many rows a step, in so many bytes of a device; `fixed`: what each plan has."""

    program: Program
    cluster: Cluster
    rows: int
    memory: float
    precisions: tuple[str, ...]
    fixed: dict[str, Any]
    options: dict[str, Option] = field(default_factory=dict)
    looked_at: dict[str, Option] = field(default_factory=dict)
    never: dict[tuple[str, int], str] = field(default_factory=dict)  # degrees that the program cannot be cut by, and why
    slower: int = 0  # layouts that were not looked at: WORTH
    left: int = 0  # and those beyond OPERATIONS
    operations: int = 0

    def search(self) -> list[Option]:
        """Plans that were looked at, the quickest first, those that cannot be last."""
        first = bases(self.cluster.size, self.rows, grids="tensor" in self.fixed)
        fixed = {name: value for name, value in self.fixed.items() if name not in ("dp", "tp", "cp", "pp", "tensor", "sp")}
        first = [plan.with_(**fixed) for plan in first if "tp" in self.fixed or plan.tp <= self.cluster.device.node]
        with busy("rehearsing plans", unit="rehearsed") as add:
            for plan in sorted(first, key=lambda plan: plan.model_ranks):
                if all(map(self._is_near, self.precisions)):
                    self.slower += 1
                elif self.operations > OPERATIONS:
                    self.left += 1
                else:
                    self._look(plan, add)
                    if plan.model_ranks == 1:
                        self._vary(plan, add)
            for option in list({layout_of(option): option for option in reversed(fitting(self.options))}.values())[-LAYOUTS:]:
                self._vary(Plan.parse(option.plan), add)
        return ordered(self.options)

    def _is_near(self, precision: str) -> bool:
        """Whether the best takes hardly longer than its ranks compute where each has a part of the batch."""
        alone = self.looked_at.get(str(Plan(dp=self.cluster.size, precision=precision)))
        best = next((o for o in fitting(self.options) if Plan.parse(o.plan).precision == precision), None)
        if best is None or alone is None or not alone.parts:
            return False
        return best.seconds <= WORTH * step_seconds(self.cluster, {name: alone.parts[name] for name in ("products", "others")})

    def _vary(self, plan: Plan, add: Add) -> None:
        for one in variants(plan, self.cluster.size, self.rows):
            self._look(one, add)

    def _look(self, plan: Plan, add: Add) -> None:
        """Of a plan in each precision the first of its forms that fits; or the last, refused."""
        for precision in self.precisions:
            option = self._light_enough(plan.with_(precision=precision), add)
            if option is not None:
                self.options.setdefault(option.plan, option)

    def _light_enough(self, plan: Plan, add: Add) -> Option | None:
        if odd := problems(plan, self.cluster.size):
            return Option(str(plan), refused=f"{odd[0].what} ({odd[0].got})")
        cut = {axis: getattr(plan, axis) for axis in ("tp", "cp", "pp") if getattr(plan, axis) > 1}
        if why := next((why for (axis, by), why in self.never.items() if cut.get(axis, 1) % by == 0), ""):
            return Option(str(plan), refused=why)
        last: Option | None = None
        wanted = lambda plan: all(getattr(plan, name) == value for name, value in self.fixed.items())
        for one in filter(wanted, (plan, *lighter(plan, self.cluster.size, self.rows))):
            if last and last.peak and _least(last, one) > self.memory:
                continue
            add(1)
            option = rehearsed(self.looked_at, one, self._taking)
            if not option.refused:
                return option
            if not option.peak and one is plan:  # this program cannot have it, in whatever form
                if len(cut) == 1:
                    self.never[next(iter(cut.items()))] = option.refused
                return option
            last = option
        return last

    def _taking(self, plan: Plan) -> Option:
        each = -(-self.rows // plan.accumulate)
        counts = (2, 3) if plan.accumulate > 3 else (plan.accumulate,)
        runs = [rehearse(replace(self.program, batch=widened(self.program.batch, each * n)), plan.with_(accumulate=n)) for n in counts]
        self._need_cut(plan, runs[0], each)
        self.operations += sum(len(run.calls) for found in runs for run in found.ranks)
        first, last = (promised(self.cluster, runs[i]) for i in (0, -1))
        parts = {name: one + (plan.accumulate - counts[0]) * (last[name] - one) for name, one in first.items()}
        reads = ", ".join(runs[-1].reads)
        option = Option(str(plan), runs[-1].peak, runs[-1].states, step_seconds(self.cluster, parts), parts, reads=reads)
        need = HEADROOM * option.peak
        return option if need <= self.memory else replace(option, refused=f"{size(need)} a device, and {size(self.memory)} are there")

    def _need_cut(self, plan: Plan, found: Rehearsal, rows: int) -> None:
        """SoliError where ranks of tp or cp compute what one would alone: as many products as without them."""
        if plan.cp * plan.tp > 1 and plan.model_ranks in (plan.cp, plan.tp):
            alone = rehearse(replace(self.program, batch=widened(self.program.batch, rows)), Plan(dp=plan.dp, precision=plan.precision))
            flops = lambda one: sum(call.flops for call in one.ranks[0].calls)
            if flops(found) >= flops(alone):
                raise SoliError(f"{'cp' if plan.cp > 1 else 'tp'}={plan.model_ranks} cuts nothing of this program")


def _least(known: Option, plan: Plan) -> float:
    """Bytes that a plan takes at the least which differs from a known one in smaller microbatches alone; else 0."""
    before = Plan.parse(known.plan)
    if before.with_(accumulate=1) != plan.with_(accumulate=1):
        return 0.0
    return HEADROOM * (known.states + (known.peak - known.states) * before.accumulate / plan.accumulate)


def standing(model: nn.Module, batch: Any, loss_fn: LossFn) -> Program:
    """The program, whose tensors may be of the meta device: weights take addresses then and no memory, others are zeros. Of the batch one row."""
    made: dict[int, nn.Parameter] = {}
    stand = lambda x: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) and x.is_meta else x
    weight = lambda p: nn.Parameter(untouched(p.shape, p.contiguous().stride(), p.dtype), p.requires_grad)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                module._parameters[name] = made.setdefault(id(param), weight(param))
        module._buffers |= {name: stand(buffer) for name, buffer in module._buffers.items()}
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained or not rows_of(batch):
        raise SoliError("the batch has no row" if trained else "the model has no parameter that is trained")
    return Program(model, torch.optim.AdamW(trained, foreach=True), loss_fn, tree_map(stand, take(batch, 0, 1)), backend="nccl", device="cuda")


def reasons(options: list[Option]) -> list[str]:
    """Why plans cannot be: each reason, with its first plan and how many more have it."""
    plans = {why: [o.plan for o in options if o.refused == why] for why in dict.fromkeys(o.refused for o in options if o.refused)}
    return [f"{some[0]}{f' and {len(some) - 1} more' if len(some) > 1 else ''}: {why}" for why, some in plans.items()]

"""`plan="auto"`: every layout rehearsed, timed on this machine as it was measured, and the quickest that fits.

1. All ranks rehearse their share of the layouts, and then of the variants of the best ones (planner/candidates.py).
2. What a rehearsal keeps is exact; a plan that would not fit becomes a lighter one, or none.
3. The machine is measured once (calibrate.py), with the products that this program has; then each plan has a time.
4. No plan is begun that was not run on a copy: what takes more than there is, or computes something else, is not
   begun. One that cuts blocks, or for which memory is short, is run for a few steps, and where it is slower than
   predicted it says how much of the others (planner/learn.py); what is promised to be nearly as quick is run too.
   `auto=probe` so tries the best three different layouts at the least, what is beside the best in its layout, and the
   best of what was run twice more.
"""

import gc
import time
from collections import Counter
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from soli.core import copies
from soli.core.errors import Problem, SoliError, in_a_line, on_all_ranks, raise_all
from soli.core.events import events
from soli.core.plan import Plan
from soli.core.progress import busy
from soli.engine.calibrate import CHANGED, calibrated, clock, free_memory, with_products
from soli.engine.deciding import Choice, Option, fitting, ordered, rehearsed, size
from soli.engine.engine import Engine
from soli.engine.rehearse import Program, rehearse, unseen, widened
from soli.engine.taken import HEADROOM, Taken, is_beyond
from soli.mesh.collectives import all_reduce, barrier, extreme, gather_json
from soli.mesh.mesh import Mesh, build_mesh
from soli.mesh.world import World, passing_groups
from soli.parallel.init import is_deferred
from soli.planner.candidates import bases, differences, lighter, variants
from soli.planner.learn import Learnt
from soli.planner.legality import plain
from soli.planner.machine import Machine, estimate
from soli.planner.rehearsal import Rehearsal

TIGHT = 0.5
"""Of the free memory: a plan that is to take more is run for a few steps before others are taken for slower."""
NEAR = 1.4
"""Layouts that are up to so many times slower than the best have their variants rehearsed too."""
LAYOUTS = 3
SURELY = 8
"""What parameters take so many times over is room enough for them, their gradients and an optimizer's states."""
DOUBT = 1.25
"""What is predicted to be up to so many times slower than the best that was run may be the quicker one: it is run too."""
PROBE_STEPS = 4
PACE_STEPS = 5
MOST_PROBES = {"auto": 6, "probe": 12}
AROUND = 4
"""Of `auto=probe`: so many plans that differ from the best in one choice are run, whatever was predicted of them."""
FINALISTS = 4
FINAL_ROUNDS = 2
FINAL_SECONDS, FINAL_STEPS = 2.0, 12
"""Of `auto=probe`: so many of the plans that were run, within DOUBT of the best, are run so often again, in turns, each for so long:
short steps are told apart by many of them, of which there are no more than so many."""


class Auto:
    """One decision, on every rank of a job. Collective."""

    def __init__(self, program: Program, world: World, rows: int, memory: float | None, probes: int) -> None:
        self.program, self.world, self.rows, self.probes = program, world, rows, probes
        self.mesh: Mesh = build_mesh(Plan(dp=world.size), world)
        self.memory = memory or free_memory(world, self.mesh)
        self.options: dict[str, Option] = {}
        self.machine: Machine | None = None
        self.rehearsals: dict[str, Rehearsal] = {}  # this rank's share
        self.looked_at: dict[str, Option] = {}  # by this rank, what does not fit among them
        self.notes: list[str] = []
        self.paced: float | None = None
        self.learnt = Learnt()
        self.varied: set[str] = set()  # layouts whose variants were looked at
        self.beyond: list[str] = []  # of plans that took more than rehearsed and than there is
        self.broken: dict[str, Problem] = {}  # why plans that fit did not run

    def choose(self) -> Choice:
        """The plan. SoliError where none fits."""
        start = time.perf_counter()
        with busy("choosing a plan", shown=self.world.is_first):
            self._need_room()
            self._look(self._layouts())
            if self.world.size > 1:
                self._probe()
            if self.probes > 1:
                self._climb()
                self._finish()
        while (order := fitting(self.options)) and not order[0].taken and not self._holds(order[0]):
            continue  # with the next one
        order = fitting(self.options)  # with what that run has told of the best
        return self._none() if not order else Choice(Plan.parse(order[0].plan), ordered(self.options), self.memory, self._lines(order, start))

    def _need_room(self) -> None:
        """SoliError where what one step leaves to the next is too much, however it is cut: before what takes long."""
        ranks = self.world.size
        if SURELY * sum(p.nbytes for p in self.program.model.parameters()) <= ranks * self.memory:
            return
        try:
            kept = rehearse(self.program, Plan(dp=ranks)).states
        except Exception:  # of somebody's program; where no layout can be rehearsed it is told
            return
        if kept > ranks * self.memory:
            raise self._too_large(kept / ranks, f"{size(kept)} of parameters, gradients and the optimizer's states, of which each of {ranks} ranks had an equal part and nothing else")

    def _too_large(self, least: float, got: str) -> SoliError:
        what = f"no plan fits: the least takes {size(least)} a rank, and {size(self.memory)} are free"
        return on_all_ranks(what, got=got, fix="more ranks, a smaller global batch, or less beside it on these devices")

    def _layouts(self) -> list[Plan]:
        """Those that any batch can go through, however few rows it has."""
        return bases(self.world.size, self.rows, grids=False)

    # --- rehearsals -----------------------------------------------------------------------------------

    def _look(self, plans: list[Plan], again: bool = False) -> None:
        """Rehearse plans, or lighter ones in their place, each rank its share; and time them. Collective."""
        new = [plan for plan in plans if again or str(plan) not in self.options]
        mine = [self._light_enough(plan) for plan in new[self.world.rank :: self.world.size]]
        if self.world.size > 1:
            self._measure()
        timed = [asdict(self._timed(option)) for option in mine]
        for options in gather_json(timed, self.mesh.all, label="plans"):
            for option in options:
                # what a run has said of a plan stands, whatever was looked at since
                self.options.setdefault(option["plan"], Option(**option))

    def _light_enough(self, plan: Plan) -> Option:
        """The first of a plan and its lighter forms that fits and did not fail; or the last, refused."""
        last = Option(str(plan))
        for one in (plan, *lighter(plan, self.world.size, self.rows)):
            option = self.options.get(str(one)) or rehearsed(self.looked_at, one, self._taking)
            if not option.peak:  # this program cannot have it
                if one is plan:
                    return option
                continue
            need = self._need(option)
            if need <= self.memory and not option.refused:
                return option
            last = replace(option, refused=option.refused or f"{size(need)} a rank, and {size(self.memory)} are free")
        return last

    def _taking(self, plan: Plan) -> Option:
        found = rehearse(self.program, plan)
        reads, writes = ", ".join(found.reads), ", ".join(found.writes)
        option = Option(str(plan), peak=found.peak, states=found.states, reads=reads, writes=writes)
        if self._need(option) <= self.memory:
            self.rehearsals[option.plan] = found
        return option

    def _measure(self) -> None:
        """The machine, and the products of the plans that this rank and others rehearsed. Collective."""
        if self.machine is None:
            self.machine, fresh = calibrated(self.world, self.mesh)
            self.notes.append("this machine was measured now" if fresh else "this machine as it was measured before")
        mine, everyone = Counter[str](), Counter[str]()
        for call in (call for found in self.rehearsals.values() for run in found.ranks for call in run.calls):
            mine[call.key] += call.flops
        for said in gather_json(+mine, self.mesh.all, label="products"):  # without those that are no products
            everyone.update(said)
        machine = with_products(self.world, self.mesh, self.machine, everyone)
        self.machine = machine if self.paced is not None else self._pace(machine)

    def _pace(self, machine: Machine) -> Machine:
        """The machine with operations as quick as this program's are: one step of a rank's share, without the others.

        What is no product is launched by the user's modules, autograd and the optimizer, at their own pace. Collective.
        """
        share = replace(self.program, batch=widened(self.program.batch, max(self.rows // self.world.size, 1)))
        found, self.paced = self._alone(share), 1.0
        if found is None:
            self.notes.append("one rank cannot run the program alone, so its operations are timed as any others")
            return machine
        alone = World(0, 1, self.world.device, "single", self.world.deadline)
        barrier(self.mesh.all)
        spent = trial(share, Plan(dp=1), alone, PACE_STEPS)[0]
        spent = extreme(spent, self.mesh.all, "max", label="seconds of a step alone")
        made = estimate(found, machine)
        self.paced = min(max((spent - made.products) / made.others, 0.5), 50.0)
        return replace(machine, launch=machine.launch * self.paced, stream=machine.stream / self.paced)

    def _alone(self, share: Program) -> Rehearsal | None:
        """The program on one rank; None where some rank cannot hold it, or it cannot be rehearsed so. Collective."""
        try:
            found: Rehearsal | None = rehearse(share, Plan(dp=1))
        except Exception:
            found = None
        fits = found is not None and self._need(Option("", found.peak, found.states)) <= self.memory
        return found if all(gather_json(fits, self.mesh.all, label="whether it fits")) else None

    def _timed(self, option: Option) -> Option:
        found = self.rehearsals.get(option.plan)
        if found is None or self.machine is None:
            return option
        parts = estimate(found, self.machine).parts
        return replace(option, seconds=self.learnt.seconds(parts), parts=parts)

    # --- trials ---------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """Run plans and learn from each, until the best is one that needs no trial or had one."""
        for number in range(MOST_PROBES["probe" if self.probes > 1 else "auto"]):
            self._vary()
            option = self._next(number)
            if option is None:
                return
            if self._holds(option, PROBE_STEPS):
                self.learnt.see(option.parts, self.options[option.plan].measured)
                for one in list(self.options.values()):
                    if one.parts and not one.measured:
                        self.options[one.plan] = replace(one, seconds=self.learnt.seconds(one.parts))
        self._vary()

    def _climb(self) -> None:
        """Run what differs from the best that was run in one choice, and go on from whatever is better: forms of one layout
        differ by less than predictions of them are off."""
        for _ in range(AROUND):
            order = fitting(self.options)
            best = next((o for o in order if o.measured), None)
            open_ = [o for o in order if best and not o.measured and o.seconds <= CHANGED * best.measured]
            beside = [o for o in open_ if best and differences(Plan.parse(o.plan), Plan.parse(best.plan)) == 1]
            if not beside:
                return
            self._holds(min(beside, key=lambda o: o.seconds), PROBE_STEPS)

    def _finish(self) -> None:
        """Run the best of the plans that were run again, in turns: a few steps do not tell apart what is nearly alike. Each has the median then."""
        run = [o for o in fitting(self.options) if o.measured]
        near = [o.plan for o in run if o.measured <= DOUBT * run[0].measured][:FINALISTS]
        if len(near) < 2:
            return
        spent = {plan: [self.options[plan].measured] for plan in near}
        steps = max(PROBE_STEPS, min(round(FINAL_SECONDS / run[0].measured), FINAL_STEPS))
        for _ in range(FINAL_ROUNDS):
            for plan in near:
                if not self.options[plan].refused and self._holds(self.options[plan], steps):
                    spent[plan].append(self.options[plan].measured)
        for plan, seconds in spent.items():
            self.options[plan] = replace(self.options[plan], measured=median(seconds))

    def _vary(self) -> None:
        """Rehearse the variants of the layouts that are near the best, and of data parallelism."""
        order = {str(layout_of(o)): o for o in reversed(fitting(self.options))}  # of each layout the best
        near = sorted(order.items(), key=lambda one: one[1].time)[:LAYOUTS]
        limit = NEAR * min((o.time for _, o in near), default=0.0)
        usual = [(name, o) for name, o in order.items() if _is_usual(o)]
        near = [one for one in near if one[1].time <= limit]
        new = [(name, o) for name, o in dict([*near, *usual]).items() if name not in self.varied]
        self.varied.update(name for name, _ in new)
        self._look([v for _, o in new for v in variants(Plan.parse(o.plan), self.world.size, self.rows)])

    def _next(self, number: int) -> Option | None:
        """What to run: data parallelism, in all its forms where plans are probed, and `probes` different layouts; then
        whatever may be the quickest, if it is to be tried."""
        order = fitting(self.options)
        known = {layout_of(o) for o in order if o.measured}
        open_ = sorted((o for o in order if not o.measured), key=lambda o: layout_of(o) in known)
        if not open_:
            return None
        best = min((o.measured for o in order if o.measured), default=0.0)
        # What anyone would have tried first; a collective may be so far from its calibration.
        usual = [o for o in order if _is_usual(o) and o.time <= CHANGED * best]
        if usual and not any(o.measured for o in usual):
            return usual[0]
        if self.probes > 1 and number < self.probes and layout_of(open_[0]) not in known:
            return open_[0]
        if not known:
            return order[0] if self._is_tried(order[0]) else None
        if self.probes > 1 and not all(o.measured for o in usual):
            return next(o for o in usual if not o.measured)
        return next((o for o in open_ if o.seconds <= DOUBT * best), None)

    def _holds(self, option: Option, steps: int = 1) -> bool:
        """Run a plan on a copy; whether it took no more memory than there is. Its time is noted. Collective."""
        if self.beyond:
            events.note(f"{option.plan} is tried next, of which {size(option.peak)} a rank were rehearsed", shown=self.world.is_first)
        problem = Problem("it failed on another rank")
        short = seconds = taken = 0.0
        try:
            seconds, taken = trial(self.program, Plan.parse(option.plan), self.world, steps)
        except (SoliError, torch.OutOfMemoryError) as error:  # such as a block that computes something else
            fix = error.problems[0].fix if isinstance(error, SoliError) else ""
            problem, seconds = Problem(in_a_line(error), fix=fix), torch.inf
            short = float(isinstance(error, torch.OutOfMemoryError))
        if seconds == torch.inf:
            gc.collect()  # with the error go the trial's groups, in which others may wait
        said = torch.tensor([seconds, taken, short], dtype=torch.float64)
        all_reduce(said, self.mesh.all, "max", label="seconds and bytes of a trial")
        seconds, taken, short = said.tolist()
        found = replace(option, taken=max(taken, option.taken))
        if short or (seconds < torch.inf and taken > self.memory):
            text = f"{found.told()} and more than the {size(self.memory)} that are free"
            if short:
                text = f"{option.plan} ran out of memory, of which {size(option.peak)} were rehearsed: {problem.what}"
            self.beyond.append(text)
            events.note(text, shown=self.world.is_first)
            found = replace(found, refused=text)
        elif seconds == torch.inf:
            self.broken[option.plan] = problem
            found = replace(option, refused=problem.what)
        elif steps > 1:  # the first has what is looked at once
            found = replace(found, measured=seconds)
        self.options[option.plan] = found
        if found.refused and option.plan not in self.broken:
            self._look(self._layouts(), again=True)  # a lighter form of it
        return not found.refused

    def _is_tried(self, option: Option) -> bool:
        """Whether others are run beside it if it is the best: little memory is left, rehearsals were wrong, the path
        depends on values, buffers change, or blocks are cut."""
        by_values = Plan.parse(option.plan).model_ranks > 1 or option.reads or option.writes
        return bool(by_values or self.beyond) or self._need(option) > TIGHT * self.memory

    def _need(self, option: Option) -> float:
        """Bytes that a plan is taken to need: what it took, or what it rehearsed and what allocators take beside."""
        return max(option.taken, HEADROOM * option.peak)

    # --- answers --------------------------------------------------------------------------------------

    def _none(self) -> Choice:
        """What is done where no plan is known to fit: an error, or data parallelism where nothing could be rehearsed."""
        if large := [o for o in self.options.values() if o.peak and o.plan not in self.broken]:
            run = [o for o in large if o.refused in self.beyond]  # what others would take beside their rehearsal is not known
            nearest = min(run or large, key=self._need)
            told = [f"{o.plan} took {size(o.taken)}" if o.taken else o.refused for o in sorted(run, key=self._need)]
            got = f"{nearest.plan} on {self.world.size} ranks, " + ("as it was run" if run else "as it was rehearsed")
            raise self._too_large(self._need(nearest), "; ".join([got, *told, *self._broken()]))
        if self.broken:
            raise_all([Problem("no plan runs this program as it is"), *self._problems()], everywhere=True)
        plan, line = plain(self.world.size, "the program cannot be rehearsed")
        why = "; ".join(dict.fromkeys(o.refused for o in self.options.values()))
        return Choice(plan, ordered(self.options), self.memory, [line, why[:600]], plain=True)

    def _lines(self, order: list[Option], start: float) -> list[str]:
        """The decision in three lines."""
        best = order[0]
        took = "nothing to choose"
        if best.time:
            how = "measured" if best.measured else "predicted"
            took = (f"{best.time:.3g} s" if best.time >= 1 else f"{best.time * 1e3:.3g} ms") + f" a step {how}"
        others = [o for o in order[1:] if layout_of(o) != layout_of(best)][:3]
        slower = lambda o: o.time / best.time - 1
        beside = ", ".join(f"{o.plan} {slower(o):+.0%}" for o in others if best.seconds) or "nothing else"
        refused = [o for o in self.options.values() if o.refused]
        notes = [*self.notes, *self._unrun()]
        if is_beyond(best.taken, best.peak):
            notes.append(best.told())
        if best.reads:
            notes.append(f"layers read values, rehearsed as 0, and may take more than was said: {best.reads[:300]}")
        return [
            f"plan auto -> {best.plan}: {took} of {self.rows} rows, {size(best.peak)} of {size(self.memory)} a rank",
            f"beside it: {beside}",
            f"{len(self.options)} plans rehearsed in {time.perf_counter() - start:.1f} s, {len(refused)} cannot be" + "".join(f"; {note}" for note in notes),
        ]  # fmt: skip

    def _unrun(self) -> list[str]:
        """Of plans that were run and cannot be, why."""
        return [*self.beyond, *self._broken()]

    def _broken(self) -> list[str]:
        return [f"{problem.got} did not run: {problem.what}" for problem in self._problems()]

    def _problems(self) -> list[Problem]:
        """Why plans that fit did not run; of each reason, which."""
        plans: dict[Problem, list[str]] = {}
        for plan, problem in self.broken.items():
            plans.setdefault(problem, []).append(plan)
        return [replace(problem, got=", ".join(some)) for problem, some in plans.items()]


def choose(program: Program, world: World, rows: int, *, memory: float | None = None, probes: int = 1) -> Choice:
    """The plan for a program on the ranks of this job, the same on all of them. Collective.

    `rows`: of the global batch. `memory`: bytes that a rank may take; left out, what is free. `probes`: how many plans
    are really run for a few steps. SoliError where no plan fits.
    """
    return Auto(program, world, rows, memory, probes).choose()


def trial(program: Program, plan: Plan, world: World, steps: int) -> tuple[float, float]:
    """Seconds of a step and bytes that it took, of a copy that is laid over the ranks, and forgotten. Collective."""
    model, optimizer = _copied(program)
    with passing_groups(), unseen():
        taken = Taken(world.device, model, optimizer)
        if world.size > 1:  # an error ends the groups that a trial has, and the job's is not to be among them
            world = replace(world, group=dist.new_group(timeout=timedelta(seconds=world.deadline)))
        engine = Engine(model, program.loss_fn, optimizer, None, program.clip, plan, 0, world, program.roles)
        spent = []
        for _ in range(steps):
            spent.append(clock(partial(engine.step, program.batch), world.device))
            barrier(engine.mesh.all)
        most = taken.most()
    del engine, model, optimizer, world
    gc.collect()  # after the groups have ended: they refer to themselves, as modules do
    return median(spent[1:] or spent), most


def _copied(program: Program) -> Any:
    """The model and its optimizer once more; a deferred parameter is made again from the same record."""
    deferred = filter(is_deferred, program.model.parameters())
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in deferred}
    return copies.deep((program.model, program.optimizer), memo)


def layout_of(option: Option) -> tuple[Any, ...]:
    plan = Plan.parse(option.plan)
    return plan.dp, plan.tp, plan.tensor, plan.cp, plan.pp


def _is_usual(option: Option) -> bool:
    """Whether its ranks share nothing but the batch."""
    return Plan.parse(option.plan).model_ranks == 1

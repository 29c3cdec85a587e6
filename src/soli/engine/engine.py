"""The Engine: one training program, the same calls on one device and on many ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from soli.core.errors import Problem, on_all_ranks, raise_all
from soli.core.events import events
from soli.core.plan import Plan
from soli.core.progress import busy
from soli.engine import agreed, between, contract, deciding, layout, microbatch, norm, pipelined, rng, same, withheld
from soli.engine import optimizer as optimizers
from soli.engine import state as states
from soli.engine.batch import Caller, Part, as_dict, microbatches, need_rows, need_tensors, part_of, rows_of, to_device
from soli.engine.check import FirstStep
from soli.engine.data import Order, Position, Stream, need_asked
from soli.engine.deciding import PROBES, Choice, Wish
from soli.engine.differentiating import looking
from soli.engine.noted import noted
from soli.engine.remembered import Remembering
from soli.losses import LossFn, from_model
from soli.mesh.collectives import Axis, Pending, raise_together
from soli.mesh.mesh import Mesh, all_ranks, build_mesh
from soli.mesh.world import join
from soli.parallel import models, precision, recompute
from soli.parallel.apply import Parallel, apply
from soli.parallel.context import sequence
from soli.parallel.data import DataParallel, agree_on_weights
from soli.parallel.pipeline.run import Pipeline
from soli.parallel.randomness import Randomness
from soli.parallel.statistics import Statistics, alone
from soli.parallel.tensor.cut import Run, running
from soli.parallel.units import named_once
from soli.planner.legality import resolve

SUM_TO_MEAN = 4096.0


@dataclass
class Last:
    """What is known of the newest step."""

    loss: float = float("nan")
    count: int = 0
    grad_norm: float | None = None
    skipped: bool = False
    seconds: float = 0.0


def parallelize(
    model: nn.Module, loss_fn: LossFn | None = None, *, optimizer: optimizers.Factory | torch.optim.Optimizer,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None, clip: float | None = None, plan: str | Plan = "auto", seed: int = 0,
    deadline: float | None = None, roles: dict[str, str] | None = None, example: Any = None, rows: int | None = None, memory: float | None = None,
) -> Engine:  # fmt: skip
    """Lay a plain model over all ranks of this job. Collective; the model's parameters are taken over.

    `loss_fn(output, batch) -> (total, count)`; left out, the model's own `output.loss` is used (Hugging
    Face causal models). `optimizer`: a torch optimizer on this model, or a function of its parameters.
    `scheduler`: a function of the optimizer; it is stepped once a step and saved with it. `clip`: the
    largest norm of the gradient. `plan`: "auto", "auto=probe", text such as "dp=2,zero=1", or a Plan. `seed`: of
    dropout and of the order of the data. `deadline`: seconds a rank waits in a collective.

    With tp > 1 what each weight is (a column, a row, a vocabulary), and with pp > 1 where the model may be cut into
    stages, is found by running it on a few rows of `example`, a batch; left out, of the first batch. `roles` says it instead for weights whose names match:
    {"*.out_proj": "replicated"}; also "column", "row", "vocabulary".

    "auto" decides when it sees a batch: `example`, which stands for a global one of `rows` rows, or the first.
    `memory`: bytes that a rank may take; left out, what is free. "auto=probe" also runs the best plans for a few steps.
    """
    world = join(deadline)
    asked = {
        "model is a module": (isinstance(model, nn.Module), model, "a torch.nn.Module"),
        "plan is a text or a Plan": (isinstance(plan, str | Plan), plan, "such as dp=2,zero=3"),
        "memory is of bytes that a rank may take": (memory is None or _above_0(memory), memory, "above 0"),
        "rows of a global batch are a whole number": (rows is None or (hasattr(rows, "__index__") and rows > 0), rows, "1, 2, 3, ..."),
        "roles has a kind for each pattern": (isinstance(roles or {}, Mapping) and all(isinstance(x, str) for one in (roles or {}).items() for x in one), roles, '{"*.out_proj": "replicated"}'),
        "seed is a whole number": (hasattr(seed, "__index__"), seed, "0, 1, 2, ..."),
        "clip is the largest norm of the gradient": (clip is None or _above_0(clip), clip, "above 0, or None: no clipping"),
    }
    raise_all((Problem(what, f"{x!r}"[:200], allowed) for what, (fine, x, allowed) in asked.items() if not fine), everywhere=True)
    wish = Wish(PROBES[plan], memory) if isinstance(plan, str) and plan in PROBES else None
    chosen = Plan(dp=1)  # stands for any, where the plan is wished for
    if wish is None:
        chosen = resolve(Plan.parse(plan) if isinstance(plan, str) else plan, world.size)
    raise_all(problems(model, roles, chosen) + contract.problems(loss_fn), everywhere=True)
    made = optimizers.build(optimizer, model)
    given = {"plan": str(plan if wish else chosen), "clip": clip, "seed": seed, "loss": loss_fn, "scheduler": scheduler}
    agreed.need_same_program(model, made, given, all_ranks(world))
    raise_all(optimizers.problems(made, model, chosen), everywhere=True)
    with busy(f"laying the model over {world.size} ranks", shown=world.is_first and wish is None):
        engine = Engine(model, loss_fn or from_model(), made, scheduler, clip, wish or chosen, seed, world, roles or {})
        if example is not None:
            example = engine.decide(batch := as_dict(example), rows or rows_of(batch))
            engine.lay(deciding.enough(example, engine.dp.size))
        return engine


def problems(model: nn.Module, roles: dict[str, str] | None, plan: Plan) -> list[Problem]:
    """What keeps this model from this plan, all of it."""
    return models.problems(model, plan) + recompute.problems(model, plan) + layout.problems(roles, model)


def _above_0(number: Any) -> bool:
    return (isinstance(number, Real) or (isinstance(number, Tensor) and number.numel() == 1)) and bool(number > 0)  # type: ignore[operator]


class Engine:
    """See `parallelize`. `step` is the whole of a step; its three parts can be called one by one instead."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, optimizer: torch.optim.Optimizer,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None, clip: float | None, plan: Plan | Wish, seed: int,
        world: Any, roles: dict[str, str],
    ) -> None:  # fmt: skip
        self.model, self.world_info, self.seed, self.max_norm = model, world, seed, clip
        self.rank, self.world, self.device = world.rank, world.size, world.device
        self.tied = {n: names[0] for names, _ in named_once(model) for n in names[1:]}
        self.parallel: Parallel | None = None
        self.pipeline: Pipeline | None = None
        self.to_load: tuple[Path, list[int]] | None = None  # a checkpoint that waits for the model to be laid over the ranks
        self.hints, self.optimizer = roles, optimizer
        self.scheduler = optimizers.scheduled(scheduler, optimizer)
        self.loss_fn, self._call = Remembering(loss_fn, blind=world.absent is not None), Caller(model)
        self.step_count, self.last = 0, Last()
        self.positions: dict[str, Position] = {}
        self._uncached = False  # whether a model's key-value caches were turned off, and no batch was looked at since
        self.numel = sum(param.numel() for param in model.parameters())
        self._first, self._given, self._agreed = FirstStep(), between.Given(model, optimizer), agreed.Agreement()
        self._count, self._seed_scale, self._factor = 0.0, 1.0, 1.0  # counted targets of the gradients that wait for update()
        self._norm: float | None = None
        self._gathers: list[Pending] = []
        self._save_group: Any = None
        self.saving: Any = None
        self.choice: Choice | None = None  # of plan="auto"
        self._watch: deciding.First | None = None  # until its first step
        self._plan: Plan | None = None
        self._wish = plan if isinstance(plan, Wish) else Wish(1, None)
        if isinstance(plan, Plan):
            self._begin(plan)

    def _begin(self, plan: Plan) -> None:
        self._plan = plan
        self._mesh = build_mesh(plan, self.world_info)
        self.randomness = Randomness(self.model, self.seed)
        self.randomness.shared = plan.pieces * plan.pp > 1
        self.randomness.apart = (plan.dp or 1) * plan.accumulate * plan.microbatches > 1
        self.statistics = Statistics(self.model, plan, self._mesh)
        self.loss_scale = precision.LossScale() if plan.precision == "fp16" else None
        if plan.model_ranks == 1:
            self.lay(None)

    def decide(self, batch: Any, rows: int) -> Any:
        """With plan="auto", choose the plan for batches like this one, of which a global one has so many rows, once. The batch in the plan's precision."""
        if self._plan is None:
            deciding.decide(self, batch, rows)
        return deciding.widened(batch, self.plan)

    @property
    def plan(self) -> Plan:
        """How the model is split. With plan="auto" and no batch yet it is data parallelism, and that is said."""
        if self._plan is None:
            deciding.without_batch(self)
        return cast(Plan, self._plan)

    @property
    def mesh(self) -> Mesh:
        """The ranks as the plan lays them out."""
        if self._plan is None:
            deciding.without_batch(self)
        return self._mesh

    def lay(self, example: Any) -> None:
        """Lay the model over the ranks, once. `example`: a batch, from which layout and stages are learnt."""
        if self.parallel is None:
            self._lay(example)

    @noted
    @rng.kept()
    def _lay(self, example: Any) -> None:
        models.must_be_free(self.model)
        between.need_unwritten(self)
        self._uncached = models.without_caches(self.model, self.plan, shown=self.rank == 0)
        agree_on_weights(self.model, self.optimizer, self.mesh.all)  # before what compares ranks, or computes on them
        if self.plan.model_ranks > 1:
            agreed.marks(self, example)
            agreed.need_same_rows(self, same.mark(self, example), "before the first step")
        # before what looks at types, or compares with the model as it is
        precision.cast(self.model, self.plan)
        self._first.before(self, example)
        roles = layout.roles_of(self, example) if self.plan.tp > 1 else None
        sample = same.sample(self, example) if self.plan.model_ranks > 1 else None
        # The last that the whole model runs: what it leaves in attributes is known by its marks.
        cutting = pipelined.cutting_of(self, example) if self.plan.pp > 1 else None
        self.parallel = apply(self.model, self.plan, self.mesh, roles, cutting)
        optimizers.exchange(self.optimizer, self.laid.slots, self.laid.absent)
        optimizers.guard(self.optimizer, self.plan)
        self._given.laid(self.optimizer)
        if cutting is not None:
            self.pipeline = pipelined.build(self, cutting)
        if sample is not None:
            same.check_loss(self, sample)
            sequence.check_begun(self.parallel.context, sample.rows, self.mesh["pp"])
        if self.to_load is not None:
            states.fill(self, self.to_load[0])

    @property
    def laid(self) -> DataParallel:
        """How the parameters lie on the ranks."""
        if self._plan is None:
            deciding.without_batch(self)
        if self.parallel is None:
            what = "with tp, pp or cp > 1 the model is laid over the ranks when it has seen a batch, and there was none yet"
            raise on_all_ranks(what, fix="give soli.parallelize(..., example=batch)")
        return self.parallel.data

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around the model and its loss: cut tensors are logical ones, and the plan's precision holds."""
        looks, casts = looking(self.plan, self.step_count), precision.computing(self.plan, self.device)
        torch.clear_autocast_cache()  # of a program's own autocast around a step: casts of another forward are of another graph
        with running(self._levels()), casts, looks, self.statistics.computing(), alone():
            yield
        torch.clear_autocast_cache()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a backward, which may recompute: torch's checkpoint restores the precision itself."""
        with running(self._levels()), self.statistics.computing(), alone(), recompute.explained():
            yield

    def _levels(self) -> list[Run]:
        return [] if self.parallel is None else self.parallel.levels

    @property
    def dp(self) -> Axis:
        return self.mesh.dp

    # --- a step ---------------------------------------------------------------------------------------

    def step(self, batch: Any) -> Tensor:
        """One optimizer step on a global batch. Returns its loss: a 0-d float64 tensor, equal on every rank."""
        began = time.perf_counter()
        loss = self._gradients(batch)
        self.clip()
        self.update()
        self.last.seconds = time.perf_counter() - began
        return loss

    def forward_backward(self, batch: Any) -> Tensor:
        """Gradients of the mean loss over the counted targets of the global batch, summed over all ranks. They are `global_gradients()`'s."""
        loss = self._gradients(batch)
        withheld.fill(self.model, True)
        return loss

    @noted
    def _gradients(self, batch: Any) -> Tensor:
        if self._count:
            fix = "to add up gradients over parts of a batch, give the whole batch and plan='accumulate=K'; engine.discard() leaves a step out"
            raise on_all_ranks("forward_backward was called twice without update()", fix=fix)
        raise_all(self._given.problems(self), everywhere=True)
        batch = self.decide(as_dict(batch), batch.total if isinstance(batch, Part) else 0)
        part = part_of(batch, self.dp.size, self.dp.index, later=bool(self._first.modes))
        need_rows(part, self.dp.size, self.plan, self.statistics.active)
        need_tensors(batch, part, self.plan.accumulate * self.plan.microbatches)
        self.lay(part)
        if self._uncached:
            self._uncached = False
            raise_together(lambda: models.need_one_document(part.data, self.plan), self.mesh.all, label="whether rows are packed")
        self._agreed.begin(self, batch)
        pieces = microbatches(part, self.dp.size, self.plan)
        self._given.begin(self)
        self._finish_gathers()
        if self._first.wanted(self.model, part, self.dp.size):
            with rng.kept():
                self._first.check(self, part)
        recompute.look(self, self.mesh.all.simulated)
        if self._watch is not None:
            self._watch.begin(self)
        if self.loss_scale is not None:
            # A sum over thousands of targets has larger gradients than the mean the scale is meant for.
            self._seed_scale = self.loss_scale.scale / SUM_TO_MEAN
        with self.loss_fn.step(), self.laid.reducer.step():
            if self.pipeline is None:
                return self._agree(*microbatch.all_of(self, pieces))
            with recompute.holding(self.plan):
                found = pipelined.forward_backward(self, self.pipeline, pieces)
        recompute.forget()
        return self._agree(*found)

    @property
    def seed_of_loss(self) -> float:
        """The gradient that a microbatch's total starts with. Where several ranks have it, one counts it."""
        return self._seed_scale if self.mesh.seeds else 0.0

    def _agree(self, total: float, count: float) -> Tensor:
        """The loss, of all ranks' totals and counts, once they are seen to have taken the same step."""
        totals, self._count = self._agreed.sums(self, total, count)
        loss = totals.sum() / self._count
        self.last = Last(loss=float(loss), count=int(self._count))
        return loss

    def clip(self, max_norm: float | None = None) -> float | None:
        """Scale the gradients so that their global norm is at most `max_norm`; returns the norm before."""
        self._need_gradients("clip")
        limit = max_norm if max_norm is not None else self.max_norm
        if limit is not None and not _above_0(limit):
            raise on_all_ranks("gradients are clipped to a norm above 0", got=limit, fix="leave out clip() where nothing is clipped")
        self._agreed.limit = limit
        self._factor = 1.0 / (self._count * self._seed_scale) if self._norm is None else self._factor
        if limit is None and self.loss_scale is None:
            return None
        self._norm = norm.gradient_norm(self) * self._factor
        if self._norm - self._norm != 0 and self.loss_scale is None:
            norm.refuse(self)
        if limit is not None:
            self._factor *= min(1.0, limit / (self._norm + 1e-6))  # torch's clip_grad_norm_ has this 1e-6
        self.last.grad_norm = self._norm
        return self._norm

    def gradient_norm(self) -> float:
        """The 2-norm of the whole gradient, each parameter counted once."""
        self._need_gradients("gradient_norm")
        return norm.gradient_norm(self) / (self._count * self._seed_scale)

    def update(self) -> None:
        """The optimizer's step on this rank's shards, then the parameters that others need."""
        self._need_gradients("update")
        withheld.fill(self.model, False)
        if self._norm is None and self._factor == 1.0:
            self._factor = 1.0 / (self._count * self._seed_scale)
            self._norm = self.gradient_norm() if self.loss_scale is not None else None
        if self._norm is None or self._norm - self._norm == 0:
            self._take_step()
        self._end()

    def discard(self) -> None:
        """Leave the step out: the gradients of the last forward_backward are forgotten, and nothing is updated. On all ranks alike."""
        self._need_gradients("discard")
        self.last.skipped = True
        self._agreed.left_out += 1
        self._end()

    def _end(self) -> None:
        if self.loss_scale is not None:
            found = self.gradient_norm() if self._norm is None else self._norm
            overflow = found - found != 0
            self.loss_scale.after(overflow)
            if overflow:
                self.last.skipped, scale = True, self.loss_scale.scale
                events.emit("skip", step=self.step_count + 1, new_scale=scale)
                if self.rank == 0:
                    print(f"soli: step {self.step_count + 1} skipped on all ranks: fp16 overflow, loss scale now {scale:g}")
        norm.forget(self)
        self.step_count += 1
        self._agreed.end(self)
        same.agree_on_buffers(self)
        if self._watch is not None:
            self._watch.end(self)

    def _take_step(self) -> None:
        pieces = []
        for unit in self.laid.reducer.units:
            assert unit.grad_shard is not None, "every unit was reduced"
            if self._factor != 1.0:
                unit.grad_shard.mul_(self._factor)
            for slot in unit.slots:
                if slot.piece is not None and slot.used:
                    start, stop = (place - unit.low for place in unit.owned(slot))
                    with torch._C.DisableTorchFunctionSubclass():  # what is put beside a part is not the program's
                        slot.piece.grad = unit.grad_shard[start:stop].view(slot.piece.shape)
                    pieces.append(slot.piece)
        with pipelined.together_ending(self, alike=True):
            optimizers.step(self.optimizer)
        self._agreed.states = agreed.kept_states(self.optimizer)
        for piece in pieces:
            piece.grad = None
        if self.scheduler is not None:
            self.scheduler.step()
        self._gathers += [unit.spread() for unit in self.laid.units]
        self._finish_gathers()

    def _finish_gathers(self) -> None:
        while self._gathers:
            self._gathers.pop(0).wait()

    def _need_gradients(self, call: str) -> None:
        if not self._count:
            raise on_all_ranks(f"{call}() was called before forward_backward()")

    # --- data and evaluation --------------------------------------------------------------------------

    def batches(
        self, dataset: Any, global_batch: int, *, epochs: int | None = None, shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None, workers: int = 0, name: str | None = "train",
    ) -> Iterator[Part]:  # fmt: skip
        """This rank's part of each global batch, until so many epochs are through (None: this one). A named stream's position is kept and saved."""
        need_asked(given := dataset, global_batch, epochs, workers, shuffle)
        if self._plan is None:
            dataset, first = deciding.peek(dataset, min(global_batch, deciding.PEEKED), collate)
            self.decide(first, global_batch)
        position = self.positions.setdefault(name, Position()) if name is not None else Position()
        dp, leads = self.dp, self.rank == 0
        order = Order(global_batch, lambda: self.seed, shuffle, epochs, dp.size, dp.index, position, name, leads, given=given)
        return Stream(dataset, order, collate, workers)

    @noted
    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> float:
        """Mean loss over the counted targets of all batches (of a stream all, wherever it stands); the model in eval mode and no gradients."""
        self._finish_gathers()
        found, seen, rows = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), 0
        with between.modes_kept(self.model), self.loss_fn.going_on():
            self.model.eval()
            for batch in batches.anew() if isinstance(batches, Stream) else batches:
                batch = self.decide(as_dict(batch), 0)
                part = part_of(batch, self.dp.size, self.dp.index, later=True)
                need_rows(part, self.dp.size, self.plan, self.statistics.always)
                need_tensors(batch, part, 1)
                with torch.inference_mode(False), torch.enable_grad():  # the layout is checked with gradients
                    self.lay(part)
                self._first.evaluating(self, part)
                data = to_device(part.data, self.device) if part.rows else None
                with self.randomness.evaluating(self.step_count, rows + part.start, part.rows):
                    found += torch.tensor(self.forward_only(data), dtype=torch.float64)
                rows, seen = rows + part.total, seen + agreed.marks(self, batch)
        sums = agreed.evaluated(self, found, seen)
        if not sums[1]:
            raise on_all_ranks("no target was counted in the evaluation")
        return float(sums[0] / sums[1])

    @torch.no_grad()
    def forward_only(self, data: Any) -> tuple[float, float]:
        """Total and count of this rank's rows (None: none), in the model's mode. Under pp, on the last stage's rank."""
        gatherer = self.laid.gatherer
        if self.pipeline is not None:
            return pipelined.forward_only(self, self.pipeline, data)
        gatherer.begin_forward(training=False)
        total, count = 0.0, 0.0
        if data is not None:
            with self.loss_fn.filling(self.model), self.computing():
                found, count = microbatch.loss(self, data)
            total = float(found) if count else 0.0
        gatherer.end_forward()
        gatherer.end_pass()
        return total, count

    # --- state ----------------------------------------------------------------------------------------

    def global_state_dict(self, optimizer: bool = False) -> dict[str, Tensor]:
        """Whole tensors under the model's own names, on every rank (collective). `optimizer`: its tensors too."""
        self._finish_gathers()
        agreed.need_own(self)
        with busy("gathering whole tensors", shown=self.rank == 0):
            return states.global_state(self, optimizer)

    def global_gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients by name, between forward_backward() and update(); None where no rank used it."""
        self._need_gradients("global_gradients")
        return states.global_gradients(self, 1.0 / (self._count * self._seed_scale))

    def save(self, path: str | Path, *, extra: dict[str, Any] | None = None, overwrite: bool = False, wait: bool = True) -> None:
        """Write a checkpoint that loads under any plan. `wait=False` returns once the values are copied."""
        self._finish_gathers()
        agreed.need_same_path(self, Path(path))
        agreed.need_own(self)
        agreed.need_same_parameters(self)
        same.say_buffers(self)
        states.save(self, Path(path), extra or {}, overwrite, wait)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint, whatever plan wrote it. Returns the `extra` that was saved with it."""
        agreed.need_same_path(self, Path(path))
        return states.load(self, Path(path))

    def copy_model(self) -> nn.Module:
        """A plain copy of the model with whole weights, on every rank (collective)."""
        return states.copy_model(self)

"""Which stage runs which calls, so that the slowest is as fast as it can be; what crosses each border; who has what.

Legend: K calls of units in the order of the forward, S stages. A stage runs a contiguous run of calls and the glue
after each (stage 0 also the glue before the first). A value crosses the border before call c if it was made before
and is used from then on; a stage passes on what only later ones use.
"""

from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from soli.core.errors import SoliError, on_all_ranks
from soli.parallel.pipeline.units import Unit
from soli.parallel.pipeline.watch import Name, Trace

FLOPS_PER_PARAMETER = 200.0
"""What a parameter costs a step beside its products: optimizer, zeroing, reduction (memory-bound; about 64 bytes
moved, at some three operations a byte). It orders stages whose products cost the same."""


@dataclass(frozen=True)
class Stages:
    """The cut of one forward. `starts`: the first call of each stage; `costs` in flops of a step."""

    starts: tuple[int, ...]
    costs: tuple[float, ...]
    rank_of: tuple[int, ...]  # stage -> index on the pp axis

    @property
    def count(self) -> int:
        return len(self.starts)

    def of_call(self, call: int) -> int:
        return sum(start <= call for start in self.starts) - 1

    def of_gap(self, gap: int) -> int:
        return self.of_call(max(gap - 1, 0))

    def of_rank(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def incoming(self, trace: Trace, stage: int) -> list[Name]:
        """What stage `stage` is given by the one before it, in a fixed order."""
        border = self.starts[stage]
        return sorted(name for name, last in trace.last_use.items() if stage and name[0] <= border and last > border)


def cut(trace: Trace, units: list[Unit], rank_of: list[int], rows: float) -> Stages:
    """Balanced stages. `rows`: how many times the trace's rows a step has."""
    modules, costs = dict(units), []
    for number, call in enumerate(trace.calls):
        flops = trace.flops[number + 1] + (trace.flops[0] if number == 0 else 0.0)
        costs.append(3 * flops * rows + FLOPS_PER_PARAMETER * sum(p.numel() for p in modules[call.unit].parameters()))
    # Where Python looks at values, the path may turn: that is the last stage's, which has all that follows.
    limit = max(trace.first_read() - 1, 0)
    if limit < len(rank_of) - 1:
        raise _reads(trace, limit, len(rank_of))
    starts = balanced(costs, len(rank_of), limit)
    ends = [*starts[1:], len(costs)]
    return Stages(tuple(starts), tuple(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)), tuple(rank_of))


def balanced(costs: list[float], parts: int, limit: int | None = None) -> list[int]:
    """Where each of `parts` contiguous, non-empty runs starts, so that the largest sum is least.

    Among those, the one whose squares add up to least: the others are even too. The last starts at `limit` or before.
    """
    total, count = list(accumulate(costs, initial=0.0)), len(costs)
    best: dict[tuple[int, int], tuple[float, float, int]] = {(0, 0): (0.0, 0.0, 0)}
    for part in range(1, parts + 1):
        for end in range(part, count - (parts - part) + 1):
            options = []
            for start in range(part - 1, end):
                if (part - 1, start) in best and (part < parts or limit is None or start <= limit):
                    worst, squares, _ = best[part - 1, start]
                    size = total[end] - total[start]
                    options.append((max(worst, size), squares + size * size, start))
            if options:
                best[part, end] = min(options)
    starts, end = [], count
    for part in range(parts, 0, -1):
        end = best[part, end][2]
        starts.append(end)
    return starts[::-1]


def check_buffers(model: nn.Module, trace: Trace, stages: Stages) -> None:
    """Refuse buffers that would differ from stage to stage."""
    last = stages.count - 1
    bad = [name for name, gap in trace.written.items() if stages.of_gap(min(gap, trace.kept_reads.get(name, gap))) < last]
    bad += [name for name, _ in model.named_buffers() if name in trace.repeated and stages.count > len(set(stages.rank_of))]
    for name, changed_by in sorted(trace.changing.items()):
        ranks = {stages.rank_of[stages.of_call(k)] for k, call in enumerate(trace.calls) if call.unit in changed_by}
        bad += [name] if len(ranks) > 1 else []
    if bad:
        what = f"{bad[0]} is changed in the forward, and several stages have it"
        allowed = "buffers that one block has for itself, or that are read and changed after the last stage's begin"
        raise on_all_ranks(what, got=", ".join(bad), allowed=allowed, fix="change it inside a block that is called once, or use pp=1")
    for name, (read, changed) in early(trace, stages).items():
        if name not in trace.passing:
            what = f"{name} is read by a stage whose forward ends before it is changed: there it would stay as it is"
            got = f"read {trace.place(read)}, changed {trace.place(changed)}"
            allowed = "buffers and attributes that no stage reads before the one that changes them"
            raise on_all_ranks(what, got=got, allowed=allowed, fix="change it at the begin of the forward, or use pp=1")


def early(trace: Trace, stages: Stages) -> dict[str, tuple[int, int]]:
    """Buffers and attributes that an earlier stage reads than the one that changes them last: the gaps of both."""
    gaps = {name: (trace.kept_reads.get(name, last), last) for name, last in sorted(trace.repeated.items())}
    return {name: (read, last) for name, (read, last) in gaps.items() if stages.of_gap(read) < stages.of_gap(last)}


def check_hidden(trace: Trace, stages: Stages) -> None:
    """Refuse values that go from stage to stage unseen: what computes them would not run."""
    for made, used in sorted(trace.hidden):
        if stages.of_gap(made) != stages.of_gap(used):
            what = f"{trace.calls[used - 1].unit} can read a value that was made in {trace.calls[made - 1].unit} and is not among its arguments"
            allowed = "tensors in the arguments of blocks, in tuples, lists and dicts"
            fix = "let blocks return what they make, and pass that as an argument (a key-value cache: model.config.use_cache = False; a weight that a hook makes: torch.nn.utils.parametrizations), or use pp=1"
            raise on_all_ranks(what, got="a value in an object or an attribute", allowed=allowed, fix=fix)


def check_aliases(trace: Trace, stages: Stages) -> None:
    """Refuse memory that is written under one name and read under another on another stage."""
    for gaps in sorted(trace.aliased):
        if len({stages.of_gap(gap) for gap in gaps}) > 1:
            what = f"the forward writes into memory that several tensors share, {trace.place(gaps[1])}, between its blocks"
            got = "a view, a tensor of which there is a view, or out="
            raise on_all_ranks(what, got=got, allowed="x[...] = y and x += y on a tensor of its own", fix="make a new tensor there, or do it inside a block, or use pp=1")


def _reads(trace: Trace, limit: int, stages: int) -> SoliError:
    gap, name = min(trace.reads)
    where = trace.place(gap)
    what = f"the forward looks at a value ({name}) {where}, between its blocks: all that follows must be one stage"
    allowed = "Python that depends on what is in activations, inside the blocks or after the last one"
    return on_all_ranks(what, got=f"{limit + 1} stages at most, {stages} wanted", allowed=allowed, fix="do it inside a block, use a smaller pp, or pp=1")


def users(trace: Trace, stages: Stages) -> dict[int, set[int]]:
    """The pp ranks that use each parameter, by its id."""
    return {key: {stages.rank_of[stages.of_gap(gap)] for gap in gaps} for key, gaps in trace.uses_of.items()}


def buffer_owners(model: nn.Module, trace: Trace, units: list[Unit], stages: Stages) -> dict[str, int]:
    """The pp rank whose value of a buffer holds, where the others did not run what changes it. By the buffer's name."""
    found = {name: stages.rank_of[-1] for name in trace.repeated}  # it runs all that is between blocks
    found |= {name: stages.rank_of[stages.of_gap(gap)] for name, gap in trace.written.items()}
    modules = dict(units)
    for number, call in enumerate(trace.calls):
        for name, _ in modules[call.unit].named_buffers():
            found.setdefault(f"{call.unit}.{name}", stages.rank_of[stages.of_call(number)])
    return found


def requiring(model: nn.Module, trace: Trace, names: list[Name]) -> list[tuple[Name, bool]]:
    """Of each value whether it has a gradient: it is floating, and a parameter that trains was used before it."""
    trains = {id(p) for p in model.parameters() if p.requires_grad}
    first = min((min(gaps) for key, gaps in trace.uses_of.items() if key in trains), default=None)
    return [(name, trace.floating[name] and first is not None and first <= name[0]) for name in names]

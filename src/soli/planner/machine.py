"""What a machine was measured to do (engine/calibrate.py measures it), and how long a rehearsed step takes on it.

an operation        launch + bytes / stream; a product as it was measured, or as the likest measured one
a collective        interpolated over its bytes, by operation, ranks and the distance between them
a step              operations, collectives that are waited for, and of those that are not what nothing hides
a pipeline          its actions one after another as they depend on each other; ranks that share cores are
                    quicker while others wait
"""

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields

import numpy as np

from soli.planner.hollow import Call
from soli.planner.rehearsal import Action, RankRun, Rehearsal, Sent

LIKE = {"reduce": "broadcast", "broadcast": "all_gather", "exchange": "send", "all_to_all": "all_gather"}
"""What stands for an operation that was not measured."""
FREE = ("recv",)
"""Operations whose other side is counted."""


@dataclass(frozen=True)
class Machine:
    """Seconds, bytes and flops, measured while every rank does the same."""

    fingerprint: str
    ranks: int
    launch: float  # seconds of an operation beside what it moves
    stream: float  # bytes/s that operations read and write
    crowd: float  # how much longer a rank computes while all do than alone; 1 where each has its own device
    hidden: float  # share of a collective that is not waited for that runs behind computation
    flops: float  # flops/s of a large product
    optimizer: float  # parameters/s of AdamW
    host: float  # bytes/s from the device to the host's memory
    disk: float  # bytes/s to the disk
    issued: float = 0.0  # seconds in which a host launches an operation, where a device computes behind it
    products: dict[str, float] = field(default_factory=dict)  # Call.key -> seconds
    # "all_reduce 4x1" -> [bytes, seconds]
    collectives: dict[str, list[list[float]]] = field(default_factory=dict)

    def product(self, call: Call) -> float:
        """Seconds of a product: measured, or at the rate of the likest that was."""
        return self.products.get(call.key, self.launch + call.flops / self.flops)

    def operations(self, calls: Iterable[Call]) -> tuple[float, float]:
        """Seconds of products, and of all else."""
        products, others, counted = 0.0, 0.0, Counter(calls)
        for call, times in counted.items():
            if call.flops:
                products += times * self.product(call)
            else:
                others += times * (self.launch + call.bytes / self.stream)
        return products, max(others, self.issued * sum(counted.values()) - products)  # until all is launched the device waits for its host

    def collective(self, sent: Sent) -> float:
        """Seconds of one collective."""
        if len(sent.ranks) < 2 or sent.operation in FREE:
            return 0.0
        sizes, seconds = np.array(self._table(sent.operation, len(sent.ranks), sent.stride)).T
        if sent.bytes >= sizes[-1]:  # alpha and beta of the two largest
            rate = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            return float(seconds[-1] + max(rate, 0.0) * (sent.bytes - sizes[-1]))
        return float(np.interp(sent.bytes, sizes, seconds))

    def _table(self, operation: str, ranks: int, stride: int) -> list[list[float]]:
        """Of this group, or of the likest: the nearest in ranks, then in distance."""
        while not any(key.startswith(f"{operation} ") for key in self.collectives):
            operation = LIKE[operation]
        known = [key.split()[1].split("x") for key in self.collectives if key.startswith(f"{operation} ")]
        far = lambda one: (abs(math.log(int(one[0]) / ranks)), abs(math.log(int(one[1]) / stride)))
        n, s = min(known, key=far)
        return [[size, seconds * (ranks / int(n))] for size, seconds in self.collectives[f"{operation} {n}x{s}"]]


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by what they go to."""

    products: float
    others: float  # operations that are no products
    waited: float  # collectives that are waited for
    late: float  # of those that are not, what nothing hides
    stages: float  # in which stages wait for each other

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by PARTS."""
        return asdict(self)

    @property
    def time(self) -> float:
        """Seconds."""
        return sum(self.parts.values())


PARTS = tuple(field.name for field in fields(Estimate))


def estimate(rehearsal: Rehearsal, machine: Machine) -> Estimate:
    """How long a rehearsed step takes."""
    sums = [_sums(run, machine) for run in rehearsal.stages]
    products, others, waited, late = (sum(each) / len(sums) for each in zip(*sums, strict=True))
    waiting = max(_pipeline(rehearsal, machine) - products - others - waited, 0.0) if rehearsal.plan.pp > 1 else 0.0
    late *= 1 - machine.hidden
    return Estimate(products, others, waited, late, waiting)


def _sums(run: RankRun, machine: Machine) -> tuple[float, float, float, float]:
    """Seconds of a rank's products, other operations, collectives that are waited for and that are not."""
    products, others = machine.operations(run.calls)
    took = [(sent.late, machine.collective(sent)) for sent in run.sent]
    return products, others, sum(t for late, t in took if not late), sum(t for late, t in took if late)


def _pipeline(rehearsal: Rehearsal, machine: Machine) -> float:
    """Seconds from the first action to the last, and of what comes before and after on the rank that has the most.

    Each rank takes its actions in their order; one begins when that which it depends on is done and has arrived. Ranks that
    share cores share them equally: of pp stages any a that compute go on at pp / (crowd a) of the pace that one has alone.
    """
    where = {action.stage: run.rank for run in rehearsal.stages for action in run.actions}
    hop = {run.rank: _hop(run, machine) for run in rehearsal.stages}
    took = {run.rank: [_took(action, run, machine) for action in run.actions] for run in rehearsal.stages}
    rest = {run.rank: max(sum(_sums(run, machine)[:3]) - sum(took[run.rank]), 0.0) for run in rehearsal.stages}
    left = {run.rank: deque(zip(run.actions, took[run.rank], strict=True)) for run in rehearsal.stages}
    done: dict[tuple[str, int, int], float] = {}
    busy: dict[int, float] = {}  # rank -> seconds that its action would still take alone
    ended, now = dict.fromkeys(left, 0.0), 0.0
    while any(left.values()):
        next_ones = {rank: _ready(actions[0][0], done, where, hop) for rank, actions in left.items() if actions and rank not in busy}
        busy |= {rank: left[rank][0][1] / machine.crowd for rank, ready in next_ones.items() if ready is not None and ready <= now}
        coming = [ready for ready in next_ones.values() if ready is not None and ready > now]
        pace = min(1.0, rehearsal.plan.pp / (machine.crowd * len(busy))) if busy else 1.0
        coming += [now + one / pace for one in busy.values()]
        if not coming:
            raise AssertionError("the actions of a pipeline wait for each other")
        following = min(coming)
        for rank, one in list(busy.items()):
            busy[rank] = one - (following - now) * pace
            if now + one / pace <= following:
                action = left[rank].popleft()[0]
                done[action.kind if action.kind in "FW" else "B", action.stage, action.number] = following
                ended[rank] = following
                del busy[rank]
        now = following
    return max(ended[rank] + rest[rank] for rank in ended)


def _ready(action: Action, done: dict[tuple[str, int, int], float], where: dict[int, int], hop: dict[int, float]) -> float | None:
    """When what an action needs of another stage is done and has arrived; None: not yet. What it needs of its own its rank has done before."""
    kind, source = ("F", action.stage - 1) if action.kind == "F" else ("B", action.stage + 1)
    if action.kind == "W" or source not in where:
        return 0.0
    if (kind, source, action.number) not in done:
        return None
    return done[kind, source, action.number] + (hop[where[source]] if where[source] != where[action.stage] else 0.0)


def _took(action: Action, run: RankRun, machine: Machine) -> float:
    """Seconds of an action, while every rank computes."""
    products, others = machine.operations(run.calls[slice(*action.calls)])
    sent = run.sent[slice(*action.sent)]
    return products + others + sum(machine.collective(s) for s in sent if s.operation != "send" and not s.late)


def _hop(run: RankRun, machine: Machine) -> float:
    """Seconds of one message of a rank."""
    sends = [machine.collective(sent) for sent in run.sent if sent.operation == "send"]
    return sum(sends) / len(sends) if sends else 0.0

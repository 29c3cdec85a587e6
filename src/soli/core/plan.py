"""Plan: how a training program is laid over the ranks, as a frozen value.

It says what, never how: degrees and choices, each with the value that costs least to explain as its
default. It reads and prints as text (`dp=2,zero=1`), TOML and JSON, and all three round-trip. Whether a
plan is legal for a world, and what of it is built, is `planner.legality`'s business.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isqrt, prod
from typing import Any

from soli.core.axes import DEPTH, PP, REPLICATE, ROW, SHARD, TP
from soli.core.errors import Problem, nearest, on_all_ranks, raise_all

CHOICES: dict[str, tuple[str, ...]] = {
    "tensor": ("1d", "2d", "2.5d", "3d"), "context": ("ring", "ulysses", "scores"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zbh1", "zbv", "dualpipev"), "precision": ("fp32", "bf16", "fp16", "fp8", "fp64"),
    "offload": ("none", "optimizer", "parameters", "all"),
}  # fmt: skip
SWITCHES = {"on": True, "true": True, "off": False, "false": False}
V_SHAPED = ("zbv", "dualpipev")
SPLIT_BACKWARD = ("zbh1", *V_SHAPED)
"""Schedules that compute gradients of inputs and of weights apart."""
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Plan:
    """Degrees and choices. `dp=None` takes the ranks that are over."""

    dp: int | None = None
    replicate: int = 1  # HSDP: copies of each sharded state, inside dp
    zero: int = 0  # 0 replicate, 1 + optimizer states, 2 + gradients, 3 + parameters sharded
    tp: int = 1
    tensor: str = "1d"
    rows: int = 0  # of a grid (2d, 2.5d); 0: as many as it has columns
    depth: int = 1  # copies of the grid (2.5d)
    sp: bool = False
    cp: int = 1
    context: str = "ring"
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1  # stages a rank has
    microbatches: int = 1  # that fill the pipeline; accumulate=K fills it K times
    accumulate: int = 1  # parts that a rank's share of the batch is computed in
    ep: int = 1
    recompute: str = "none"  # none, selective, full, or a budget such as "0.5"
    precision: str = "fp32"
    offload: str = "none"

    def __post_init__(self) -> None:
        raise_all(_value_problems(asdict(self)), everywhere=True)

    @property
    def sizes(self) -> dict[str, int]:
        """Degree of each mesh axis. Nothing is sharded under zero=0: all of dp and cp replicates."""
        depth, rows, columns = self.grid
        copies = (self.dp or 1) * self.cp * self.tp // (depth * rows * columns)
        replicas = copies if self.zero == 0 else self.replicate
        return {PP: self.pp, REPLICATE: replicas, SHARD: copies // replicas, DEPTH: depth, ROW: rows, TP: columns}

    @property
    def grid(self) -> tuple[int, int, int]:
        """Depth, rows and columns of the ranks that a weight is cut over. The copies of 2.5D each have one."""
        if self.tensor == "1d":
            return 1, 1, self.tp
        if self.tensor == "3d":
            edge = round(self.tp ** (1 / 3))
            return edge, edge, edge
        ranks = max(self.tp // (self.depth if self.tensor == "2.5d" else 1), 1)
        rows = self.rows or isqrt(ranks)
        return 1, rows, ranks // rows

    @property
    def together(self) -> bool:
        """Whether ranks with other rows of the batch compute each product together."""
        depth, rows, _ = self.grid
        return self.tensor != "1d" and depth * rows > 1

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes of the grid whose ranks have other rows of the batch."""
        return {"1d": (), "2d": (ROW,), "2.5d": (ROW,), "3d": (DEPTH,)}[self.tensor]

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes over which a gradient is a part of a sum wherever they do not cut its parameter."""
        return {"1d": (), "2d": (ROW,), "2.5d": (ROW,), "3d": (DEPTH, ROW, TP)}[self.tensor]

    @property
    def pieces(self) -> int:
        """The parts of a batch that go through the model apart: rows of several ranks, or of several microbatches."""
        sizes = self.sizes
        holders = sizes[REPLICATE] * sizes[SHARD] // self.cp * prod(sizes[axis] for axis in self.apart)
        return holders * self.accumulate * self.microbatches

    @property
    def runs(self) -> int:
        """How often a step runs a forward: of each microbatch, and once more where it is recomputed."""
        return self.accumulate * self.microbatches * (1 if self.recompute == "none" else 2)

    @property
    def cuts(self) -> list[frozenset[str]]:
        """The axes that may cut a parameter together."""
        ways: dict[str, list[set[str]]] = {"1d": [set(), {TP}], "2d": [set(), {TP}, {ROW, TP}], "3d": [set(), {ROW}, {TP}, {DEPTH, ROW, TP}]}
        return [frozenset(way) for way in ways["2d" if self.tensor == "2.5d" else self.tensor]]

    @property
    def stages(self) -> int:
        """Stages of the pipeline: `chunks` a rank, two in the schedules that lie in a V."""
        return self.pp * (2 if self.schedule in V_SHAPED else self.chunks)

    @property
    def model_ranks(self) -> int:
        """Ranks that one replica of the model takes."""
        return self.pp * self.cp * self.tp

    def with_(self, **changes: Any) -> Plan:
        return replace(self, **changes)

    def __str__(self) -> str:
        """The short text: what differs from the defaults. `Plan.parse` reads it back."""
        said = [f"{f.name}={word(getattr(self, f.name))}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(said) or "dp=auto"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read `key=value,key=value`. Every problem is reported, not only the first."""
        pairs: dict[str, Any] = {}
        problems: list[Problem] = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            key, equals, value = part.partition("=")
            if fix := commas(part):
                problems.append(Problem(f"'{part}' in the plan is several keys", allowed="key=value,key=value", fix=fix))
            elif not equals:
                problems.append(Problem(f"'{part}' in the plan has no value", allowed="key=value", fix=_keys()))
            elif key.strip() in pairs:
                problems.append(Problem(f"'{key.strip()}' is said twice in the plan", got=text))
            else:
                pairs[key.strip()] = value.strip()
        return cls.from_dict(pairs, problems)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], known: Iterable[Problem] = ()) -> Plan:
        """`known`: problems that are told with those of the values."""
        if not isinstance(data, Mapping):
            raise on_all_ranks("a plan is an object of keys and values", got=repr(data)[:200], allowed='{"dp": 2, "zero": 3}')
        typed, problems = _from_pairs(dict(data))
        raise_all([*known, *problems, *_value_problems(typed)], everywhere=True)
        return cls(**typed)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls.from_dict(json.loads(text))

    def to_toml(self) -> str:
        """TOML has no null: dp is left out where it takes the ranks that are over."""
        rows = {key: value for key, value in asdict(self).items() if value is not None}
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in rows.items())

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        return cls.from_dict(tomllib.loads(text))


def word(value: Any) -> str:
    """A value as a plan's text has it."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _keys() -> str:
    return "the keys of a plan are " + ", ".join(f.name for f in fields(Plan))


def commas(text: str) -> str:
    """How to mend keys that something else than a comma parts; nothing, where none does."""
    parted = re.sub(r"[\s;]+(?=\w+\s*=)", ",", text)
    return f"part them by commas: {parted}" if parted != text else ""


def _from_pairs(pairs: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Give each value the type of its field; unknown keys and unreadable values become problems."""
    defaults = {f.name: f.default for f in fields(Plan)}
    typed: dict[str, Any] = {}
    problems = []
    for key, value in pairs.items():
        if key not in defaults:
            problems.append(Problem(f"a plan has no key '{key}'", got=f"{key}={value}", fix=nearest(key, defaults, _keys())))
            continue
        try:
            typed[key] = _read(key, value, defaults[key])
        except ValueError as error:
            problems.append(Problem(f"'{key}' of the plan cannot be read", got=repr(value), allowed=str(error)))
    return typed, problems


def _read(key: str, value: Any, default: Any) -> Any:
    if key == "dp" and value in (None, "auto"):
        return None
    if isinstance(default, bool):
        if (said := str(value).lower()) not in SWITCHES:
            raise ValueError("on or off")
        return SWITCHES[said]
    if isinstance(default, int) or key == "dp":
        try:
            if isinstance(value, bool | float):
                raise ValueError
            return int(value)
        except (TypeError, ValueError):
            raise ValueError("a whole number") from None
    if not isinstance(value, str):
        raise ValueError("text")
    return value.lower()


def _value_problems(values: dict[str, Any]) -> Iterator[Problem]:
    """What no plan may hold, whatever the world and whatever is built."""
    kinds = {f.name: int if f.name == "dp" else type(f.default) for f in fields(Plan)}
    odd = [key for key, value in values.items() if type(value) is not kinds[key] and (key, value) != ("dp", None)]
    for key in odd:
        yield Problem(f"'{key}' of the plan is of another type", got=repr(values[key]), allowed=kinds[key].__name__)
    values = {key: value for key, value in values.items() if key not in odd}
    if values.get("rows", 0) < 0:
        yield Problem("'rows' of the plan is below 0", got=values["rows"], allowed="0, 1, 2, ...")
    for key in ("dp", "replicate", "tp", "depth", "cp", "pp", "chunks", "microbatches", "accumulate", "ep"):
        if (value := values.get(key, 1)) is not None and value < 1:
            yield Problem(f"'{key}' of the plan is below 1", got=value, allowed="1, 2, 3, ...")
    if values.get("zero", 0) not in range(4):
        yield Problem("'zero' of the plan is no stage of ZeRO", got=str(values["zero"]), allowed="0, 1, 2, 3")
    for key, allowed in CHOICES.items():
        if values.get(key, allowed[0]) not in allowed:
            fix = nearest(str(values[key]), allowed)
            yield Problem(f"'{key}' of the plan is not known", got=values[key], allowed=", ".join(allowed), fix=fix)
    recompute = values.get("recompute", "none")
    if recompute not in RECOMPUTE and not _is_share(recompute):
        known = ", ".join(RECOMPUTE) + ", or a share of the activations to keep such as 0.5"
        yield Problem("'recompute' of the plan is not known", got=recompute, allowed=known)


def _is_share(text: str) -> bool:
    try:
        return 0.0 < float(text) < 1.0
    except ValueError:
        return False

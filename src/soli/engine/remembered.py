"""What a loss function keeps from call to call: the step of an annealed weight, an average of what it saw.

Sequentially it is called once a step. The engine calls it in checks and trials too, and once for each microbatch. So checks leave what it keeps
as it was; what changes alike whatever the rows (a counter) changes once a step; and what changes by the rows changes with each call, which is
right for a meter and refused where losses depend on it. It is found in what the function can reach: variables of functions around it, globals
that it names, attributes, lists, deques and dicts, of the program's own modules; not in iterators, and not in libraries.
"""

import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Collection, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from soli.core.errors import SoliError, listed
from soli.core.plan import Plan
from soli.losses import LossFn
from soli.parallel.kept import comparable, same
from soli.parallel.randomness import counts

LATER = 3
"""Calls more in which what they left is looked at once again: a list may be read from the second entry on."""
MOST = 1000
"""Elements of a list, deque or dict that is looked into, and places in all."""
DEEPEST = 20
"""Steps from the function to a place: what hangs together by more (a list of nodes) is not followed to its end."""
LARGEST = 2**20
"""Elements of a tensor that is looked at."""
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


class Remembering:
    """A loss function. Called as it is, it leaves what it keeps as it was; inside `step` and `going_on` not.

    `blind`: nothing is looked at, as where no tensor has values.
    """

    def __init__(self, function: LossFn, blind: bool = False) -> None:
        self.function, self.blind = function, blind
        self.kept: dict[str, Any] = {}  # what was seen to change, by name, with what a call made of it
        self.by_rows: set[str] = set()  # of that what other rows made something else of
        self.matters = False  # whether losses depend on what changes by rows
        self._goes_on, self._steps = False, False
        self._begun: list[Place] = []
        self._earlier: list[Place] = []  # before the forward
        self.filled: set[str] = set()  # what forwards put there for the loss, which may empty it

    def __call__(self, output: Any, batch: Any) -> Any:
        if self.blind or self._goes_on or (self._steps and not self.kept):
            return self.function(output, batch)
        if self._steps and not torch.is_grad_enabled():  # a pipeline learns the shapes of a batch
            with self.unchanged():
                return self.function(output, batch)
        if self._steps:
            _give(self._begun, self.by_rows | self.filled)
            self._begun = self._begun or _places(self.function)
            return self.function(output, batch)
        before, drawn = _places(self.function), [(calls, dict(calls)) for calls in counts()]
        self.filled |= _changed(self._earlier).keys()
        try:
            result = self.function(output, batch)
            self._compare(_changed(before))
            if self.by_rows and isinstance(result, tuple) and not self.matters:
                for _ in range(LATER):
                    _give(before, self.by_rows)
                    for calls, were in drawn:  # what it draws is what it drew
                        calls.clear()
                        calls.update(were)
                    self.matters |= not same(self.function(output, batch)[0], result[0])
            return result
        finally:
            _give(before, self.filled)

    def _compare(self, found: dict[str, Any]) -> None:
        """Every call begins alike: what ends otherwise was changed by its rows."""
        for name, value in found.items():
            if name not in self.filled and not same(self.kept.setdefault(name, value), value):
                self.by_rows.add(name)

    def explain(self, plan: Plan) -> None:
        """Raises SoliError where a plan has several calls a step, and each would see other rows' than one over the batch."""
        if self.matters and plan.pieces > 1:
            what = "the loss function keeps something of the rows that it sees, and its losses depend on it: no part of a batch changes it as the whole does"
            allowed = "what stays as it is or changes alike whatever the rows, as a counter of steps does"
            fix = "change it between steps (of the loss's batch, alike on every rank), or run with dp=1, tensor=1d and no accumulate or microbatches"
            raise SoliError(what, got=listed(sorted(self.by_rows)), allowed=allowed, fix=fix)

    def step(self) -> AbstractContextManager[object]:
        """All calls are one: each begins with what was kept before the first, but for what changes by rows."""
        return patch.multiple(self, _steps=True, _begun=[])

    def unchanged(self, but: Container[str] = ()) -> ExitStack:
        """Whatever is called inside, what is kept is as before afterwards, without the names in `but`."""
        afterwards = ExitStack()
        afterwards.callback(_give, _places(self.function), but)
        return afterwards

    def counting(self) -> ExitStack:
        """Around a call on no row of a batch: only what counts calls goes on."""
        return self.unchanged(self.kept.keys() - self.by_rows)

    def filling(self, model: nn.Module) -> AbstractContextManager[object]:
        """Around a forward of `model` and its loss: what the forward puts there for the loss is told from what the loss keeps."""
        looks = not (self.blind or self._goes_on)  # an evaluation goes on
        return patch.object(self, "_earlier", _places(self.function, {id(module) for module in model.modules()}) if looks else [])

    def going_on(self) -> AbstractContextManager[object]:
        """Each call goes on with what the one before kept, as the program's own would."""
        return patch.object(self, "_goes_on", True)


class Place:
    """Something that keeps values, and a copy of them. `holder`: a variable, a list, a tensor, a dict or (globals, names)."""

    def __init__(self, name: str, holder: Any) -> None:
        self.name, self.holder = name, holder
        self.keys = dict.fromkeys(holder if isinstance(holder, dict) else holder[1] if isinstance(holder, tuple) else ())
        self.before = self.held()

    def held(self) -> dict[str, Any]:
        """By name."""
        holder = self.holder
        if isinstance(holder, CellType):
            try:
                return {self.name: holder.cell_contents}
            except ValueError:
                return {}  # not set yet
        if isinstance(holder, Tensor | list | deque):
            return {self.name: holder.detach().clone() if isinstance(holder, Tensor) else [*holder]}
        table, names = holder if isinstance(holder, tuple) else (holder, list(holder))
        return {_path(self.name, key): table[key] for key in names if key in table}

    def give(self, name: str) -> None:
        """Let it hold again what it held."""
        holder, value = self.holder, self.before.get(name)
        if isinstance(holder, CellType):
            holder.cell_contents = value
        elif isinstance(holder, Tensor) and isinstance(value, Tensor):
            with torch.no_grad():
                holder.copy_(value)
        elif isinstance(holder, list | deque) and isinstance(value, list):
            holder.clear()
            holder.extend(value)
        else:
            table = holder[0] if isinstance(holder, tuple) else holder
            key = next(key for key in self.keys | table if _path(self.name, key) == name)
            if name in self.before:
                table[key] = value
            else:
                del table[key]


def _path(name: str, key: Any) -> str:
    return f"{name}.{key}".strip(".")


@contextmanager
def _alone() -> Iterator[None]:
    """Nothing follows what is copied and compared."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _places(function: Any, but: Collection[int] = ()) -> list[Place]:
    """`but`: ids of what is not looked into."""
    with _alone():
        return [Place(name, holder) for name, holder in _holders("", function, {*but}, MOST + len(but))]


def _changed(places: list[Place]) -> dict[str, Any]:
    """Copies of what is other than it was, by name."""
    with _alone():
        return {name: value for place in places for name, value in _moved(place).items()}


def _moved(place: Place) -> dict[str, Any]:
    before = place.before
    now = place.held()
    return {n: now.get(n) for n in before | now if n not in before or n not in now or not same(now[n], before[n])}


def _give(places: list[Place], out: Container[str] = ()) -> None:
    """Everything as it was, without the names that are out."""
    with _alone():
        for place in places:
            for name in _moved(place):
                if name not in out:
                    place.give(name)


def _holders(name: str, x: Any, seen: set[int], most: int) -> Iterator[tuple[str, Any]]:
    """Everything in reach that can hold something else after a call, with a name for each."""
    if id(x) in seen or len(seen) > most or name.count(".") > DEEPEST or isinstance(x, type | nn.Parameter | str | int | float | None):
        return
    seen.add(id(x))
    inner: dict[Any, Any] = {}
    if isinstance(x, Tensor) and comparable(x) and x.numel() <= LARGEST:
        yield name, x
    elif isinstance(x, functools.partial):
        inner = {"": x.func} | dict(enumerate(x.args)) | x.keywords
    elif isinstance(x, MethodType):
        inner = {"": x.__func__, "self": x.__self__}
    elif isinstance(x, FunctionType):
        if _own(x.__module__):
            inner = {key: x.__globals__[key] for key in sorted(_named(x.__code__)) if key in x.__globals__}
            yield name, (x.__globals__, set(inner))
            cells = {_path(name, key): cell for key, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)}
            yield from cells.items()
            inner |= {k: v for key, cell in cells.items() for k, v in Place(key, cell).held().items()}
            inner["its own"] = vars(x)  # what the function itself has, beside globals of the same names
            inner |= {f"default {i}": one for i, one in enumerate(x.__defaults__ or ())}
    elif isinstance(x, list | tuple | dict | deque) and len(x) <= MOST:
        inner = dict(x) if isinstance(x, dict) else dict(enumerate(x))
        yield from [(name, x)] * (not isinstance(x, tuple))
    elif isinstance(x, nn.Module) or (hasattr(x, "__dict__") and _own(type(x).__module__)):
        inner = vars(x) | {"": vars(type(x)).get("forward") or vars(type(x)).get("__call__")}
        yield name, vars(x)
    for key, one in inner.items():
        yield from _holders(_path(name, key), one, seen, most)


def _named(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_named(one) for one in code.co_consts if isinstance(one, CodeType)))


def _own(module: str | None) -> bool:
    """Whether a module is the program's, and no library's."""
    if (module or "").split(".")[0] in ("soli", "torch", "builtins"):
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is None or not file.startswith(LIBRARIES)

"""Which parameters are cut, and where: found by running the model, not by its names.

The model runs on a few rows with every weight whole but *marked* as it would be cut. A product whose input is whole
makes its weight a column, one whose input is cut along the summed dim makes it a row, a lookup of the batch's own
indices cuts the vocabulary. The marks flow through the model's own views and operations; where one cannot follow
(heads are split, a fused matrix is taken apart, a norm needs the whole), the layout gives way: fewer atoms, more
parts, or that weight stays replicated. Then the model runs again, until nothing gives way. What is left is a layout
that every operation of the model keeps, each decision with its reason.

Layers of one kind (names that differ in numbers alone) are treated alike.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import gcd
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from soli.core.axes import ROW, TP
from soli.core.errors import SoliError
from soli.mesh.collectives import Axis
from soli.parallel.tensor.cut import Cut, CutParameter, Run, become_cut, running, split_of
from soli.parallel.tensor.split import Misfit, Split
from soli.parallel.units import named_once

PASSES = 100
"""Each pass but the last changes the layout of a kind of weights: a model with more is not known."""


@dataclass
class Role:
    """What a parameter is to tensor parallelism: column, row, vocabulary, bias or replicated."""

    name: str
    kind: str
    split: Split | None
    why: str
    rows: Split | None = None  # on a grid: how its other dim is cut over the rows

    @property
    def cuts(self) -> dict[str, Split]:
        """By axis."""
        found = {} if self.split is None else {self.split.axis or TP: self.split}
        return found | ({} if self.rows is None else {self.rows.axis: self.rows})


@dataclass
class _Kind:
    """What was learnt of the weights of one kind."""

    atoms: int = 0  # no more than its divisors
    borders: set[Fraction] = field(default_factory=set)
    replicated: str = ""
    over: str = ""  # the axis that cuts them, where what they meet is cut over another (3D)
    flat: str = ""  # why a grid may not cut them both ways


class _Again(BaseException):  # no Exception: the layout changed and the model runs again, whatever it catches
    pass


class Finder:
    """One search. `hints`: name patterns (`*` for anything) -> "column", "row", "vocabulary" or "replicated"."""

    def __init__(self, model: nn.Module, ranks: int, hints: dict[str, str], batch: Any, rows: int = 0, cube: bool = False) -> None:
        self.model, self.ranks = model, ranks
        self.rows, self.cube = rows, cube  # rows of a grid, 0: there is none; whether grids stand in depth
        self.hints = {name: (wish, "you said so") for name, wish in hints.items()}
        for name, wish in said_by(model).items():
            self.hints.setdefault(name, (wish, "the model's tp_plan says so"))
        named = named_once(model)
        self.names = {id(param): names[0] for names, param in named}
        self._tied = {id(param) for names, param in named if len(names) > 1}
        self._given = {x.untyped_storage().data_ptr() for x in tree_leaves(batch) if isinstance(x, Tensor)}
        self._kinds: dict[str, _Kind] = {}
        self.roles: dict[str, Role] = {}
        self._changed = False

    def search(self, run_model: Callable[[], Any], sequence: bool) -> dict[str, Role]:
        """The role of every parameter. `run_model` runs the model and its loss once."""
        params = list(self.model.parameters())
        row = Axis(ROW) if self.rows else None
        run = Run(Axis("tp"), self.ranks, sequence, finder=self, hidden=row is not None, row=row)
        try:
            for _ in range(PASSES):
                self.roles, self._changed = {}, False
                for param in params:
                    become_cut(param, {})
                try:
                    with running([run]):
                        run_model()
                except _Again:
                    continue
                if not self._changed:
                    return ({name: Role(name, "replicated", None, "in no product") for name in self.names.values()}) | self.roles
        finally:
            for param in params:
                del param.cuts  # type: ignore[attr-defined]
                param.__class__ = nn.Parameter
        raise SoliError(f"no layout was found in {PASSES} runs of the model", fix="run with tp=1, and tell us of this model")

    # --- what the rules ask ---------------------------------------------------------------------------

    def choose(self, inputs: list[Tensor], letters: list[str], out: str) -> None:
        """Decide on the weights of a product that are not decided yet."""
        pairs = list(zip(inputs, letters, strict=True))
        for i, (x, word) in enumerate(pairs):
            name = self._open(x)
            if name is not None and x.dim() >= 2:
                self._choose(x, name, word, pairs[:i] + pairs[i + 1 :], out)

    def _choose(self, x: Tensor, name: str, word: str, others: list[tuple[Tensor, str]], out: str) -> None:
        """Of one weight, by the product's other inputs."""
        cuts = [(w[s.dim], s) for y, w in others if (s := split_of(y)) and s.origins]
        shared_cuts = [(letter, s) for letter, s in cuts if letter in word]
        new = [c for c in word if c in out and all(c not in w for _, w in others)]
        wish, who = self._hint(name)
        if wish == "replicated" or self._kind(name).replicated:
            self._replicate(name, self._kind(name).replicated or who)
        elif self.rows and len(others) == 1 and self._both_ways(x, name, word, others[0], out, who):
            pass
        elif shared_cuts and wish != "column":
            letter, split = shared_cuts[0]
            self._decide(x, name, "row", replace(split.at(word.index(letter)), lead=()), "its input is cut")
        elif cuts:
            self._replicate(name, "its input is cut along another dim")
        elif wish == "row":
            summed = next(d for d, c in enumerate(word) if c not in out)
            self._column(x, name, summed, "row", who)
        elif len(new) != 1:
            self._replicate(name, "its product has no dim of its own")
        else:
            self._column(x, name, word.index(new[0]), "column", who or "it reads what every rank has")

    def _both_ways(self, x: Tensor, name: str, word: str, other: tuple[Tensor, str], out: str, who: str) -> bool:
        """On a grid: a matrix is cut along its new dim over tp, and along the summed one over the rows, if both can be."""
        y, of_y = other
        new = [c for c in word if c in out and c not in of_y]
        summed = [c for c in word if c not in out and c in of_y]
        if len(word) != 2 or len(new) != 1 or len(summed) != 1 or of_y[-1] != summed[0]:
            return False
        if self._kind(name).flat or _seen(x)[0] is not x:
            return False
        split, dim = split_of(y), word.index(summed[0])
        if split is not None and split.dim != len(of_y) - 1:
            return False
        size = x.shape[dim]
        rows = Split(dim, (size,), size) if split is None else replace(split.at(dim), lead=(), spans=())
        # In 3D what a product sums over one axis comes out cut over the other.
        summed_over = (rows.axis or ROW) if self.cube else ROW
        rows = replace(rows, axis=summed_over)
        if rows.atoms < max(self.rows, self.ranks):
            return False
        over = ROW if summed_over == TP else TP
        return self._column(x, name, word.index(new[0]), "block", who or "a matrix", rows, over)

    def choose_along(self, x: Tensor, split: Split) -> None:
        """A weight that meets a hidden size element by element (a norm's) is cut as it is."""
        name = self._open(x)
        if name is None or not self.rows or _seen(x)[0] is not x or x.shape[split.dim] != split.size:
            return
        wish, who = self._hint(name)
        if wish == "replicated" or self._kind(name).replicated:
            self._replicate(name, self._kind(name).replicated or who)
        else:
            self._decide(x, name, "hidden", replace(split, lead=()), "it meets what is cut")

    def read(self, weights: Iterable[Tensor], what: str) -> None:
        """On a grid, of weights that are not decided yet: what is no product reads them before the product does."""
        for name in filter(None, map(self._open, weights)):
            if not self._kind(name).flat:
                self._kind(name).flat, self._changed = f"{what} reads it", True

    def meet(self, splits: list[Split]) -> None:
        """In 3D: tables that are looked up are cut over the axis that cuts what their rows are added to."""
        found = {split.axis or TP for split in splits}
        if not self.cube or len(found) < 2:
            return
        for split in splits:
            tables = [self.roles[n] for n in split.origins if n in self.roles]
            if tables and all(role.kind == "hidden" and not self._kind(role.name).over for role in tables):
                for role in tables:
                    self._kind(role.name).over = next(iter(found - {split.axis or TP}))
                raise _Again

    def choose_bias(self, bias: Tensor, column: Split | None) -> None:
        name = self._open(bias)
        if name is None:
            return
        if column is not None and column.dim == 0 and bias.dim() == 1 and column.size == bias.shape[0]:
            self._decide(bias, name, "bias", column, "of a column")
        else:
            self._replicate(name, "what it is added to is not cut along it")

    def choose_embedding(self, indices: Tensor, weight: Tensor) -> None:
        name = self._open(weight)
        if name is None:
            return
        (wish, who), kind = self._hint(name), self._kind(name)
        from_batch = indices.untyped_storage().data_ptr() in self._given
        if wish == "replicated" or kind.replicated:
            self._replicate(name, kind.replicated or who)
        elif self.rows and not kind.flat and self._table(weight, name, from_batch):
            pass
        elif from_batch or id(weight) in self._tied or wish == "vocabulary":
            self._column(weight, name, 0, "vocabulary", who or "it looks up what the batch holds")
        else:
            self._replicate(name, "its indices are computed: a position or a kind of token")

    def _table(self, weight: Tensor, name: str, from_batch: bool) -> bool:
        """On a grid what is looked up is cut along the hidden size; a vocabulary's table the other way too."""
        words, size = weight.shape
        if size < max(self.rows, self.ranks):
            return False
        over = (self._kind(name).over or ROW) if self.cube else TP
        if not from_batch and id(weight) not in self._tied:
            return self._column(weight, name, 1, "hidden", "a row is looked up", None, over)
        rows = Split(1, (size,), size, axis=ROW)
        return words >= self.ranks and self._column(weight, name, 0, "vocabulary", "looked up", rows)

    def answer(self, misfit: Misfit, what: str, cuts: list[Tensor]) -> bool:
        """Give way. True: the tensors are cut otherwise now, try again; False: they had better be whole."""
        if not misfit.origins:
            return False
        why = f"{what}: {misfit.why}"
        if misfit.flat:
            for name in misfit.origins:
                self._kind(name).flat = why
            raise _Again
        if misfit.atoms >= self.ranks:
            for name in misfit.origins:
                kind = self._kind(name)
                kind.atoms = gcd(kind.atoms, misfit.atoms)
            changed = False
            for x in cuts:
                split = split_of(x)
                if split is not None and split.origins & misfit.origins:
                    atoms = gcd(split.atoms, misfit.atoms)
                    changed = changed or atoms != split.atoms
                    x.cuts["tp"] = replace(split, atoms=atoms)  # type: ignore[attr-defined]
            if changed:
                self._changed = True
                return True
        kinds = [self._kind(name) for name in self.roles if name in misfit.origins]
        lacking = [{Fraction(*border) for border in misfit.borders} - kind.borders for kind in kinds]
        if any(lacking):
            for kind, new in zip(kinds, lacking, strict=True):
                kind.borders |= new
                kind.atoms = 0
        else:
            # The first that was decided: what came after it may be cut well once it is whole.
            kinds[0].replicated = why
        raise _Again

    # --- decisions ------------------------------------------------------------------------------------

    def _open(self, x: Tensor) -> str | None:
        """The name of a parameter that is not decided in this pass."""
        name = self.names.get(id(_seen(x)[0])) if type(x) in (Cut, CutParameter) else None
        return name if name is not None and name not in self.roles else None

    def follow(self, result: Any, name: str, args: tuple) -> Any:
        """A weight that is not decided yet, transposed or one matrix of a stack, is still that weight."""
        x: Any = args[0] if args else None
        if type(x) not in (Cut, CutParameter) or type(result) is not Tensor or self._open(x) is None:
            return result
        dims = _dims_of(x, _seen(x)[1], result, name, args)
        if dims is None:
            return result
        weight = _seen(x)[0]
        result.__class__ = Cut
        result.cuts, result.view_of = {}, (weight, dims)  # type: ignore[attr-defined]
        return result

    def _column(self, x: Tensor, name: str, dim: int, role: str, why: str, rows: Split | None = None, axis: str = "") -> bool:
        """Cut over tp, along `dim`; on a grid along another dim over `rows`. False: it is replicated."""
        size, kind = x.shape[dim], self._kind(name)
        places = [Fraction(0), *(border * size for border in sorted(kind.borders)), Fraction(size)]
        if any(place.denominator != 1 for place in places):
            self._replicate(name, "it is taken apart at borders that are no whole elements")
            return False
        parts = tuple(int(b) - int(a) for a, b in zip(places, places[1:], strict=False))
        atoms = gcd(*parts, kind.atoms)
        if atoms < self.ranks:
            self._replicate(name, f"{atoms} units for {self.ranks} ranks")
            return False
        split = Split(dim, parts, atoms, frozenset({name}), axis=axis)
        units = "" if atoms == size else f"; {atoms} units" + (f" in each of {len(parts)} parts" if parts[1:] else "")
        self._decide(x, name, role, split, why + units, rows)
        return True

    def _decide(self, x: Tensor, name: str, kind: str, split: Split, why: str, rows: Split | None = None) -> None:
        weight, dims = _seen(x)
        if weight is not x:
            x.cuts = {"tp": split}  # type: ignore[attr-defined]
            split = split.at(dims[split.dim])
        role = self.roles[name] = Role(name, kind, split, why, rows)
        # There is one level while a layout is sought.
        weight.cuts = {TP: role.split} | ({ROW: rows} if rows is not None else {})  # type: ignore[attr-defined]

    def _replicate(self, name: str, why: str) -> None:
        self.roles[name] = Role(name, "replicated", None, why)

    def _kind(self, name: str) -> _Kind:
        return self._kinds.setdefault(re.sub(r"\d+", "*", name), _Kind())

    def _hint(self, name: str) -> tuple[str, str]:
        """What somebody says that a weight is, and who."""
        return next((said for pattern, said in self.hints.items() if hinted(pattern, name)), ("", ""))


def hinted(pattern: str, name: str) -> bool:
    """Whether a hint's pattern (`*` for anything) is of a weight of this name."""
    text = ".*".join(re.escape(piece) for piece in pattern.split("*"))
    return re.fullmatch(text + r"(\.weight)?", name) is not None


SAID = {"colwise": "column", "rowwise": "row", "embedding_rowwise": "vocabulary"}
"""transformers' words for what stands in its configurations; its others are about norms and experts."""


def said_by(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan that a transformers model carries, as hints."""
    plan = getattr(model, "tp_plan", None)
    return {name: SAID[word] for name, word in plan.items() if word in SAID} if isinstance(plan, dict) else {}


def _dims_of(x: Tensor, dims: tuple[int, ...], result: Tensor, name: str, args: tuple) -> tuple[int, ...] | None:
    """Which dims of the weight the dims of `result` are, where a function only showed `x`, of `dims`, otherwise."""
    if name in ("__get__", "t") and x.dim() == 2 and result.shape == (x.shape[1], x.shape[0]):
        return dims[::-1]
    if name in ("transpose", "swapaxes") and len(args) == 3:
        order = list(dims)
        order[args[1]], order[args[2]] = order[args[2]], order[args[1]]
        return tuple(order)
    if name == "permute" and x.dim() == 2 and result.stride() == x.stride()[::-1]:
        return dims[::-1]
    if name == "__getitem__" and _is_number(args[1]) and x.dim() > 2:
        return dims[1:]
    return dims if name in ("to", "contiguous", "float", "type_as") and result.shape == x.shape else None


def _seen(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The weight that a tensor shows, and which of its dims each dim is."""
    view = getattr(x, "view_of", None) if type(x) is Cut else None
    return view if view is not None else (x, tuple(range(x.dim())))


def _is_number(index: Any) -> bool:
    return isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0 and not index.is_floating_point())

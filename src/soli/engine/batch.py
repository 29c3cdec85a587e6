"""A batch is any pytree whose tensors have the batch as dim 0: which rows of it a rank computes.

The rows of the global batch are cut into one contiguous part for each rank of the dp axis, and each part
into microbatches; sizes differ by at most one row, so a ragged batch trains as it is.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from soli.core.errors import Problem, SoliError, listed, on_all_ranks, raise_all
from soli.core.layout import even_parts
from soli.core.plan import Plan
from soli.parallel import kept, partial

MODEL_INPUTS = "the model is called with those entries of the batch that its forward names, or all where it names none but **kwargs"


@dataclass
class Part:
    """A rank's own rows of a global batch, as `engine.batches` yields them.

    `data` is the pytree of the rows [start, stop) out of `total`; None where the rank has no row. `place`: where its stream
    stood, which is the same on every rank.
    """

    data: Any
    start: int
    stop: int
    total: int
    place: dict[str, Any] | None = None

    @property
    def rows(self) -> int:
        return self.stop - self.start


def rows_of(batch: Any) -> int:
    """The number of rows of a batch: the length of dim 0, which its tensors agree on."""
    leaves, _ = tree_flatten_with_path(batch)
    if sparse := [_path(path) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.layout != torch.strided]:
        what = "the batch has sparse tensors, whose rows cannot be taken apart"
        fix = "give their indices and values, padded to the same number a row, and make them in the forward; or to_dense()"
        raise on_all_ranks(what, got=listed(sparse), fix=fix)
    sizes = {_path(path): leaf.shape[0] for path, leaf in leaves if _has_rows(leaf)}
    if not sizes:
        allowed = "any pytree of tensors whose dim 0 is the batch"
        raise on_all_ranks("the batch has no tensor with rows", got=type(batch).__name__, allowed=allowed, fix="of an object give its tensors: dict(it), or vars(it)")
    if len(set(sizes.values())) > 1:
        what = "the tensors of the batch do not agree on the number of rows (dim 0)"
        fix = "give every tensor the batch on dim 0; what is the same for all rows goes in as a 0-d tensor, a number, or into the model"
        raise on_all_ranks(what, got=listed([f"{name}: {size}" for name, size in sizes.items()]), fix=fix)
    return next(iter(sizes.values()))


def _path(path: tuple[Any, ...]) -> str:
    return "".join(str(key) for key in path) or "batch"


def take(batch: Any, start: int, stop: int) -> Any:
    """Rows [start, stop) of a batch: views, not copies."""
    return tree_map(lambda x: x[start:stop] if _has_rows(x) else x, batch)


def at(batch: Any, rows: list[int]) -> Any:
    """These rows of a batch, in this order."""
    return tree_map(lambda x: x[rows] if _has_rows(x) else x, batch)


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor | np.ndarray) and x.ndim > 0


def _hides(x: Any, rows: int) -> bool:
    """Whether a leaf is an object that has tensors of so many rows."""
    inner = as_dict(x) if isinstance(x, Mapping) else {} if isinstance(x, Tensor | type) else getattr(x, "__dict__", {})
    return any(_has_rows(y) and len(y) == rows for y in tree_leaves(dict(inner)))


def few(part: Part, plan: Plan) -> int:
    """Rows that a check runs: as many as a microbatch has, and so no more memory than the step takes; two if there are."""
    return min(part.rows, max(-(-part.rows // (plan.accumulate * plan.microbatches)), 2))


def as_dict(batch: Any) -> Any:
    """The batch; of a mapping that is no dict (transformers' BatchEncoding) a dict, whose tensors can be found."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def part_of(batch: Any, ranks: int, index: int, later: bool = False) -> Part:
    """The rows of a global batch that rank number `index` of the dp axis computes; none of some of a `later` one, as of a data loader's last."""
    if isinstance(batch, Part):
        most = max((len(x) for x in tree_leaves(batch.data) if _has_rows(x)), default=0)
        if most in (0, batch.rows) or (most < batch.rows and ranks > 1):
            return batch
        rows = rows_of(batch.data)  # a collate made more of its samples (two views of each: none is left out), or dropped some
        if ranks == 1:
            return replace(batch, start=0, stop=rows, total=rows)
        what = "the collate makes other rows than samples, and which row of the global batch each is only the whole batch tells"
        fix = "make them in the dataset (one sample for each row), or collate the global batch and give it to engine.step; dp=1 runs it as it is"
        raise SoliError(what, got=f"{rows} rows for {batch.rows} samples", allowed="one row for each sample", fix=fix)
    total = rows_of(batch)
    if total < (1 if later else ranks):
        what = "the global batch has no rows" if later else "the first global batch has fewer rows than there are data-parallel ranks"
        got = f"{total} rows, dp={ranks}"
        fix = "use a larger batch or a smaller dp (later ones may be this small)"
        raise on_all_ranks(what, got=got, allowed=f"at least {1 if later else ranks} rows", fix=fix, seen="uneven-parts")
    start, stop = even_parts(total, ranks)[index]
    return Part(take(batch, start, stop), start, stop, total)


def microbatches(part: Part, ranks: int, plan: Plan) -> list[Part]:
    """The part in as many microbatches as every rank has, in the same number everywhere; some may be empty.

    Not so on a grid (2d, 3d), where ranks with other rows compute each product together: each has rows.
    """
    most = part.total // ranks if plan.together else -(-part.total // ranks)
    pieces = even_parts(part.rows, max(1, min(plan.accumulate * plan.microbatches, most)))
    return [Part(take(part.data, a, b) if b > a else None, part.start + a, part.start + b, part.total) for a, b in pieces]


def need_rows(part: Part, ranks: int, plan: Plan, norms: bool = False) -> None:
    """Raises SoliError where a rank has no row, and others wait for it in every product, or norm of the batch."""
    if (plan.together or norms) and part.total < ranks:
        what = "normalise the batch" if norms else "of a grid compute each product"
        got = f"{part.total} rows, {ranks} parts (dp, copies and rows of the grid), plan {plan}"
        allowed = f"at least {ranks} rows in every batch, the last and those of an evaluation too"
        raise on_all_ranks(f"the ranks {what} together, and some have no row of it", got=got, allowed=allowed, fix="drop or fill the ragged last batch, or use a smaller grid or dp")


def need_tensors(batch: Any, part: Part, times: int) -> None:
    """Raises SoliError where a batch has lists of one number, text or list a row: they are not taken apart as its rows are, over ranks and `times` microbatches."""
    rows = part.rows if isinstance(batch, Part) else part.total
    leaves = tree_flatten_with_path(part.data)[0]
    if closed := [f"{_path(path)}: {type(x).__name__}" for path, x in leaves if _hides(x, rows)]:
        what = "the batch has objects whose tensors nobody finds: they are neither taken apart nor moved"
        fix = "give a dict or tuple of their tensors (of a mapping: dict(it); of a dataclass: vars(it)), in the collate of engine.batches too"
        raise on_all_ranks(what, got=listed(closed), fix=fix)
    asked = [_path(path) for path, x in leaves if isinstance(x, Tensor) and x.requires_grad]
    if asked and torch.is_grad_enabled():
        what = "tensors of the batch require gradients, and would get those of the loss's sum over a rank's own rows"
        fix = "detach() them; make what is learnt a parameter of the model, or take gradients of engine.copy_model()"
        raise on_all_ranks(what, got=listed(asked), fix=fix)
    same = lambda x: all(not isinstance(y, int | float) and y == x[0] for y in x)  # words that are for all rows
    flat = lambda x: isinstance(x, list) and len(x) == rows and not any(map(_has_rows, tree_leaves(x))) and not same(x)
    if rows > 1 and (times > 1 or part.rows < rows):
        lists = [_path(path) for path, x in tree_flatten_with_path(part.data, is_leaf=flat)[0] if flat(x)]
        if lists:
            what = "the batch has lists with one entry a row, which are not taken apart with the rows"
            fix = "give torch.tensor(...) or a numpy array of them, or leave them out of the batch"
            raise on_all_ranks(what, got=listed(lists), fix=fix)


@contextmanager
def unwritten(batch: Any) -> Iterator[Any]:
    """Its tensors in dicts and lists of their own; what a forward writes into them is as before afterwards: checks run it more than once."""
    plain = [x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_inference() and not kept.expanded(x)]
    held = [(x, x.clone(), x._version, (x.size(), x.stride(), x.storage_offset())) for x in plain]
    try:
        yield tree_map(lambda x: x, batch)
    finally:
        with torch.no_grad():
            for x, before, version, form in held:
                if x._version != version:
                    x.as_strided_(*form).copy_(before)


def to_device(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch)


class Caller:
    """Calls the model with its part of a batch. See MODEL_INPUTS."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        plain = getattr(model, "_orig_mod", model)  # torch.compile's forward has *args
        parameters = inspect.signature(plain.forward).parameters
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.named = [name for name, p in parameters.items() if p.kind in kinds]
        self.open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        self.every = self.open and not self.named  # as of a model that hands all on to another one
        self.required = [name for name in self.named if parameters[name].default is inspect.Parameter.empty]

    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            raise_all(self._problems(batch), everywhere=True)
            names = batch if self.every else [name for name in self.named if name in batch]
            args, kwargs = [], {name: batch[name] for name in names}
        elif isinstance(batch, tuple | list):
            args, kwargs = list(batch[:-1] if len(batch) > 1 else batch), {}
        else:
            args, kwargs = [batch], {}
        with patch.object(partial.OfParts, "by_engine", True):
            return self.model(*args, **kwargs)

    def unnamed(self, batch: Any) -> list[str]:
        """Entries that a forward with **kwargs would take beside those that it names, and is not given."""
        return [str(name) for name in batch if name not in self.named] if isinstance(batch, dict) and self.open and self.named else []

    def _problems(self, batch: dict[str, Any]) -> list[Problem]:
        got, allowed = ", ".join(map(str, batch)), ", ".join(self.named)
        fix = f"name the entries of the batch as the forward does ({MODEL_INPUTS})"
        what = "the model's forward needs '{}' and the batch has no such entry"
        return [Problem(what.format(name), got, allowed, fix) for name in self.required if name not in batch]

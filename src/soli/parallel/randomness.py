"""Dropout that no plan changes: a function of (seed, step, module, call, row of the global batch, position).

torch draws dropout from one stream in the order of the calls, so which number falls on which element depends on how the batch is cut. Here
each row of the global batch has a generator of its own, seeded with a hash of what it is for, and fills the row's part of the mask. Which
dim holds the rows is learnt: on the first step the model runs on two numbers of rows (`probe`), and the dim whose size follows is the one;
where it is a multiple of the rows, what lies there tells whether rows change slowest ([B, T, C] as [B*T, C]) or fastest.

Recomputation (torch.utils.checkpoint) restores the state of torch's default generator. Each call draws a nonce from it; seen again in
backward, the nonce tells which call of the forward is being repeated. Of a model that draws nothing on the first step (dropout with p=0)
the calls are not looked at later, which took half as long as the smallest operations themselves (24 layers, four microbatches: 118 ms a
step in place of 80, and 57 by hand): that torch's generators are as before shows that it still draws nothing.
"""

import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from soli.core.errors import SoliError, on_all_ranks
from soli.core.frames import owner
from soli.core.tables import table
from soli.core.versions import function_modes, run_backward
from soli.parallel import draws, generators, recurrent

Key = tuple[str, int]
FIRST = "let it draw in every training forward; dropout whose p grows from 0 may begin with 1e-9"
NO_ROWS = -1
"""The dim of a tensor that is the same for all rows, such as a dropout of position embeddings."""

_sdpa = F.scaled_dot_product_attention
_dropout, _attention_function = F.dropout, F.multi_head_attention_forward
_REFUSED = {attrgetter(path)(torch): name for path, name in table(__package__, "functions.toml")["draws"].items()}
_ELEMENTWISE = {F.dropout, torch.dropout, torch.dropout_}
_FEATURES = {F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout}
BACKWARD = {Tensor.backward, torch.autograd.backward}
_SORTING = {"sort": (1, -1), "argsort": (1, -1), "msort": (1, 0), "topk": (2, -1), "kthvalue": (2, -1), "argmax": (1, None), "argmin": (1, None), "max": (1, None), "min": (1, None)}
_ORDERS = {getattr(place, name): how for name, how in _SORTING.items() for place in (torch, Tensor)}
"""What puts numbers in order, or finds the first; which argument says along which dim, and what it is where none does (None: all)."""
_HANDLED = {Tensor.register_hook, _sdpa, _attention_function, *BACKWARD, *_ELEMENTWISE, *_FEATURES, *draws.FILLS, *_REFUSED, *_ORDERS, *recurrent.FUNCTIONS}
"""Of all that a mode is asked about, which is every call of torch's."""


@dataclass
class _Microbatch:
    step: int
    first_row: int
    rows: int
    calls: dict[str, int] = field(default_factory=dict)
    nonces: dict[int, Key] = field(default_factory=dict)
    backward: bool = False


class Randomness:
    """The random numbers of one model.

    `shared`: rows or stages are spread over ranks or microbatches, `apart`: rows are.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed, self.shared, self.apart = seed, False, False
        self.quiet, self.drawing = False, False  # drawing: something did in the last probe
        self._draws = False  # in a probe
        self._drew: set[Key] = set()  # calls that did, of all that may
        # Weak: a module that a model replaces while it runs must not leave its place to the next one of its address.
        self._names = weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
        self._dims: dict[tuple[bool, Key], int] = {}  # of an evaluation, or not
        self._inner: set[tuple[bool, Key]] = set()  # where rows change fastest in such a dim, a multiple of them
        self._uneven = set[str]()  # modules that draw as often as there are rows, where all of them are on each rank
        self._numbers = WeakIdKeyDictionary()  # what was drawn in a probe, and by which call
        self._ordered: set[tuple[Key, int]] = set()  # dims that numbers are put in order along
        # what lies at each place of a dim of rows
        self._marks: dict[tuple[int, Key, int], tuple[Tensor, float, bool]] = {}
        self._logs: list[tuple[int, dict[Key, tuple[int, ...]]]] = []
        self._now: _Microbatch | None = None
        self._probing: dict[Key, tuple[int, ...]] | None = None

    # --- contexts -------------------------------------------------------------------------------------

    @contextmanager
    def begin(self, step: int, first_row: int, rows: int) -> Iterator[_Microbatch]:
        """One microbatch, forward and backward. torch's default generators are as before at the end."""
        now, number = _Microbatch(step, first_row, rows), generators.hashed(self.seed, step, first_row)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        foreign = generators.apart(number) if generators.OTHERS[0] else nullcontext()
        with torch.random.fork_rng(devices), patch.object(self, "_now", now), foreign:
            generators.seed(number)
            yield now

    @contextmanager
    def evaluating(self, step: int, first_row: int, rows: int) -> Iterator[None]:
        """A forward that trains nothing, on rows of an evaluation: what it draws is theirs, and another than a step's."""
        with self.begin(-1 - step, first_row, max(rows, 1)), self.forward():
            yield

    def resume(self, microbatch: _Microbatch) -> AbstractContextManager[object]:
        """The backward of a microbatch that began before others did (in a pipeline)."""
        microbatch.backward = True
        return patch.object(self, "_now", microbatch)

    def restart(self) -> None:
        """Another stage's part of the same forward begins: calls are numbered from the start."""
        if self._now is not None:
            self._now.calls = {}

    def counted(self) -> dict[str, int]:
        """How many random calls each module has made so far."""
        return dict(self._now.calls) if self._now is not None else {}

    def skip(self, calls: dict[str, int]) -> None:
        """Count calls that another stage makes."""
        if self._now is not None:
            for name, number in calls.items():
                self._now.calls[name] = self._now.calls.get(name, 0) + number

    @contextmanager
    def forward(self, gradients: bool = True) -> Iterator[None]:
        """Around what may draw: the forward, and the backward for the sake of recomputation. `gradients`: hooks may be put on tensors."""
        if not (self.quiet and gradients):
            with _Mode(self), draws.truncating():
                yield
            return
        before = generators.states()
        yield
        if generators.states() != before:
            got = "dropout whose p was 0 then, a module that was in evaluation, or another function of torch's"
            raise SoliError("the model draws random numbers, and on the first step it drew none", got=got, fix=FIRST)

    def backward(self) -> None:
        """From here on a call repeats one of the forward."""
        if self._now is not None:
            self._now.backward = True

    @contextmanager
    def probe(self, rows: int, learn: bool = True) -> Iterator[None]:
        """A forward on `rows` rows in which dropout does nothing but show its shapes, to be learnt."""
        drew = was = generators.OTHERS[0]
        generators.OTHERS[0] = True
        with self.begin(0, 0, rows) as now:
            self._probing, self.drawing, marks = {}, False, dict(self._marks)
            others, start = generators.others(), generators.states()
            try:
                with _Mode(self), draws.truncating():
                    yield
                unseen = generators.states() != generators.after(start, len(now.nonces))
                self._draws |= unseen
                if unseen:
                    self.refuse("a function that draws by itself")
                drew = generators.others() != others
                if drew and self.shared:
                    what = "the model draws random numbers from Python's random or from numpy, which parts of a batch and stages do apart"
                    raise on_all_ranks(what, fix="draw with torch (dropout), or before the step and pass them in the batch; tp and cp alone run it as it is")
                if learn:
                    self._logs.append((rows, self._probing))
            finally:
                self._probing, self._marks = None, self._marks if learn else marks
                generators.OTHERS[0] = drew or was

    def forget(self) -> None:
        """Probes that follow begin with other values."""
        self._marks.clear()

    def finish_probe(self, evaluating: bool = False) -> None:
        """Learn each call's batch dim from the probes. An evaluation's calls may be others."""
        self.quiet = not self._draws
        logs, self._logs = self._logs, []
        rows, shapes = logs[0]
        other_rows, others = next((log for log in logs if log[0] != rows), logs[0])
        odd = sorted((shapes.keys() ^ others.keys()) & self._drew)
        self._uneven |= {name for name, _ in odd}
        if odd and self.apart:
            what = f"how often {odd[0][0] or 'the model'} draws random numbers depends on the rows of the batch"
            raise on_all_ranks(what, fix="draw for all rows at once, in every forward, and select afterwards")
        for key in shapes.keys() & others.keys():
            dim = _batch_dim(shapes[key], rows, others[key], other_rows)
            if self.apart and (key, dim) in self._ordered:
                what = f"rows depend on each other: the random numbers that {key[0] or 'the model'} draws for them are put in order"
                raise on_all_ranks(what, fix="draw an order of rows before the step and pass it in the batch, or use a plan that keeps a step's rows in one part")
            if dim is not None:
                self._dims[evaluating, key] = dim
                if dim != NO_ROWS and key in self._drew and self._turned(key, dim, rows, other_rows):
                    self._inner.add((evaluating, key))
            elif key in self._drew and not self.apart:
                self._dims[evaluating, key] = NO_ROWS
            elif key in self._drew:
                got = f"shape {shapes[key]} for {rows} rows and {others[key]} for {other_rows}"
                raise _of_no_rows(key, got, allowed="at most one dim that is the rows, or a multiple of them", everywhere=True)
        self.forget()

    # --- calls ----------------------------------------------------------------------------------------

    def keep(self, shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
        """A mask of `shape` for the call under way: 0 with probability p, else 1 / (1 - p)."""
        key = self._key()
        self._known(key)
        if p >= 1 or like.is_meta:  # without values: of another stage
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._filled(key, shape, lambda part, g: part.bernoulli_(1 - p, generator=g), like).div_(1 - p)

    def _key(self) -> Key:
        """Which call this is: the module that makes it, and its number among that module's calls."""
        now = self._now
        assert now is not None, "only inside begin()"
        nonce = int(torch.randint(2**62, ()))
        if now.backward:
            if nonce not in now.nonces:
                what = f"dropout in {self._module() or 'the model'} is recomputed with another random state"
                raise SoliError(what, fix="call torch.utils.checkpoint with preserve_rng_state=True, its default")
            return now.nonces[nonce]
        name = self._module()
        number = now.calls.get(name, 0)
        now.calls[name] = number + 1
        now.nonces[nonce] = (name, number)
        return name, number

    def _module(self) -> str:
        """The innermost module of the model whose code is running."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            module = owner(frame)
            if isinstance(module, nn.Module) and module in self._names:
                return self._names[module]
            frame = frame.f_back
        return ""

    def _filled(self, key: Key, shape: tuple[int, ...], fill: Callable[[Tensor, torch.Generator], Tensor], like: Tensor) -> Tensor:
        now = self._now
        assert now is not None, "only inside begin()"
        dim, base = self._dims[now.step < 0, key], generators.hashed(self.seed, now.step, *key)
        generator = torch.Generator(like.device)
        if dim == NO_ROWS:
            generator.manual_seed(base)
            return fill(torch.empty(shape, dtype=like.dtype, device=like.device), generator)
        if shape[dim] % now.rows:
            raise _of_no_rows(key, f"shape {shape} for {now.rows} rows, and on the first step a multiple of them")
        rest = (*shape[:dim], shape[dim] // now.rows, *shape[dim + 1 :])
        rows = torch.empty((now.rows, *rest), dtype=like.dtype, device=like.device)
        for number, row in enumerate(rows.unbind(0)):
            generator.manual_seed(generators.mixed(base, now.first_row + number))
            fill(row, generator)
        return rows.movedim(0, dim + ((now.step < 0, key) in self._inner)).reshape(shape)

    def dropped(self, x: Tensor, p: float, training: bool, shape: tuple[int, ...]) -> Tensor:
        if self._probing is not None:
            key = self._key()
            self._probing[key] = shape
            if training and p > 0:
                self._marked(key, x, shape)
                self._draws = self.drawing = True
                self._drew.add(key)
            return x.view_as(x)  # another tensor, as in training
        return x * self.keep(shape, p, x) if training and p > 0 else self._unchanged(x)

    def _marked(self, key: Key, x: Tensor, shape: tuple[int, ...], sure: bool = True) -> None:
        """What lies where in dims that are the rows, or a multiple of them: they need not be in the order of the batch. `sure`: x has values."""
        if x.is_meta or self._now is None:
            return
        rows, device = self._now.rows, x.device.type
        eps = torch.finfo(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype).eps
        with torch._C.DisableTorchFunctionSubclass():  # of a cut tensor the part that is here
            for d in [d for d, n in enumerate(shape) if n and n % rows == 0 and n == x.shape[d]]:
                places = x.detach().movedim(d, 0).reshape(shape[d], -1)
                along = torch.cos(torch.arange(places.shape[1], dtype=torch.float64, device=x.device)).to(x.dtype)
                found = (places @ along).double().nan_to_num(0.0, 0.0, 0.0)
                self._marks.setdefault((rows, key, d), (found, eps, sure))

    def _turned(self, key: Key, dim: int, rows: int, other_rows: int) -> bool:
        """Whether rows change fastest in a dim that is a multiple of them: the part's places are found in the whole one way, or the other."""
        if (rows, key, dim) not in self._marks or (other_rows, key, dim) not in self._marks or rows == other_rows:
            return False
        (whole, eps, sure), (part, _, _) = self._marks[rows, key, dim], self._marks[other_rows, key, dim]
        ways = whole[: len(part)], whole.unflatten(0, (-1, rows))[:, :other_rows].flatten()
        near = eps**0.5 * float(whole.abs().max())
        usual, turned = (float((way - part).abs().max()) <= near for way in ways)
        if self.apart and sure and not usual and not turned:
            fix = "draw before rows are put in another order, or sorted; or call the module once for each part of what is put together"
            raise _of_no_rows(key, "rows in another order than the batch's", fix=fix)
        return turned and not usual

    def drawn(self, like: Tensor, shape: tuple[int, ...], how: str, *numbers: Any, beside: Any = None, **more: Any) -> Tensor:
        """A tensor of `shape`, and of the type and device of `like`, filled by a method of Tensor. `beside`: what it is drawn for."""
        key = self._key()
        if self._probing is not None:  # half the numbers are below it: no layer is dropped, none is chosen
            self.drawing = True
            if beside is not None:
                self._marked(key, beside if beside.is_floating_point() else beside.double(), shape, sure=False)
            self._probing[key], self._draws = shape, True
            self._drew.add(key)
            middle = sum((*numbers, *more.values())) // 2 if how == "random_" else {"uniform_": 0.5, "normal_": 0.0}.get(how, 1.0)
            found = torch.full(shape, middle, dtype=like.dtype, device=like.device)
            self._numbers[found] = key
            return found
        self._known(key)
        if like.is_meta:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._filled(key, shape, lambda part, g: getattr(part, how)(*numbers, generator=g, **more), like)

    def followed(self, x: Tensor, drawn: Tensor) -> Tensor:
        """x was filled with what was drawn."""
        if drawn in self._numbers:
            self._numbers[x] = self._numbers[drawn]
        return x

    def order(self, x: Tensor, dim: Any) -> None:
        """In a probe: x is put in order along `dim`; None: all of it."""
        if x not in self._numbers or not isinstance(dim, int | None):
            return
        self._ordered |= {(self._numbers[x], d) for d in (range(x.dim()) if dim is None else [dim % (x.dim() or 1)])}

    def _known(self, key: Key) -> None:
        assert self._now is not None, "only inside begin()"
        if key[0] in self._uneven:
            self._dims.setdefault((self._now.step < 0, key), NO_ROWS)
        if (self._now.step < 0, key) not in self._dims:
            raise SoliError(f"{key[0] or 'the model'} draws random numbers that it did not draw on the first step", fix=FIRST)

    def _unchanged(self, x: Tensor) -> Tensor:
        self._key()  # the call is counted, so that the others keep their numbers
        return x

    def refuse(self, what: str) -> None:
        if self.shared:
            words = f"{self._module() or 'the model'} draws random numbers with {what}, which depend on the plan"
            raise on_all_ranks(words, fix="use dropout, or draw them before the step and pass them in the batch")


def _of_no_rows(key: Key, got: str, **more: Any) -> SoliError:
    return SoliError(f"the random numbers of {key[0] or 'the model'} do not belong to rows of the batch", got=got, **more)


def counts() -> list[dict[str, int]]:
    """How many random calls each module has made, of all whose forward is under way."""
    return [mode.randomness._now.calls for mode in function_modes() if isinstance(mode, _Mode) and mode.randomness._now]


class _Mode(TorchFunctionMode):
    """Sees every call of torch's functions in a forward, wherever the model has the function from."""

    def __init__(self, randomness: Randomness) -> None:
        super().__init__()
        self.randomness = randomness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _HANDLED:
            return func(*args, **kwargs)
        if func in BACKWARD:
            with self:  # a mode is off inside its own handler, and recomputation needs it
                return backward_of(*args, **kwargs)
        if func is Tensor.register_hook and not args[0].requires_grad:
            return RemovableHandle(OrderedDict())  # a program that trains need not ask for gradients, which checks have none of
        if func in _ELEMENTWISE or func in _FEATURES:
            return _dropped(self.randomness, func, *args, **kwargs)
        given = any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())) or kwargs.get("out") is not None
        made = func in draws.INITS and isinstance((*args, *kwargs.values())[0], nn.Parameter)  # of a module that is made here
        if func in draws.FILLS and self.randomness._now is not None and not given and not made:
            return draws.answered(self.randomness, func, args, dict(kwargs))
        if func in _ORDERS:
            at, usual = _ORDERS[func]
            self.randomness.order(args[0] if args else kwargs["input"], kwargs.get("dim", args[at] if len(args) > at else usual))
        if func is _sdpa:
            return attention(self.randomness, *args, **kwargs)
        if func is _attention_function:
            return _inside_attention(self.randomness, args, kwargs)
        between = func in recurrent.FUNCTIONS and recurrent.draws(args)
        if between and not recurrent.packed(args):
            return recurrent.layered(func, lambda x, p: self.randomness.dropped(x, p, True, tuple(x.shape)), args)
        if between or made or func in _REFUSED:
            named = "dropout between layers of packed sequences" if between else _REFUSED.get(func, "")
            self.randomness.refuse(f"nn.init.{draws.INITS[func]} of a parameter" if made else named)
        return func(*args, **kwargs)


def backward_of(tensors: Any, gradients: Any = None, *args: Any, **kwargs: Any) -> None:
    """torch.autograd.backward without its own look at modes, which would call the handler again."""
    outputs = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    gradients = kwargs.get("gradient", kwargs.get("grad_tensors", gradients))
    given = (gradients,) if isinstance(gradients, Tensor) else tuple(gradients or [None] * len(outputs))
    starts = tuple(torch.ones_like(o) if g is None and o.requires_grad else g for o, g in zip(outputs, given, strict=True))
    create = bool(kwargs.get("create_graph", args[1] if len(args) > 1 else False))
    retain = kwargs.get("retain_graph", args[0] if args else None)
    inputs = kwargs.get("inputs") or ()
    over, retain = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), create if retain is None else retain
    run_backward(outputs, starts, retain, create, over, allow_unreachable=True, accumulate_grad=True)


def _dropped(randomness: Randomness, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **more: bool) -> Tensor:
    """Element by element, or whole channels: the mask covers the first two dims of [N, C, ...] then."""
    alike = input.dim() - 2 if func in _FEATURES else 0
    shape = (*input.shape[: input.dim() - alike], *(1,) * alike)
    result = randomness.dropped(input, p, more.get("train", training), shape)
    return input.copy_(result) if inplace or func is torch.dropout_ else result


def attention(
    randomness: Randomness, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention; with dropout it is written out, as torch's own is on the CPU.

    In a probe too: what is cut after it, and so what crosses to another stage, is then as in training.
    """
    shape = (*query.shape[:-1], key.shape[-2])
    if dropout_p == 0.0:
        randomness.dropped(query, 0.0, True, shape)  # shows the shape to a probe, and counts the call
        return _sdpa(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        causal = torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    return randomness.dropped(weights_of(scores, attn_mask), dropout_p, True, shape) @ value


def weights_of(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Attention's weights. Rows that see nothing are zero, as torch's kernels have it."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def _inside_attention(randomness: Randomness, args: Any, kwargs: Any) -> Any:
    """nn.MultiheadAttention is one Python function to torch; its own calls are reached by their names."""
    dropout, attend = partial(_dropped, randomness, _dropout), partial(attention, randomness)
    with patch.multiple(F, dropout=dropout, scaled_dot_product_attention=attend):
        return _attention_function(*args, **kwargs)


def _batch_dim(shape: tuple[int, ...], rows: int, other: tuple[int, ...], other_rows: int) -> int | None:
    """The dim that is the rows; None where there is no one that could be."""
    same_length = len(shape) == len(other)
    changed = [d for d in range(len(shape)) if same_length and shape[d] != other[d]]
    follows = [d for d in changed if shape[d] * other_rows == other[d] * rows and shape[d] % rows == 0]
    if not same_length or len(changed) > 1 or len(follows) != len(changed):
        return None
    return follows[0] if follows else NO_ROWS

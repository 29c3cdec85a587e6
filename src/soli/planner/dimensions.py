"""The dimensions of a transformer, found in a trace of its program: the stack of like blocks and what one of them does.

No architecture and no name is known here. Attention is what a kernel or two products around a softmax do; its weights
are those that its queries, keys and values come from and the one that reads its result; all others of a block are its
MLP, or its experts. Some blocks may have an MLP where others have experts. What comes of it is checked: the dimensions
give as many parameters as the program has, or the model is refused.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from soli.core.errors import SoliError
from soli.planner.capture import MEASURED, Product, Trace, capture
from soli.planner.models import Model

NEAR = 0.03
"""How far the parameters that the dimensions give may be from the program's."""
BESIDE = 0.02
"""The share of a forward's flops up to which products that are not planned are not told of."""
LIKE = "a decoder or an encoder of like blocks, each of one attention and one MLP"


class UnknownError(SoliError):
    """A program that these dimensions do not describe."""


Stack = list[str]
"""Names of blocks of one type, one after the other."""


@dataclass(frozen=True)
class Heads:
    """Attention's part of a block, and the products that are its own."""

    heads: int
    kv_heads: int
    width: int
    compressed: int  # parameters, where keys and values come of a latent vector; 0: they do not
    seq: int = field(compare=False)
    flash: bool = field(compare=False)
    both_ways: bool = field(compare=False)
    products: frozenset[int] = field(compare=False)


class Mlp(NamedTuple):
    """What follows attention: the inner width of one expert, or of all there is."""

    ffn: int
    gated: bool
    experts: int = 0
    active: float = 1.0  # a token is multiplied with so many
    shared: int = 0  # every token with these of them
    chosen: int = 0


def read_program(name: str, model: nn.Module, batch: Any, run: Callable[[nn.Module, Any], Any]) -> tuple[Model, tuple[str, ...]]:
    """The dimensions of a program's model, and what of them was inferred. `run(model, batch)`: its forward and loss."""
    trace = capture(model, batch, run)
    if not trace.attentions:
        raise _no_stack(name, "no attention: neither its kernel nor two products around a softmax")
    stack = _stack(name, model, trace)
    hidden = _hidden(name, trace, stack)
    heads, (mlp, *others), plain = _layers(name, trace, stack, hidden)
    made = Model(
        name=name, layers=len(stack), hidden=hidden, heads=heads.heads, kv_heads=heads.kv_heads,
        head_size=heads.width, ffn=mlp.ffn, gated=mlp.gated, vocab=0, experts=mlp.experts, active=mlp.active, tied=True,
        seq=heads.seq, shared=mlp.shared, compressed=heads.compressed, flash=heads.flash, both_ways=heads.both_ways,
        plain=plain, plain_ffn=others[0].ffn if others else 0,
    )  # fmt: skip
    has = sum(p.numel() for p in model.parameters())
    read = [(replace(made, vocab=vocab, tied=tied), told) for vocab, tied, told in _tables(name, trace, stack)]
    made, told = next((one for one in read if abs(one[0].parameters - has) <= NEAR * has), read[0])
    _check(made, has)
    said = [f"the batch has sequences of {heads.seq} tokens", *told]
    if not heads.flash:
        said.append("scores are kept in memory: attention is written out")
    if plain:
        said.append(f"{plain} of its {len(stack)} layers have an MLP of {others[0].ffn} and no experts, and a stage has as many of both as the model")
    if mlp.experts and (each := mlp.active - mlp.shared) != mlp.chosen:
        said.append(f"each token is multiplied with {each:.3g} of {mlp.experts} experts, whatever is chosen")
    if (share := _beside(trace)) > BESIDE:
        said.append(f"products of activations beside attention, {share:.0%} of the forward's flops, are not counted")
    if any(not p.requires_grad for p in model.parameters()):
        said.append("frozen parameters are planned as trained ones")
    return made, (*said, f"the dimensions give {made.parameters / has - 1:+.2%} of the program's parameters")


def _stack(name: str, model: nn.Module, trace: Trace) -> Stack:
    """The longest run of blocks of one type that attend."""
    attending = {part for one in trace.attentions for part in one.where}
    runs = [
        [f"{path}.{i}" if path else str(i) for i in places]
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        for places in _runs(list(module), {model.get_submodule(part) for part in attending})
    ]
    runs = [one for one in runs if attending & set(one)]
    if not runs:
        raise _no_stack(name, "attention is in no block of a ModuleList or a Sequential")
    found = max(runs, key=lambda one: (len(one), -len(one[0])))
    _of_its_own(name, model, found, trace)
    return found


def _runs(modules: list[nn.Module], attending: set[nn.Module]) -> list[list[int]]:
    """Neighbours of one type, which have parameters and attend or do not."""
    kinds = [(type(m), any(True for _ in m.parameters()), m in attending) for m in modules]
    runs = groupby(range(len(kinds)), key=kinds.__getitem__)
    return [list(places) for (_, parameters, _), places in runs if parameters]


def _layers(name: str, trace: Trace, stack: Stack, hidden: int) -> tuple[Heads, list[Mlp], int]:
    """Attention, which all blocks have alike; what follows it, experts first; and how many blocks have none where others do."""
    heads = [_heads(name, trace, stack, block, hidden) for block in stack]
    mlps = [_mlp(name, trace, block, hidden, one) for block, one in zip(stack, heads, strict=True)]
    found = sorted(set(mlps), key=lambda mlp: -mlp.experts)
    some = len(found) == 2 and found[0].experts > found[1].experts == 0 and found[0].gated == found[1].gated
    if len(set(heads)) > 1 or not (some or len(found) == 1):
        first, other = stack[0], next(b for b, *one in zip(stack, heads, mlps, strict=True) if one != [heads[0], mlps[0]])
        raise _no_stack(name, f"the blocks {first} and {other} differ: {_said(_inside(trace, first))}; and {_said(_inside(trace, other))}")
    return heads[0], found, mlps.count(found[1]) if some else 0


def _of_its_own(name: str, model: nn.Module, stack: Stack, trace: Trace) -> None:
    """Refuses blocks that share weights or run twice, and attention that is not once in each block."""
    weights = [id(p) for block in stack for p in model.get_submodule(block).parameters()]
    times = [sum(block in one.where for one in trace.attentions) for block in stack]
    if len(set(weights)) < len(weights):
        raise _no_stack(name, f"the blocks {stack[0]} to {stack[-1]} share weights")
    if len(trace.inputs.get(stack[0], [])) > 1:
        raise _no_stack(name, f"the block {stack[0]} runs {len(trace.inputs[stack[0]])} times a step")
    if outside := [one for one in trace.attentions if not set(one.where) & set(stack)]:
        where = next((part for part in reversed(outside[0].where) if part), "the model itself")
        many = f"the {len(stack)} blocks of one type from {stack[0]}: an encoder and a decoder, or blocks that differ"
        raise _no_stack(name, f"attention in {where} too, outside of {many}")
    odd = next((i for i, count in enumerate(times) if count != 1), None)
    if odd is not None:
        raise _no_stack(name, f"the block {stack[odd]} attends {times[odd]} times")


def _hidden(name: str, trace: Trace, stack: Stack) -> int:
    widths = {shape[-1] if shape else 0 for shape in [shape for block in stack for shape in trace.inputs[block]]}
    if len(widths) != 1 or not min(widths):
        raise _no_stack(name, f"blocks read widths of {', '.join(map(str, sorted(widths)))}")
    return widths.pop()


def _inside(trace: Trace, block: str) -> dict[int, Product]:
    """The block's products with weights, by number."""
    return {i: one for i, one in enumerate(trace.products) if one.weight and block in one.where}


def _heads(name: str, trace: Trace, stack: Stack, block: str, hidden: int) -> Heads:
    number, one = next((i, a) for i, a in enumerate(trace.attentions) if block in a.where)
    own = _inside(trace, block)
    made_of = sorted(n for kind, n in one.reads if kind == "product" and n in own)
    out = next((n for n, p in own.items() if ("attention", number) in p.reads), None)
    tokens = math.prod(trace.inputs[block][0]) // hidden
    if not tokens:
        raise SoliError(f"{name}: its batch has no rows", got=f"{block} is given a tensor of {trace.inputs[block][0]}", fix="return a batch of one row or more")
    heads, rest = divmod(one.queries, one.width * tokens)
    seq = max(a.tokens for a in trace.attentions if set(a.where) & set(stack))  # some read a window
    values = own[out].goes[0] // max(heads, 1) if out is not None else 0
    if out is not None and heads and not rest and _is_latent([own[n].goes for n in made_of], hidden, heads, one.width, values):
        of_it = frozenset({out} | _before(own, made_of))
        return Heads(heads, heads, (one.width + values) // 2, sum(math.prod(own[n].goes) for n in of_it), seq, one.flash, one.both_ways, of_it)
    kv_heads, more = divmod(sum(own[n].goes[1] for n in made_of) - heads * one.width, 2 * one.width)
    known = out is not None and own[out].goes == (heads * one.width, hidden) and all(own[n].goes[0] == hidden for n in made_of)
    if out is None or not known or rest or more or kv_heads < 1 or heads % kv_heads:
        raise _odd(name, f"attention in {block}", _said(own), f"queries, keys and values of heads of {one.width}, each made by one product of {hidden}, and one after them")
    return Heads(heads, kv_heads, one.width, 0, seq, one.flash, one.both_ways, frozenset({*made_of, out}))


def _is_latent(goes: list[tuple[int, int]], hidden: int, heads: int, width: int, values: int) -> bool:
    """Whether keys and values are made of a latent vector, beside which stands the part of the keys that has positions (MLA, arXiv 2405.04434, 2.1)."""
    made = ((b[1], heads * (width - (a[1] - b[0]) + values)) for a in goes for b in goes if a[0] == hidden and b[0] < min(a[1], hidden))
    return len(goes) == 3 and any(b == wanted for b, wanted in made) and any(to == heads * width for _, to in goes)


def _before(own: dict[int, Product], numbers: list[int]) -> set[int]:
    """Products of a block, and those of it that they come from."""
    found = set(numbers)
    while more := {n for i in found for kind, n in own[i].reads if kind == "product" and n in own} - found:
        found |= more
    return found


def _mlp(name: str, trace: Trace, block: str, hidden: int, heads: Heads) -> Mlp:
    own = {n: p for n, p in _inside(trace, block).items() if n not in heads.products}
    chosen = [count for where, count in trace.sorts if block in where]
    many = {n: p for n, p in own.items() if len(p.shape) == 3}
    if not many:
        if chosen:
            raise _odd(name, f"what follows attention in {block}", _said(own), "an MLP, or experts that are one weight")
        return Mlp(*_matrices(name, block, hidden, own))
    experts = next(iter(many.values())).shape[0]
    ffn, gated = _matrices(name, block, hidden, many)
    # the router, and what says how much of a shared expert there is
    beside = {n: p for n, p in own.items() if n not in many and p.goes not in ((hidden, experts), (hidden, 1))}
    wide, alike = _matrices(name, block, hidden, beside) if beside else (0, gated)
    if wide % ffn or alike != gated or any(p.shape[0] != experts for p in many.values()):
        raise _odd(name, f"what follows attention in {block}", _said(own), f"experts of one width, and beside them one of {ffn} or so many times that")
    each = [p for p in many.values() if p.goes[1] == hidden][-1].rows / (math.prod(trace.inputs[block][0]) // hidden)
    active = round(each) if math.isclose(each, round(each)) else each
    return Mlp(ffn, gated, experts, active + wide // ffn, wide // ffn, chosen[-1] if chosen else 0)


def _matrices(name: str, block: str, hidden: int, own: dict[int, Product]) -> tuple[int, bool]:
    """The inner width of an MLP of these products, and whether it has a gate."""
    down = [p for p in own.values() if p.goes[1] == hidden]
    ffn = down[-1].goes[0] if down else 0
    ups = [p.goes[1] for p in own.values() if p is not down[-1]] if down else []
    if not ups or any(p.goes[0] != hidden for p in own.values() if p is not down[-1]) or sum(ups) not in (ffn, 2 * ffn):
        raise _odd(name, f"what follows attention in {block}", _said(own), f"an MLP of two products or three, from {hidden} and back")
    return ffn, sum(ups) == 2 * ffn


def _beside(trace: Trace) -> float:
    """The share of products' flops that are neither a weight's nor attention's."""
    of_attention = frozenset().union(*(one.products for one in trace.attentions))
    other = sum(p.flops for i, p in enumerate(trace.products) if not p.weight and i not in of_attention)
    return other / sum(call.flops for call in trace.calls)


def _tables(name: str, trace: Trace, stack: Stack) -> list[tuple[int, bool, list[str]]]:
    """The vocabulary, whether one table is both the first and the last, and what was inferred of it; where a table has as many rows as the last
    product gives, it may be another one's (two classes, and two kinds of tokens)."""
    inside = [i for i, p in enumerate(trace.products) if set(p.where) & set(stack)]
    after = [p for p in trace.products[max(inside) + 1 :] if p.weight]
    rows = max((shape[0] for shape in trace.tables.values()), default=0)
    if not after and not rows:
        raise _no_stack(name, "neither a table of tokens nor a product that gives logits")
    if not after:
        return [(rows, True, [f"no product gives logits: they are taken to be {rows} wide, by the embedding's table"])]
    last, tied = after[-1], after[-1].weight in trace.tables
    found = [(last.goes[1], tied, list[str]())] if tied or any(shape[0] == last.goes[1] for shape in trace.tables.values()) else []
    vocab, what = max(rows, last.goes[1]), f"an embedding of {rows}" if rows else "no embedding"
    return found if tied else [*found, (vocab, True, [f"{what} and a last product of {last.goes[1]} are taken as one table of {vocab}"])]


def _check(made: Model, has: int) -> None:
    gives = made.parameters
    if abs(gives - has) <= NEAR * has:
        return
    raise UnknownError(
        f"the dimensions that were found are not all of {made.name}",
        got=f"{has:,} parameters in the program, {gives:,.0f} by {made.layers} layers of {made.hidden}, "
        f"{made.heads} heads ({made.kv_heads} of keys) of {made.head_size}, an MLP of {made.ffn}"
        f"{' with a gate' if made.gated else ''}, a vocabulary of {made.vocab}{', tied' if made.tied else ''}",
        allowed=f"{NEAR:.0%} between them",
        fix=f"{LIKE}, with little beside them; {MEASURED}",
    )


def _no_stack(name: str, why: str) -> UnknownError:
    return UnknownError(f"{name} is no transformer that the planner knows", got=why, allowed=LIKE, fix=MEASURED)


def _odd(name: str, where: str, got: str, allowed: str) -> UnknownError:
    return UnknownError(f"{name}: {where} is not understood", got=got, allowed=allowed, fix=MEASURED)


def _said(own: dict[int, Product]) -> str:
    return ", ".join(f"{p.weight} {p.goes[0]} to {p.goes[1]}" for p in own.values())[:600] or "no products"

"""Context parallelism from end to end: what crosses cp, what a rank keeps, two hosts, errors, checkpoints, other types,
and models that use their sequence in many ways, against the sequential program in float64."""

from __future__ import annotations

import functools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import sequences
import soli
from cases import CASES
from noted import noted
from pool import Pool
from soli import losses
from soli.core.errors import SoliError
from soli.core.layout import even_parts
from soli.engine.contract import rounding
from soli.engine.engine import Engine, parallelize
from soli.mesh.record import recorder
from soli.models.gpt import GPT, GPTConfig
from soli.parallel.context.ring import length
from soli.parallel.context.sequence import spans_of
from soli.parallel.context.ulysses import shared_heads
from soli.verify.parity import BOUND, adamw, compare, expected_of, under_plan
from sweep import spread, swept

TOKENS = losses.cross_entropy("targets")
ROWS, LENGTH, WIDTH, HEADS, LAYERS = 8, 7, 12, 3, 3  # of the case "gpt"

# --- parity of models that use their sequence otherwise -----------------------------------------------------


@functools.cache
def expected(name: str) -> Any:
    return expected_of(sequences.case(name))


def parity(name: str, plan: str) -> tuple[float, str]:
    return compare(under_plan(sequences.case(name), plan), expected(name))


RING, HEADWISE, SCORES = "cp=2", "cp=2,context=ulysses", "cp=2,context=scores"
ATTENTION = list(sequences.PARTS)[: list(sequences.PARTS).index("sums")]
OTHERS = [name for name in sequences.PARTS if name not in ATTENTION]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *spread([(name,) for name in ATTENTION], [(RING,), (HEADWISE,), (SCORES,)]),
        *spread([(name,) for name in OTHERS], [(RING,), (HEADWISE,)]),
        *((name, RING) for name in sequences.ENDS),
        ("place", SCORES),
    ],
)
def test_models_equal_sequential(pool: Pool, name: str, plan: str) -> None:
    for worst, tensor in pool.run(parity, name, plan, ranks=2):
        assert worst <= BOUND, tensor


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("one key", "cp=2,tp=2"),  # keys are whole over tp
        swept("one key", "cp=2,tp=2,sp=on,context=scores"),
        ("grouped", "cp=2,tp=2,context=ulysses"),
        swept("three heads", "cp=2,tp=2,sp=on,context=ulysses"),  # as those of "gpt-dropout" (test_parity.py)
        ("three heads", "cp=4,context=ulysses"),  # one rank has no head
        swept("one head", "cp=4"),
        swept("relative", "cp=2,tp=2"),
        swept("biased", "cp=4"),
        swept("cross", "cp=4"),
        ("cross", "cp=2,tp=2,sp=on"),
        ("packed", "cp=4,recompute=full"),
        ("mixer", "cp=2,tp=2"),  # a weight that is cut over tp where its other dim meets the sequence
        ("class token", "cp=2,tp=2,sp=on"),
        ("experts", "cp=2,tp=2"),
        swept("by hand", "cp=2,tp=2"),
        swept("mean", "dp=2,cp=2,zero=3"),
    ],
)
def test_models_on_four_ranks(pool: Pool, name: str, plan: str) -> None:
    for worst, tensor in pool.run(parity, name, plan, ranks=4):
        assert worst <= BOUND, tensor


# --- what crosses ---------------------------------------------------------------------------------------------

ALWAYS = {("all_reduce", "cp", "a sum over a cut dim"): (2, 8)}  # the loss, there and back
MARKS = "rows, loss and count of the last stage"


def crossed(plan: str) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Of the third step, without the first ones' checks: how many collectives of a kind, and their bytes."""
    case = CASES["gpt"]
    model, loss_fn, batches = case.make()
    engine = parallelize(model, loss_fn, optimizer=case.optimizer, plan=plan)
    engine.step(batches[0])
    engine.step(batches[1])
    recorder.clear()
    engine.step(batches[1])
    count: Counter[Any] = Counter()
    size: Counter[Any] = Counter()
    for record in recorder.records:
        if record.axis != "replicate":  # gradients of parameters
            key = record.operation, record.axis, record.label
            count[key] += 1
            size[key] += record.bytes
    return {key: (count[key], size[key]) for key in count}


def closed_form(context: str, cp: int, tp: int, rank: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    part, column = divmod(rank, tp)
    own = [length(spans) for spans in spans_of(LENGTH, cp, context == "ring")]
    first, last = even_parts(HEADS, tp)[column]
    each = 4 * ROWS * (last - first) * (WIDTH // HEADS)  # bytes of a position of queries, keys or values
    found = ALWAYS | {("all_reduce", "cp", MARKS): (1, 5 * 8 * cp)}
    if context == "ulysses":
        of_heads, _ = shared_heads(last - first, last - first, cp)
        some = each * (of_heads[part][1] - of_heads[part][0]) // (last - first)
        found["all_to_all", "cp", "heads of all positions"] = (4 * LAYERS, 4 * LAYERS * each * own[part])
        found["all_to_all", "cp", "positions of all heads"] = (4 * LAYERS, 4 * LAYERS * some * LENGTH)
    else:
        how = "and" if context == "ring" else "or"  # together, or keys first and values later
        turns = LAYERS * (cp - 1) * (1 if context == "ring" else 2)
        back = f"gradient{'s' if context == 'ring' else ''} of keys {how} values of a ring"
        # Of keys and of values, forward and backward, all but the block that comes to this rank last.
        sent = 4 * LAYERS * each * (LENGTH - own[(part + 1) % cp])
        found["exchange", "cp", f"keys {how} values of a ring"] = (2 * turns, sent)
        found["exchange", "cp", back] = (turns, 2 * LAYERS * each * (LENGTH - own[part]))
    if tp > 1:
        rows = 4 * ROWS * own[part]
        hidden = (2 * LAYERS + 1, (2 * LAYERS + 1) * rows * WIDTH)
        found["all_reduce", "tp", "output of a row"] = hidden
        found["all_reduce", "tp", "gradient of a column's input"] = hidden
        found["all_reduce", "tp", "largest logit"] = (1, rows)
        found["all_reduce", "tp", "sums of the cross-entropy"] = (1, 3 * rows)
        found["all_reduce", "tp", MARKS] = (1, 5 * 8 * tp)
    return found


@pytest.mark.parametrize(
    ("context", "cp", "tp"),
    [
        swept("ring", 2, 1), ("ring", 4, 1), ("ring", 2, 2),
        ("ulysses", 2, 1), swept("ulysses", 4, 1), swept("ulysses", 2, 2),
        ("scores", 2, 1), swept("scores", 4, 1), swept("scores", 2, 2),
    ],
)  # fmt: skip
def test_what_crosses_in_a_step(pool: Pool, context: str, cp: int, tp: int) -> None:
    """Each kind in the number and with the bytes of its closed form, and nothing else: nothing is gathered."""
    plan = f"cp={cp},tp={tp},context={context}"
    for rank, found in enumerate(pool.run(crossed, plan, ranks=cp * tp)):
        assert found == closed_form(context, cp, tp, rank)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_ranks_of_a_ring_have_the_same_work(cp: int) -> None:
    spans = spans_of(8 * cp, cp, zigzag=True)
    assert len(set(sequences.pairs(spans, spans, causal=True))) == 1
    assert sorted(n for own in spans for a, b in own for n in range(a, b)) == list(range(8 * cp))


# --- what a rank keeps ----------------------------------------------------------------------------------------

LONG = {"rows": 2, "length": 64, "width": 16, "layers": 2}


def long_gpt(dropout: float) -> tuple[GPT, dict[str, Tensor]]:
    torch.manual_seed(0)
    sizes = {"dim": LONG["width"], "layers": LONG["layers"], "heads": 4, "context": LONG["length"]}
    tokens = torch.randint(31, (LONG["rows"], LONG["length"] + 1))
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    return GPT(GPTConfig(vocab=31, dropout=dropout, **sizes)), batch


def kept(plan: str, dropout: float) -> int:
    """Bytes of memory that activations take between forward and backward: of what is saved, but for parameters.

    Not counted, and the same on every rank of cp: whole numbers (tokens, targets, positions) and 0-d tensors.
    """
    model, batch = long_gpt(dropout)
    engine = parallelize(model, TOKENS, optimizer=adamw, plan=plan)
    engine.step(batch)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        memory = x.untyped_storage()  # kept, so that no other gets its address
        if x.is_floating_point() and x.dim() and memory.data_ptr() not in parameters:
            saved[memory.data_ptr()] = memory
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        engine.forward_backward(batch)
    return sum(memory.nbytes() for memory in saved.values())


def test_memory_of_activations_is_shared_out(pool: Pool) -> None:
    """1/cp of one rank's, and the output of attention once more, which no kernel across ranks gives in torch's layout."""
    (alone,) = pool.run(kept, "dp=1", 0.0, ranks=1)
    output = 4 * LONG["layers"] * LONG["rows"] * LONG["length"] * LONG["width"]
    for context in ("ring", "ulysses"):
        for cp in (2, 4):
            found = pool.run(kept, f"cp={cp},context={context}", 0.0, ranks=cp)
            assert found == [(alone + output) // cp] * cp
    two, four = (pool.run(kept, f"cp={cp},context=scores", 0.0, ranks=cp) for cp in (2, 4))
    assert two == [2 * four[0]] * 2  # a rank's rows of scores: all keys, its share of the queries


@pytest.mark.parametrize("context", ["ring", "scores"])
def test_masks_of_dropout_are_shared_out(pool: Pool, context: str) -> None:
    """Every rank draws a mask whole, and keeps its own part alone."""
    two, four = (pool.run(kept, f"cp={cp},context={context}", 0.1, ranks=cp) for cp in (2, 4))
    whole = 4 * LONG["rows"] * LONG["length"] * LONG["width"]
    gathered = 2 * LONG["layers"] * whole if context == "ring" else 0  # keys and values of attention written out
    assert [n - gathered for n in two] == [2 * (four[0] - gathered)] * 2


# --- two hosts ------------------------------------------------------------------------------------------------


def on_two_hosts(name: str, plan: str) -> tuple[float, str, dict[str, int]]:
    os.environ["SOLI_HOST"] = "ab"[dist.get_rank() // 2]
    try:
        recorder.clear()
        worst, tensor = parity(name, plan)
    finally:
        del os.environ["SOLI_HOST"]
    return worst, tensor, dict(Counter(r.axis for r in recorder.records if "of a ring" in r.label))


@pytest.mark.parametrize("name", ["padded", swept("cross")])
def test_a_ring_over_two_hosts_is_a_double_one(pool: Pool, name: str) -> None:
    for worst, tensor, axes in pool.run(on_two_hosts, name, "cp=4", ranks=4):
        assert worst <= BOUND, tensor
        assert axes.keys() == {"cp inside a host", "cp between hosts"}
        assert axes["cp inside a host"] == 2 * axes["cp between hosts"]  # of three exchanges two stay inside


# --- errors, and what is said ---------------------------------------------------------------------------------


def refused(plan: str, model: str, size: int) -> tuple[str, bool]:
    """What is said before training, and whether the weights are as they were."""
    if model == "gpt":
        torch.manual_seed(0)
        made: torch.nn.Module = GPT(GPTConfig(vocab=29, dim=12, layers=1, heads=3, context=8))
        tokens = torch.arange(4 * size).view(4, size) % 29
        batch, loss_fn = {"tokens": tokens, "targets": tokens}, TOKENS
    else:
        made, loss_fn, batches = CASES[model].make()
        batch = batches[0]
        made.double()
    before = {n: p.detach().clone() for n, p in made.named_parameters()}
    try:
        parallelize(made, loss_fn, optimizer=adamw, plan=plan, example=batch)
    except SoliError as error:
        return str(error), all(torch.equal(p, before[n]) for n, p in made.named_parameters())
    return "", False


@pytest.mark.parametrize(
    ("plan", "ranks", "model", "size", "said"),
    [
        ("cp=4", 4, "gpt", 3,
         ("cp=4 cuts the sequence", "one has 3", "allowed sequences of at least 4", "fix     cp=3 or less")),
        ("cp=2", 2, "odd", 0,
         ("cp=2 cuts the sequence", "no lookup of tokens [B, S] and no block with an input [B, S, H]",
          "allowed sequences of at least 2", "fix     leave cp out")),
        ("context=ulysses", 2, "gpt", 6,
         ("cp=1 has one", "got     context=ulysses, cp=1", "fix     leave context out", 'plan="dp=auto"')),
        ("cp=3", 4, "gpt", 6,
         ("4 ranks are no multiple of pp x cp x tp = 3", "got     cp=3 on 4 ranks", "fix     plan=")),
        ("cp=4,dp=2", 4, "gpt", 6,
         ("the plan takes 8 ranks and 4 are there", "cp=4", "allowed degrees whose product is 4", "fix     plan=")),
        ("cp=2,context=rings", 2, "gpt", 6,
         ("'context' of the plan is not known", "got     rings", "allowed ring, ulysses, scores", "did you mean 'ring'")),
    ],
)  # fmt: skip
def test_errors(pool: Pool, plan: str, ranks: int, model: str, size: int, said: tuple[str, ...]) -> None:
    for text, untouched in pool.run(refused, plan, model, size, ranks=ranks):
        assert all(part in text for part in said), text
        assert untouched


GATHERED = "two parts of the sequence meet in a product"


def notes(name: str, plan: str, steps: int) -> list[str]:
    """What was said of gathering in so many steps and an evaluation."""
    before = len(noted())
    make = sequences.case(name).make if name in sequences.NAMES else CASES[name].make
    model, loss_fn, batches = make()
    engine = parallelize(model.double(), loss_fn, optimizer=adamw, plan=plan)
    for _ in range(steps):
        engine.step(batches[0])
    engine.evaluate(batches[:1])
    return [e["text"] for e in noted()[before:] if "gathered" in e["text"]]


@pytest.mark.parametrize(
    ("name", "plan", "times"),
    [
        ("gpt", RING, 0),
        swept("gpt", HEADWISE, 0),
        swept("gpt", SCORES, 0),
        ("gpt-dropout", RING, 1),
        ("gpt-dropout", HEADWISE, 1),
        ("gpt-dropout", SCORES, 0),
        ("written", RING, 1),
        ("written", SCORES, 0),
        ("relative", RING, 0),
        ("sums", RING, 0),
        swept("mean", RING, 0),
    ],
)
def test_the_note_of_gathered_attention(pool: Pool, name: str, plan: str, times: int) -> None:
    for found in pool.run(notes, name, plan, 2, ranks=2):
        assert len(found) == times
        assert all(GATHERED in text for text in found)


# --- checkpoints ----------------------------------------------------------------------------------------------


def trained(plan: str, steps: int, load: str = "", save: str = "") -> dict[str, Tensor]:
    model, loss_fn, batches = CASES["gpt"].make()
    engine = parallelize(model, loss_fn, optimizer=adamw, plan=plan, example=batches[0])
    if load:
        engine.load(load)
    for batch in batches[:steps]:
        engine.step(batch)
    if save:
        engine.save(save)
    return engine.global_state_dict(optimizer=True)


def test_checkpoints_across_plans(pool: Pool, tmp_path: Path) -> None:
    """Each plan loads what the one before saved, bit for bit; the last is under cp again, after a step in between."""
    path = str(tmp_path / "0")
    now = pool.run(trained, "cp=2,zero=1", 2, "", path, ranks=2)[0]
    plans = ["tp=2", "cp=2,context=ulysses,zero=3", "dp=2,zero=2", "cp=2,context=scores"]
    for number, plan in enumerate(plans, 1):
        for found in pool.run(trained, plan, 0, path, "", ranks=2):
            assert found.keys() == now.keys()
            assert all(torch.equal(found[name], now[name]) for name in now)
        following = str(tmp_path / str(number))
        now = pool.run(trained, plan, 1, path, following, ranks=2)[0]
        path = following


# --- evaluation, ragged batches, other types, deferred models -------------------------------------------------


def gpt_losses(plan: str, precision: str, deferred: bool = False) -> tuple[list[float], float]:
    """Losses of three ragged steps and of an evaluation, and how far rounding alone may take one of them."""
    torch.manual_seed(3)
    config = GPTConfig(vocab=29, dim=12, layers=2, heads=3, context=9)
    if deferred:
        with soli.deferred():
            model = GPT(config)
    else:
        model = GPT(config)
    if precision == "fp64":
        model.double()
    batches = []
    for number, rows in enumerate((5, 4, 7)):
        tokens = torch.randint(29, (rows, 10), generator=torch.Generator().manual_seed(number))
        batches.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone()})
    engine = parallelize(model, TOKENS, optimizer=adamw, clip=1.0, plan=f"{plan},precision={precision}")
    found = [float(engine.step(batch)) for batch in batches]
    return [*found, engine.evaluate(batches)], _bound(engine)


def _bound(engine: Engine) -> float:
    return rounding(engine, 5 * 9) * 4  # steps, each of which starts from the rounding of the one before


@functools.cache
def one_rank(precision: str) -> tuple[list[float], float]:
    return gpt_losses("dp=1", precision)


@pytest.mark.parametrize(
    ("plan", "precision", "deferred"),
    [
        ("cp=2,accumulate=3", "fp64", False),
        ("cp=2,context=ulysses,accumulate=4", "fp64", False),
        ("cp=2,context=scores,accumulate=2", "fp64", False),
        swept("cp=2", "fp32", False),
        ("cp=2", "fp32", True),
        ("cp=2,context=ulysses", "fp32", True),
        ("cp=2", "bf16", False),
        swept("cp=2,context=ulysses", "bf16", False),
        ("cp=2,context=scores", "bf16", False),
    ],
)
def test_losses_are_those_of_one_rank(pool: Pool, plan: str, precision: str, deferred: bool) -> None:
    ((wanted, _),) = pool.run(one_rank, precision, ranks=1)
    for found, bound in pool.run(gpt_losses, plan, precision, deferred, ranks=2):
        assert bound < 0.5
        assert found == pytest.approx(wanted, rel=bound, abs=0)


def short_after_long(plan: str) -> list[float]:
    """Losses of a batch and of one that is too short to be cut, and of their evaluation."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(vocab=29, dim=12, layers=2, heads=3, context=9)).double()
    long, short = (torch.arange(3 * n).view(3, n) % 29 for n in (7, 2))
    engine = parallelize(model, TOKENS, optimizer=adamw, plan=plan)
    batches = [{"tokens": x, "targets": x} for x in (long, short)]
    return [*(float(engine.step(batch)) for batch in batches), engine.evaluate(batches)]


def test_a_later_batch_may_be_too_short_to_cut(pool: Pool) -> None:
    (wanted,) = pool.run(short_after_long, "dp=1", ranks=1)
    for found in pool.run(short_after_long, "cp=3", ranks=3):
        assert found == pytest.approx(wanted, rel=1e-13)


@pytest.mark.parametrize(("name", "context"), [swept("gpt", "ring"), ("gpt", "ulysses"), swept("llama", "ring"), ("vit", "ring")])
def test_stages_may_begin_inside_the_block_that_cuts_the_sequence(pool: Pool, name: str, context: str) -> None:
    """Eight stages of three or two blocks: what a stage does not have, or gets cut, is no path of its own."""
    plan = f"dp=1,cp=2,context={context},pp=2,schedule=interleaved,chunks=4,microbatches=2"
    for got in pool.run(under_plan, CASES[name], plan, ranks=4, deadline=60):
        worst, tensor = compare(got, expected_of(CASES[name]))
        assert worst <= BOUND, tensor

"""The cost model: formulas against published ones and against simulations, and what must hold of any plan."""

from __future__ import annotations

import csv
from dataclasses import fields, replace
from math import isclose
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soli.planner.cost import arithmetic, communication, context, memory, pipeline, rings
from soli.planner.cost.constants import MEANINGS, Constants, known, repeated
from soli.planner.cost.points import ACT, EXPERTS, FULL, MLP, NONE, NORM, SELECTIVE, UP, Points, of_device, points
from soli.planner.cost.programs import CAST, blocks, of_program
from soli.planner.cost.states import of_states
from soli.planner.cost.step import layer, step
from soli.planner.hardware.devices import devices

PUBLISHED = Path(__file__).parent.parent / "benchmarks/published"
BASE = {
    "layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 16, "head_size": 128, "ffn": 8192, "gated": 0, "seq": 2048,
    "vocab": 51200, "experts": 0, "active": 1, "tied": 1, "flash": 0, "frozen": 0, "global_batch": 64, "microbatch": 1,
    "tp": 1, "sp": 0, "cp": 1, "pp": 1, "chunks": 1, "dp": 1, "zero": 0, "ep": 1, "recompute": NONE, "offload": 0,
    "precision": 2, "low": 2, "peak": 312e12, "peak_wide": 312e12, "capacity": 80 * 2**30, "bandwidth": 2e12, "node": 8, "link": 300e9,
    "weight": 2, "gradient": 4, "summed": 4, "copied": 0, "moments": 12, "whole": 0, "casts": 0, "logged": 0, "link_latency": 6e-6, "net": 25e9, "net_latency": 5e-6, "host": 25e9,
}  # fmt: skip


def point(**changes: float) -> Points:
    return points([BASE | changes])


def usual(**changes: float) -> Constants:
    return repeated({name: meaning.default for name, meaning in MEANINGS.items()} | changes, 1)


ONE = usual()
NOTHING = (np.zeros(1), np.zeros(1))

# --- formulas ---------------------------------------------------------------------------------------------


def memory_rows() -> list[dict[str, str]]:
    with (PUBLISHED / "planner_calculon_fig1_memory.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_memory_is_that_of_the_paper() -> None:
    """arXiv 2205.05198, figure 1: all 16 values, to the digits that are given."""
    rows = memory_rows()
    assert len(rows) == 16
    for row in rows:
        number = {name: float(row[name]) for name in ("layers", "hidden", "heads", "seq", "tp", "pp", "microbatch")}
        modes = {"none": (NONE, 0), "seqsel": (SELECTIVE, 1), "full": (FULL, 0)}
        recompute, sp = modes[row["recompute_mode"]]
        made = point(
            **number, ffn=4 * number["hidden"], kv_heads=number["heads"], head_size=number["hidden"] / number["heads"],
            chunks=max(float(row["vp"] or 1), 1), global_batch=float(row["global_batch"]), recompute=recompute, sp=sp,
        )  # fmt: skip
        gib = 2.0**30
        if row["quantity"].startswith("activations"):
            got = made.own_layers * pipeline.in_flight(made) * memory.activations_of_layer(made) / gib
        else:
            matrices = 12 * made.layers * made.hidden**2 / made.tp / made.pp  # norms and tables are not in the paper's
            got = (memory.states(made, usual(resident=0.0)) / memory.of_stage(made)[0]) * matrices
            got = got / gib
        assert isclose(got[0], float(row["reference_value"]), rel_tol=1e-4), row


def test_memory_of_a_program_that_makes_nothing_again() -> None:
    """Per token of a gated layer, plain and under sequence parallelism; the paper's is less by what is made again."""
    change = {"gated": 1, "ffn": 4096, "flash": 1, "tp": 8, "sp": 1, "heads": 32, "kv_heads": 32, "head_size": 64}
    less, more = (memory.activations_of_layer(point(frugal=flag, **change))[0] / 2048 for flag in (1.0, 0.0))
    assert isclose(more - less, 4 * 2048 * 7 / 8 + (2 * 4096 + 4 * 2048) / 8)


@pytest.mark.parametrize(("framework", "bytes_of_one"), [("megatron-tests", 8), ("fsdp", 4), ("megatron", 2)])
def test_experts_keep_what_they_read_and_give_in_both_orders_or_less(framework: str, bytes_of_one: int) -> None:
    """What the tests' unfused permutation keeps; what is read and given; what is read alone."""
    routed = of_program(framework, "hopper")["routed"]
    dense, two, four = (
        memory.activations_of_layer(point(**made, routed=routed))[0] / 2048
        for made in ({}, {"experts": 8, "active": 2}, {"experts": 8, "active": 4})
    )
    copy = bytes_of_one * 2048 + 2 * 8192 * 2
    assert isclose(four - two, 2 * copy)
    assert isclose(two - dense, 2 * copy - 2 * 8192 * 2 + 4 * 2048)


def test_products_of_8_bits_keep_what_they_read_in_8() -> None:
    """Of a token, gated and under a kernel: two norms' outputs and the MLP's inner vector a byte less, attention's result once more."""
    change = {"gated": 1, "ffn": 4096, "flash": 1, "routed": 2.0}
    kept = lambda **more: float(memory.activations_of_layer(point(**change, **more))[0]) / 2048
    assert isclose(kept(low=2) - kept(low=1), 2 * 2048 + 4096 - 2048)
    experts = {"experts": 8, "active": 2}
    assert isclose(kept(low=2, **experts) - kept(low=1, **experts), 2 * 2048 + 2 * (4096 + 2048) - 2048)
    assert kept(low=2, recompute=FULL) == kept(low=1, recompute=FULL)  # a layer's input is none of them


@pytest.mark.parametrize(
    ("framework", "precision", "pipeline", "said", "kept"),
    [
        ("megatron", "bf16", True, "", 18),  # 2 + 4 + 12
        ("megatron", "fp16", True, "", 16),  # and 4 more at the update
        ("megatron", "bf16", True, "NeMo (Megatron-Core)", 16),
        ("megatron", "bf16", True, "NeMo, fp32 grad reduce", 18),
        ("megatron", "bf16", True, "precision-aware optimizer", 12),  # 2 + 2 + 4 + 2 + 2
        ("megatron-deepspeed", "bf16", True, "", 20),  # 2 + 2 + 4 + 12
        ("megatron-deepspeed", "bf16", False, "", 16),
        ("deepspeed", "fp16", False, "", 16),
        ("fsdp", "bf16", False, "", 16),
        ("soli", "bf16", False, "", 16),  # 4 + 4 + 8
    ],
)
def test_states_of_programs(framework: str, precision: str, pipeline: bool, said: str, kept: int) -> None:
    made = point(**of_states(framework, precision, pipeline, said))
    assert isclose(memory.states(made, usual(resident=0.0))[0], kept * memory.of_stage(made)[0][0])


def test_a_copy_in_8_bits_is_of_layers_alone() -> None:
    without, beside = (memory.peak(point(eighth=flag), ONE)[0] for flag in (0, 1))
    assert isclose(beside - without, 24 * (4 * 2048**2 + 2 * 2048 * 8192 + 2 * 2 * 2048))  # two norms have a weight and a bias


def test_adapters_that_cast_what_they_read_keep_it() -> None:
    """In 32 bits: of an MLP's two products and attention's four what each reads; of attention alone what q and v read."""
    kept = lambda **more: memory.activations_of_layer(point(frozen=1, adapters=1e3, **more))[0]
    assert isclose(kept(widened=4) - kept(), 2048 * 4 * (5 * 2048 + 8192))
    assert isclose(kept(widened=4, spared=1) - kept(spared=1), 2048 * 4 * 2 * 2048)


def test_a_backward_ends_with_the_last_layers_activations_beside_all_gradients() -> None:
    k = usual(resident=0.0, workspace=0.0)
    made = point(seq=1024, recompute=FULL, weight=2, gradient=2, summed=2, moments=4, late=1, dp=64, vocab=512)
    count, last = memory.of_stage(made)[0][0], memory.activations_of_layer(made.recomputing(NONE))[0]
    assert last > 0.01 * count
    assert isclose(memory.peak(made, k)[0], count * (2 + 2 + 4) + last)


def test_programs_under_autocast_keep_residuals_of_32_bits_where_no_compiler_and_no_wider_word_is() -> None:
    """Recomputed in full a layer's input, 2 bytes more for each hidden unit; a loss in pieces keeps one of them."""
    casts = lambda said, framework="fsdp": of_states(framework, "bf16", False, said)["casts"]
    assert [casts(said) for said in ("autocast", "bf16_amp, FSDP", "16-mixed", "no autocast", "autocast, torch.compile", "pure bf16, autocast", "")] == [1, 1, 1, 0, 0, 0, 0]
    assert [casts(said) for said in ("disable autocast", "megatron_amp_O2: true", "Apex AMP", "AMP disabled", "precision amp_bf16")] == [0, 0, 0, 0, 0]
    assert casts("autocast", "megatron") == 0
    assert [of_program("fsdp", "ampere", said)["launches"] for said in ("autocast", "bf16_amp, FSDP", "")] == [CAST, 1, 1]
    layer = lambda **more: float(memory.activations_of_layer(point(recompute=FULL, composed=1, **more))[0]) / 2048
    assert isclose(layer(casts=1) - layer(casts=0), 2 * 2048)
    loss = lambda **more: memory.logits(point(casts=1, **more), usual(resident=0.0))[0]
    assert isclose(loss(pieces=8.0), loss() / 8)
    short = {"recompute": FULL, "seq": 8192, "layers": 1, "hidden": 64, "vocab": 200_000}
    peak = lambda **more: memory.kinds(point(casts=1, **short, **more), usual(resident=0.0))["logits"][0]
    assert peak(pieces=8.0) < peak() / 2


def test_what_layers_hand_on_under_autocast_has_32_bits_with_a_compiler_too() -> None:
    """Which leaves of a recomputed layer its input alone."""
    bytes_each = lambda said, framework="fsdp": of_states(framework, "bf16", False, said)["residual"]
    assert [bytes_each(said) for said in ("autocast, torch.compile", "autocast", "torch.compile", "pure bf16, autocast")] == [4, 4, 2, 2]
    layer = lambda **more: float(memory.activations_of_layer(point(recompute=FULL, **more))[0]) / 2048
    assert [layer(residual=of) for of in (2, 4)] == [2 * 2048, 4 * 2048]


def test_pipelines_of_deepspeed_sum_gradients_in_fp32() -> None:
    """deepspeedai/DeepSpeed, runtime/bf16_optimizer.py, which its PipelineModule steps with in bf16."""
    kept = [of_states(program, precision, piped)["gradient"] for program in ("deepspeed", "megatron-deepspeed") for precision, piped in (("bf16", True), ("bf16", False), ("fp16", True))]
    assert kept == [6, 2, 2] * 2


def test_scores_of_torchs_operations_in_32_bits() -> None:
    """A softmax, its dropout's mask and what that leaves: 4 + 1 + 4 bytes; of 16 bits the softmax in fp32 and its cast, mask and rest: 7."""
    kept = lambda **more: float(memory.activations_of_layer(point(eager=2.1, **more))[0])
    for low, each in ((4, 9), (2, 7)):
        assert isclose(kept(low=low, heads=32, kv_heads=32, head_size=64) - kept(low=low), 2048 * 16 * 2048 * each)


@pytest.mark.parametrize(("heads", "keys", "size"), [(9, 3, 64), (15, 5, 64), (28, 4, 128), (6, 6, 64), (71, 1, 64)])
def test_the_product_that_makes_queries_keys_and_values_has_whole_columns(heads: int, keys: int, size: int) -> None:
    """SmolLM2's nine heads share three keys: 960 columns, and not a 10^-13 less, of which no rows would begin where memory does."""
    made = point(hidden=heads * size, heads=heads, kv_heads=keys, head_size=size)
    assert made.opening_width[0] == (heads + 2 * keys) * size


def test_the_update_of_fp16_copies_gradients_when_activations_are_gone() -> None:
    """Over 8 ranks of ZeRO-1 an eighth of them; beside much that the passes keep they are never the most."""
    k = usual(resident=0.0, workspace=0.0)
    small = {"layers": 2, "seq": 8, "vocab": 512, "dp": 8, "zero": 1, **of_states("megatron", "fp16")}
    few, many = point(**small), point(**small | {"seq": 8192})
    count = memory.of_stage(few)[0][0]
    assert isclose(memory.peak(few, k)[0], count * (2 + 2 + (12 + 4) / 8))
    assert memory.kinds(few, k)["activations"][0] == 0
    assert memory.kinds(many, k)["optimizer"][0] == count * 12 / 8
    assert memory.peak(many, k)[0] == memory.peak(replace(many, copied=np.zeros(1)), k)[0]


def test_torchs_fsdp_has_whole_units_and_gradients_in_a_pipeline() -> None:
    """Gathered once, in 16 bits, with gradients of the width that they are summed in; without a pipeline a layer and the next, and parts."""
    k = usual(resident=0.0, workspace=0.0)
    kept = {"seq": 8, "dp": 8, "zero": 3, "microbatch": 1, "global_batch": 64, "frozen": 0, **of_states("fsdp", said="fp32 reduce")}
    piped, alone = point(pp=2, **kept), point(pp=1, **kept)
    for made, gradients, gathers in ((piped, 4, 1), (alone, 2 / 8, 8)):
        kinds, stage = memory.kinds(made, k), memory.of_stage(made)[0][0]
        assert isclose(kinds["gradients"][0], gradients * stage)
        first, forth, *_ = (each[0] for each in communication.gathers_of_layer(made, k, *memory.of_layer(made)))
        assert isclose(first + (8 - 1) * forth, gathers * first)
    assert isclose(memory.kinds(piped, k)["gathered"][0], 2 * memory.of_stage(piped)[0][0])
    assert memory.kinds(alone, k)["gathered"][0] < memory.of_stage(alone)[0][0]


def test_gradients_that_are_made_anew_take_no_memory_at_the_loss() -> None:
    """With many activations they are not there at the peak, with few they are, and with several microbatches always."""
    k = usual(resident=0.0, workspace=0.0)
    kept = {"weight": 2, "gradient": 2, "summed": 2, "copied": 0, "moments": 4, "late": 1, "dp": 64}
    few, many = point(seq=8, vocab=512, **kept), point(seq=8192, vocab=512, **kept)
    count = memory.of_stage(few)[0][0]
    last = memory.activations_of_layer(few.recomputing(NONE))[0]
    assert isclose(memory.peak(few, k)[0], count * (2 + 2 + 4) + last)
    assert memory.kinds(many, k)["activations"][0] > count * 2
    assert memory.kinds(many, k)["gradients"][0] == 0
    assert memory.kinds(replace(many, dp=np.full(1, 8.0)), k)["gradients"][0] == count * 2
    copied = memory.kinds(replace(few, copied=np.full(1, 2.0)), k)
    assert copied["gradients"][0] + copied["optimizer"][0] == count * (2 + 4 + 2)


def test_stages_in_one_server_and_in_several() -> None:
    """Sends go over the network where stages lie in several servers, and no microbatch takes less than the network is busy with it."""
    slow = {"pp": 16, "cp": 1, "tp": 2, "dp": 1, "layers": 32, "global_batch": 64, "net": 1e6, "net_latency": 0}
    send = lambda **changes: float(communication.send(point(**slow | changes), ONE)[0])
    tokens, share = 2048 * 2048 * 2, float(ONE.send_share[0])
    assert isclose(send(node=8), send(node=32) + 3 / 15 * (tokens / (1e6 * share) - tokens / (300e9 * share) - 6e-6))
    assert isclose(send(node=2, link_latency=0), tokens / (1e6 * share))
    floor = lambda **changes: float(communication.sending(point(**slow | changes), ONE)[0])
    each = tokens / (1e6 * float(ONE.net_share[0]))
    assert floor(node=32) == 0  # all of it in one server
    assert isclose(floor(node=8), each)  # a rank has one neighbour elsewhere
    assert isclose(floor(node=2), 2 * each)
    assert isclose(floor(node=2, pp=2), each)
    assert isclose(floor(node=2, chunks=2), 4 * each)
    assert isclose(floor(node=8, sp=1), each / 2)
    for net in (1e6, 1e9, 1e11):
        made = point(**slow | {"net": net, "node": 2})
        assert step(made, ONE).time[0] >= 64 * 2 * tokens / (net * float(ONE.net_share[0]))


def test_logits_in_pieces() -> None:
    k, whole = usual(logit_kept=12.0), point(tp=2)
    assert isclose(memory.logits(point(tp=2, pieces=8), k)[0] * 8, memory.logits(whole, k)[0])
    assert isclose(memory.logits(point(tp=2, pieces=0), k)[0] * 51200 / 2048, memory.logits(whole, k)[0])


def test_activations_that_lie_on_the_host_take_the_place_of_two_layers() -> None:
    for recompute in (NONE, FULL):
        here, moved = (point(moved=flag, recompute=recompute) for flag in (0, 1))
        one = memory.activations_of_layer(here)[0]
        assert isclose((memory.peak(here, ONE) - memory.peak(moved, ONE))[0], 22 * one)
        slow, quick = (layer(point(moved=1, recompute=recompute, host=host), ONE)[0][0] for host in (1e6, 1e15))
        assert slow == 2 * one / 1e6  # there and back, beside what is computed
        assert quick == layer(here, ONE)[0][0]


def test_a_loss_of_one_kernel_moves_ten_bytes_a_logit() -> None:
    """Eight, and two that the product writes, where others move 38 and two."""
    k = usual(logit_bytes=38.0, stream_share=1.0)
    saved = arithmetic.logits(point(), k) - arithmetic.logits(point(one_loss=1), k)
    assert isclose(saved[0], 30 * 2048 * 51200 / 2e12)


def test_gathers_take_the_host_time_too() -> None:
    """A layer of nothing: three passes are launched, four where it is computed again."""
    made = {"hidden": 64, "ffn": 64, "heads": 1, "kv_heads": 1, "head_size": 64, "seq": 64, "flash": 1, "dp": 8}
    k = usual(gather_floor=2e-3)
    for recompute, passes in ((NONE, 3), (FULL, 4)):
        with_, without = (layer(point(**made, zero=zero, recompute=recompute), k)[0][0] for zero in (3, 1))
        assert isclose(with_ - without, passes * 2e-3)


def test_what_lies_on_the_host_takes_no_memory_here() -> None:
    k, made = usual(resident=0.0), {"zero": 3, "dp": 8}
    here, moments, all_of_it = (memory.states(point(**made, offload=level), k)[0] for level in (0, 1, 2))
    assert isclose(here, memory.of_stage(point())[0][0] * 18 / 8)
    assert isclose(moments, here * 6 / 18)
    assert all_of_it == 0


def test_activations_of_32_bits_are_twice_as_large() -> None:
    for level in (NONE, SELECTIVE, FULL):
        wide, narrow = (memory.activations_of_layer(point(recompute=level, low=low))[0] for low in (4, 2))
        assert wide == 2 * narrow


def test_what_layers_move_and_send_of_32_bits_is_twice_as_much() -> None:
    """Beside logits, which a loss has in fp32 anyway, but for one of a single kernel."""
    k = usual(stream_share=1.0, logit_bytes=38.0)
    wide, narrow = (
        point(low=low, tp=4, pp=4, cp=2, one_loss=1, seq=8192, head_size=64, node=1, net_latency=0) for low in (4, 2)
    )
    sent = lambda p: communication.of_layer(p, k, context.crossing(p, k), NOTHING)[0]
    for of in (arithmetic.embedding, arithmetic.elements_forward):
        assert isclose(of(wide, k)[0], 2 * of(narrow, k)[0])
    for sends in (sent, lambda p: communication.sending(p, k)):
        assert isclose(sends(wide)[0], 2 * sends(narrow)[0])
    scores = arithmetic.attention(wide, k)[0] - arithmetic.attention(narrow, k)[0]
    assert isclose(scores[0], 4 * 4096 * 8192 * k.score_bytes[0] / 2e12)
    logits = arithmetic.logits(wide, k) - arithmetic.logits(narrow, k)
    assert isclose(logits[0], 10 * 4096 * 51200 / 4 / 2e12)


def test_the_longest_stage_is_what_is_kept_and_waited_for() -> None:
    equal, uneven = point(pp=8), point(pp=8, longest=4)
    assert (equal.own_layers[0], uneven.own_layers[0]) == (3, 4)
    assert step(uneven, ONE).memory[0] > step(equal, ONE).memory[0]
    assert step(uneven, ONE).time[0] > step(equal, ONE).time[0]


def test_an_attention_kernel_takes_what_it_took_alone() -> None:
    """cuDNN's forward and backward on an H100, heads of 128, a causal mask: 539 and 516 TFLOP/s (arXiv 2407.08608)."""
    made = point(seq=16384, flash=1, heads=16, kv_heads=16, head_size=128, tp=1, peak_wide=989.5e12, **of_program("megatron", "hopper"))  # fmt: skip
    forward, backward = arithmetic.attention(made, usual(attention_share=1.0))
    flops = 2.0 * 16384**2 * 16 * 128  # half of all scores
    assert isclose(flops / forward[0], 528e12, rel_tol=0.03)
    assert isclose(2.5 * flops / backward[0], 528e12, rel_tol=0.03)
    share = lambda *words: of_program(*words)["kernel"]
    assert share("fsdp", "hopper") == 0.35
    assert (
        share("fsdp", "hopper", "flash attn; torch 1.13/2.x era")
        == share("fsdp", "hopper", "FlashAttention-1")
        == share("fsdp", "hopper", "triton ")
        == share("fsdp", "hopper", "attn_impl: triton")
        == 0.175
    )
    assert share("fsdp", "hopper", " Triton cross entropy, flash attn") == 0.35
    assert share("fsdp", "ampere", "flash-attn 2.3") == share("megatron", "ampere") == 0.6


def test_written_out_attention_and_experts_are_launched_too() -> None:
    """Of a layer so small that it takes as long as its launches."""
    k = usual(layer_floor=1e-2, routing_floor=1e-2, collective_floor=1e-9)
    took = lambda **plan: float(layer(point(hidden=128, heads=2, kv_heads=2, ffn=512, seq=64, **plan), k)[0][0])
    assert isclose(took(flash=0) / took(flash=1), 1.15)
    assert isclose(took(flash=1, experts=8, active=2) / took(flash=1), 2.0)


def test_what_graphs_launch_and_where_no_host_waits_takes_as_long_as_it_computes() -> None:
    k = usual(layer_floor=1e-2, routing_floor=1e-2, collective_floor=1e-9)
    small = {"hidden": 128, "heads": 2, "kv_heads": 2, "ffn": 512, "seq": 64, "flash": 1, "experts": 8, "active": 2}
    took = lambda said: layer(point(**small, **of_program("fsdp", "hopper", said)), k)[0][0]
    assert isclose(took(""), 6e-2)
    assert isclose(took("HybridEP"), 3e-2)
    assert took("cuda graphs") < 1e-3
    for said in ("no cuda graphs", "te cuda graphs of the router", "scoped CUDA graphs", "router CUDA graphs"):
        assert took(said) == took("")


def test_experts_that_compute_one_after_another_are_launched_each() -> None:
    """Half a millisecond each and pass; and DeepSpeed gathers their matrices one by one."""
    k = usual(layer_floor=1e-2, routing_floor=1e-9, collective_floor=1e-9, gather_floor=1e-3)
    small = {"hidden": 128, "heads": 2, "kv_heads": 2, "ffn": 512, "seq": 64, "flash": 1, "dp": 2}
    took = lambda program, said, **plan: layer(point(**small, **plan, **of_program(program, "hopper", said)), k)[0][0]
    for program, said, plan, of_one in (
        ("fsdp", "HF Trainer", {"zero": 3}, 5e-4), ("deepspeed", "HF Trainer", {"zero": 3}, 5e-4 + 2e-3), ("deepspeed", "HF Trainer", {"zero": 2}, 5e-4),
        ("fsdp", "HF Trainer", {"ep": 2}, 5e-4 / 2), ("fsdp", "torchtitan (PyTorch)", {}, 0.0), ("fsdp", "HF, grouped experts", {}, 0.0),
    ):  # fmt: skip
        more = took(program, said, experts=8, active=2, **plan) - took(program, said, **plan)
        assert isclose(more, 3 * 8 * of_one, abs_tol=1e-6), (program, said)


def test_scores_that_no_kernel_takes_four_of_are_launched_moved_and_kept_by_torch() -> None:
    """Megatron's softmax takes four matrices of scores at a time: of a rank with two heads, not of one sequence but of two."""
    assert [of_program(name, "ampere")["fours"] for name in ("megatron-2020", "megatron-deepspeed", "fsdp")] == [
        1.0,
        1.0,
        0.0,
    ]
    made = lambda **plan: point(**{"fours": 1, "heads": 16, "tp": 8, "microbatch": 1, **plan})
    assert made().unfused[0]
    for other in (
        {"microbatch": 2},
        {"fours": 0},
        {"flash": 1},
        {"heads": 32},
        {"heads": 18},
    ):  # 18: guessed, they are no multiple of tp
        assert not made(**other).unfused[0], other
    small, k = {"hidden": 128, "seq": 64, "ffn": 512, "tp": 1, "heads": 2}, usual(layer_floor=1e-2)
    assert isclose(layer(made(**small), k)[0][0] / layer(made(**small, fours=0), k)[0][0], 1.2)
    for part, a_score in (
        (lambda p: arithmetic.attention(p, usual())[0][0] * 2e12 * 0.85, 28),
        (lambda p: memory.activations_of_layer(p)[0], 2),
    ):
        assert isclose(part(made()) - part(made(fours=0)), a_score * 2048 * 2048 * 16 / 8, rel_tol=1e-9)


def test_programs_of_torchs_operations_make_a_softmax_of_them_too() -> None:
    """One after another, whatever the number of heads; a compiler or a kernel made by hand fuses them. Of 32 bits nothing is cast."""
    assert [of_program("fsdp", "hopper", said)["eager"] for said in ("fused MoE kernels", "fused-experts", "experts")] == [1, 1, of_program("fsdp", "hopper")["eager"]]
    eager, fused = (point(eager=of_program("fsdp", "ampere", said)["eager"]) for said in ("", "fused softmax"))
    assert eager.unfused[0]
    assert not fused.unfused[0]
    assert not point(eager=2.1, flash=1).unfused[0]
    for wide, a_score in ((2, 28), (4, 16)):
        slow, quick = (arithmetic.attention(replace(p, low=np.full(1, wide)), ONE)[0][0] for p in (eager, fused))
        assert isclose((slow - quick) * 2e12 * 0.85, a_score * 2048 * 2048 * 16, rel_tol=1e-9)
    kept = memory.activations_of_layer(eager)[0] - memory.activations_of_layer(fused)[0]
    assert isclose(kept, 2 * 2048 * 2048 * 16)


@pytest.mark.parametrize(("seq", "window"), [(4096, 1024), (4096, 512), (8192, 4096), (2048, 4096)])
def test_a_kernel_makes_the_scores_of_its_windows_alone(seq: int, window: int) -> None:
    """As many as one by one, but for the half of a row that a sum of whole numbers lacks; in the layers that have a window."""
    reads = min(window + arithmetic.TILE, seq)
    whole, some, half = (point(flash=1, seq=seq, window=window, windowed=share) for share in (0, 1, 0.5))
    counted = sum(min(i, reads) for i in range(seq)) + reads / 2
    for way in (0, 1):
        of = [arithmetic.attention(p, ONE)[way][0] for p in (whole, some, half)]
        assert isclose(of[1] / of[0], counted / (seq**2 / 2), rel_tol=1e-12)
        assert isclose(of[2], (of[0] + of[1]) / 2, rel_tol=1e-12)
    kept = [arithmetic.attention(point(flash=0, seq=seq, window=window, windowed=share), ONE)[0][0] for share in (0, 1)]
    assert kept[0] == kept[1]


def test_without_a_causal_mask_a_kernel_makes_all_scores() -> None:
    """Twice as many as under one; scores that are kept are all there anyway."""
    for flash, times in ((1, 2), (0, 1)):
        causal, whole = (arithmetic.attention(point(flash=flash, both_ways=way), ONE) for way in (0, 1))
        assert [isclose(whole[way][0], times * causal[way][0]) for way in (0, 1)] == [True, True]


def test_a_compiled_layer_is_launched_in_half_the_kernels() -> None:
    k = usual(layer_floor=1.0, collective_floor=1e-9)
    usually, compiled = (layer(point(launches=share), k)[0][0] for share in (1, 0.5))
    assert isclose(compiled, usually / 2)


def test_a_slower_product_is_at_its_rate_with_fewer_rows() -> None:
    """What it waits for are bytes: of 32 bits on a V100 a quarter of the sizes; of tf32 on an A100, and of 8 bits, as many as of 16."""
    of = lambda device, precision: of_device(devices()[device], precision)["filling"]
    assert isclose(of("v100", "fp32"), 15.7 * 4 / (125 * 2))
    assert [of("a100", "tf32"), of("h100", "fp8"), of("h100", "bf16"), of("cpu", "fp32")] == [1, 1, 1, 1]
    k = usual(product_half=100.0, product_half_inner=1e-9, product_share=1.0)
    took = lambda filling: arithmetic.product(point(bandwidth=1e18, filling=filling), k, *np.full((3, 1), 1024.0))[0]
    least = 2 * 1024.0**3 / 312e12
    assert isclose(took(1), least * (1 + 100 / 1024))
    assert isclose(took(0.25), least * (1 + 25 / 1024))


def test_an_update_takes_as_long_as_its_states_are_wide() -> None:
    k = usual(optimizer_bytes=50.0, stream_share=1.0)
    took = lambda framework, said: arithmetic.optimizer(
        point(**of_states(framework, "bf16", False, said)), k, np.full(1, 1e9)
    )
    assert isclose(took("megatron", "")[0], 50e9 / 2e12)  # 4 + 2 * 12 + 2 * 2 bytes
    assert isclose(took("fsdp", "pure bf16")[0], 50e9 / 2e12 * (2 + 2 * 4 + 2 * 2) / 32)
    fused = lambda most: arithmetic.optimizer(point(fused=1), usual(optimizer_bytes=most, stream_share=1.0), np.full(1, 1e9))[0]  # fmt: skip
    assert isclose(fused(90.0), 40e9 / 2e12)
    assert isclose(fused(30.0), 30e9 / 2e12)


def test_what_frozen_products_read_is_kept_for_nobody_but_adapters() -> None:
    for low in (2, 1):
        kept, spared = (memory.activations_of_layer(point(frozen=1, low=low, spared=flag))[0] for flag in (0, 1))
        assert isclose(kept - spared, 2048 * low * (2048 + 8192))  # what an MLP's two products read


def test_adapters_are_launched_too_and_weights_of_4_bits_made_wider_before_each_pass() -> None:
    """A forward's and a backward's, and that of what is computed again."""
    k = usual(layer_floor=1e-2, stream_share=1.0)
    small = {"hidden": 128, "heads": 2, "kv_heads": 2, "ffn": 512, "seq": 64, "flash": 1, "frozen": 1}
    took = lambda **more: layer(point(**small, **more), k)[0][0]
    assert isclose(took(eager=2.1, adapters=1e3), 2 * took(eager=2.1))
    assert isclose(took(eager=2.1, adapters=1e3, spared=1), 1.5 * took(eager=2.1))
    assert isclose(took(eager=1, adapters=1e3), took(eager=1))
    one = usual(stream_share=1.0, layer_floor=1e-9)
    for recompute, passes in ((NONE, 2), (FULL, 3)):
        for low, times in ((2, passes), (1, 0)):  # products of 8 bits read them as they are
            of = lambda weight: layer(point(frozen=1, weight=weight, low=low, recompute=recompute), one)[0][0]  # noqa: B023
            expected = times * 16 * memory.of_layer(point())[0][0] / 2e12
            assert isclose(of(0.5625) - of(2), expected, abs_tol=1e-12)


def test_half_of_what_experts_exchange_runs_behind_a_pair_of_passes() -> None:
    """On 16 H100, and between them: 31.3 s for 41.3 s, 21.0 s for 24.7 s (benchmarks/published/megatron_bridge_skills.csv)."""
    made = {"experts": 8, "active": 2, "ep": 8, "dp": 8, "global_batch": 64}
    alone, paired = (step(point(**made, paired=share), ONE).exposed[0] for share in (0.0, 0.5))
    assert isclose(paired, alone / 2)
    for said, share in (
        ("EP overlap on", 0.5), ("1F1B A2A overlap", 0.5), ("DeepEP, 1F1B overlap", 0.5), ("1F1B, overlap of gradients", 0), ("no 1F1B overlap", 0), ("1F1B overlap_p2p_comm", 0), ("overlap_moe_expert_parallel_comm", 0.5), ("dualpipe", 0.5), ("expert-parallel overlap", 0.5),
        ("EP overlap off", 0), ("no EP overlap", 0), ("overlap grad reduce", 0), ("tp comm overlap on", 0), ("param gather overlap", 0),
    ):  # fmt: skip
        assert of_program("megatron", "hopper", said)["paired"] == share, said


def test_more_ranks_wait_for_a_slower_one() -> None:
    """Each copy with its own batch, gradients that take no time: longer by so much for each doubling, and no other step is."""
    k = usual(straggling=0.01, step_overhead=1e-9, hidden_gradients=1.0)
    took = lambda copies: float(
        step(
            point(dp=copies, global_batch=64 * copies, link=1e20, net=1e20, link_latency=1e-15, net_latency=1e-15), k
        ).time[0]
    )
    one = took(1)
    assert all(
        isclose(took(copies), one * (1 + 0.01 * doubled), rel_tol=1e-6)
        for doubled, copies in ((1, 2), (3, 8), (10, 1024))
    )


def test_a_token_crosses_to_a_server_once_or_once_an_expert() -> None:
    """Eight ranks on two servers, a token at two experts: they are in 1.5 servers in the mean, and on 1.875 ranks."""
    made = {"experts": 8, "active": 2, "ep": 8, "dp": 8, "node": 4, "tp": 1}
    assert [of_program(name, "hopper")["once"] for name in ("megatron", "soli", "fsdp")] == [1.0, 0.0, 0.0]
    k = usual(latency_scale=1e-9, net_share=1.0, link_share=1.0)
    apart, once = (communication.of_layer(point(**made, once=flag), k, NOTHING, NOTHING)[0][0] for flag in (0.0, 1.0))
    size = 2048 * 2048 * 2.0 * 2  # of a token's two copies
    far, near = size * 4 / 8 / 25e9 * (1 - 0.75), size * 3 / 8 / 300e9 * (1 - 1.875 / 2)
    assert isclose(apart - once, 2 * (far + near), rel_tol=1e-6)
    assert of_program("fsdp", "hopper", "DeepEP")["once"] == 1.0
    assert of_program("megatron", "hopper", "alltoall dispatcher")["once"] == of_program("megatron", "hopper", "an all-to-all dispatcher")["once"] == 0.0


@pytest.mark.parametrize(
    ("said", "fused"),
    [
        ("torch.compile", True), ("torch_compile=True", True), ("compiled, FSDP2", True), ("no compile", False),
        ("without torch.compile", False), ("not compiled", False), ("no_compile", False), ("float8nocompile, eager", False),
        ("no compile; later rows torch.compile", True), ("", False),
        ("torch_compile=False", False), ("compile: off", False), ("non-compiled", False), ("not yet compiled", False),
    ],
)  # fmt: skip
def test_whether_a_compiler_ran_is_read_of_words_that_are_whole(said: str, fused: bool) -> None:
    """What moves between products is more where nothing fuses it."""
    assert (of_program("fsdp", "hopper", said)["eager"] == 1.0) == fused


def test_torchs_operations_keep_what_each_reads() -> None:
    """Llama 3 8B on 8 H100, not compiled, with and without recomputing every second layer (pytorch/ao, float8nocompile's README)."""
    with (PUBLISHED / "torchao.csv").open(newline="", encoding="utf-8") as file:
        peaks = {row["row_id"]: float(row["peak_mem_gb"]) for row in csv.DictReader(file)}
    llama = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": 1, "seq": 4096, "flash": 1, "vocab": 128256}

    def kept(**changes: float) -> float:
        least, most = (memory.activations_of_layer(point(**llama, recompute=of, **changes))[0] for of in (FULL, NONE))
        return (most - least) / (peaks["torchao:13"] * 1e9 - peaks["torchao:16"] * 1e9) * 16

    assert 0.9 < kept(composed=1) < 1.1  # of 50 bytes a hidden unit and token
    assert kept() < 0.7
    compiled = kept() * (peaks["torchao:13"] - peaks["torchao:16"]) / (peaks["torchao:15"] - peaks["torchao:18"])
    assert 0.8 < compiled < 1.1
    assert memory.activations_of_layer(point(composed=1)) == memory.activations_of_layer(point())  # norms with means are kernels
    bytes_each = [memory.logits(point(**flags), ONE)[0] / memory.logits(point(casts=1), ONE)[0] for flags in ({"composed": 1}, {"composed": 1, "one_loss": 8})]
    np.testing.assert_allclose(bytes_each, [12 / 12, 8 / 12])
    for framework, said, written, fused in (("fsdp", "", 1, 0), ("fsdp", "torch.compile", 0, 8), ("soli", "", 0, 0), ("megatron", "", 0, 0), ("fsdp", "llm-foundry (Composer+PyTorch FSDP)", 1, 4), ("fsdp", "fms-acceleration foak-fast-kernels", 0, 8), ("megatron", "fused cross entropy", 0, 0)):  # fmt: skip
        found = of_program(framework, "hopper", said)
        assert (found["composed"], found["one_loss"]) == (written, fused), (framework, said)


def test_a_peak_is_read_with_what_the_allocator_holds() -> None:
    flags = {"zero": 3, "layers": 8, "vocab": 32000}
    found, cost = memory.kinds(point(**flags), ONE), step(point(**flags, cached=1), ONE)
    there = found["gradients"] + found["activations"] + found["logits"]
    np.testing.assert_allclose(cost.read, cost.memory + ONE.cache_share * there)
    bare = step(point(**flags), ONE)
    assert bare.read == bare.memory == cost.memory
    for said, held in (("torchtitan", 1), ("HF Trainer; nvidia-smi 15116 MiB; peak = torch max allocated, bytes", 0), ("max memory reserved", 1), ("HF Trainer", 0)):  # fmt: skip
        assert of_program("fsdp", "ampere", said)["cached"] == held, said


def test_every_second_product_is_less_than_every_second_layer() -> None:
    """Of Llama 3 8B half of the products' results (21 bytes a hidden unit), attention's and the input: 14.5; of layers half of 49, and the input."""
    llama = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": 1, "seq": 8192, "flash": 1, "composed": 1, "again": 16}
    products, layers = (
        memory.kinds(point(**llama, vocab=10, by_product=flag), ONE)["activations"][0] / (8192 * 4096) for flag in (1, 0)
    )
    kept = 49 + 4 * 32 / 4096  # and attention's sums
    assert isclose(products, 32 * 14.5 + kept - 14.5)  # and a layer whose backward runs
    assert isclose(layers, 16 * kept + 16 * 2 + kept - 2)
    cut = memory.kinds(point(**llama, vocab=10, by_product=1, tp=4, sp=1), ONE)["activations"][0] / (8192 * 4096)
    assert isclose(cut, products / 4)


def test_of_experts_every_second_product_is_of_attention_alone() -> None:
    """Products of all experts at once are made again, however many a token goes to; what DeepEP sent it there and back is not, nor sent again."""
    mixture = {"experts": 64, "seq": 2048, "flash": 1, "composed": 1, "by_product": 1, "again": 24, "ep": 8, "dp": 8, "global_batch": 8, "vocab": 10}
    kept = lambda **more: memory.kinds(point(**mixture, **more), ONE)["activations"][0] / 2048
    one_layer = lambda **more: memory.activations_of_layer(point(**mixture, **more))[0] / 2048  # whose backward runs
    stored = lambda **more: (kept(**more) - one_layer(**more)) / 23
    assert isclose(stored(active=2), stored(active=8))
    assert isclose(stored(active=8, once=1) - stored(active=8), 8 * 4 * 2048)
    again = {name: point(**mixture, active=8, once=1, recompute=level) for name, level in (("none", 0), ("all", FULL))}
    sent = {name: communication.of_layer(p, ONE, context.crossing(p, ONE), NOTHING)[1][0] for name, p in again.items()}
    assert sent["none"] == sent["all"] > 0


def test_parts_that_are_made_again_by_themselves() -> None:
    """Of an MLP with a gate 6 bytes a unit of its width are left out, of its activation 2, of two norms 4 of the layer's; its products run once more."""
    llama = {"layers": 1, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": 1, "seq": 8192, "flash": 1}
    kept = lambda parts, **more: memory.activations_of_layer(point(**{**llama, **more}, parts=parts))[0] / 8192
    for parts, less in ((MLP, 6 * 14336), (ACT, 2 * 14336), (NORM, 4 * 4096), (MLP + NORM, 6 * 14336 + 4 * 4096), (EXPERTS, 0), (UP, 0)):
        assert isclose(kept(0) - kept(parts), less), parts
        assert isclose(kept(0, tp=4, sp=1) - kept(parts, tp=4, sp=1), less / 4), parts
    mixture = {"experts": 64, "active": 9, "shared": 1, "ffn": 1408, "ep": 8, "dp": 8, "global_batch": 8, "compressed": 1e7}
    for parts, less in ((ACT, 2 * 8 * 1408), (EXPERTS, 6 * 9 * 1408 + 4 * 9 * 4096 + 4 * 4096), (MLP, 0), (UP, 2 * 4096 * 1.5)):
        assert isclose(kept(0, **mixture) - kept(parts, **mixture), less), parts
    both = lambda parts: layer(point(**llama, parts=parts), ONE)[0][0]
    assert isclose(both(MLP) - both(0), arithmetic.parts(point(**llama, parts=MLP), ONE)[0])
    assert arithmetic.parts(point(**llama, parts=MLP), ONE)[0] > arithmetic.of_mlp(point(**llama), ONE)[0] > 0
    sent = lambda parts: communication.of_layer(p := point(**{**llama, **mixture}, parts=parts), ONE, context.crossing(p, ONE), NOTHING)
    assert isclose((sent(EXPERTS)[1] - sent(0)[1])[0], sent(0)[0][0])
    # the layer whose backward runs has its part whole
    last = lambda parts: memory.kinds(point(**llama, parts=parts, vocab=10), ONE)["activations"][0]
    assert isclose(last(MLP), last(0))


def test_the_update_of_deepspeed_copies_gradients_unless_they_are_in_the_hosts_memory() -> None:
    """Of 7.6B on 4 A100 under ZeRO-1 in bf16 60.9 GB were allocated: 2 + 2 + (12 + 4) / 4 bytes a parameter."""
    kept = [of_states(name, "bf16", pipeline)["copied"] for name, pipeline in (("deepspeed", False), ("megatron-deepspeed", False), ("megatron-deepspeed", True), ("fsdp", False))]
    assert kept == [4, 4, 0, 0]
    update = lambda **more: memory.kinds(point(dp=4, zero=1, global_batch=4, microbatch=1, seq=1, copied=4, moments=12, **more), ONE)["optimizer"][0]
    assert isclose(update(), memory.parameters(point())[0] * (12 + 4) / 4)
    assert update(offload=1) == 0


def test_what_is_made_again_is_not_beside_the_loss() -> None:
    small, large = ({"vocab": vocab, "recompute": FULL, "flash": 1} for vocab in (1000, 500_000))
    of = lambda changes: {name: part[0] for name, part in memory.kinds(point(**changes), ONE).items()}
    for changes, loss in ((small, False), (large, True)):
        kinds = of(changes)
        stored = ONE.activation_scale[0] * 24 * memory.activations_of_layer(point(**changes))[0]
        assert (kinds["logits"] > 0) == loss
        assert isclose(kinds["activations"], stored) == loss
    assert of(small)["activations"] > 1.5 * of(large)["activations"]


def test_devices_that_their_power_does_not_limit() -> None:
    """Products of an H20 reach more of its peak than an H100's of its own, which is seven times as high."""
    h20, h800 = (of_device(devices()[name], "bf16") for name in ("h20", "h800"))
    assert isclose(h20["peak"], 1.4 * 148e12)
    assert isclose(h800["peak"], 989.5e12)
    assert h20["filling"] == h800["filling"] == 1


def test_sums_run_behind_products_or_wait() -> None:
    hidden, waited = (step(point(tp=8), usual(waited_sums=by)).exposed[0] for by in (0.4, 1.6))
    assert isclose(hidden, waited / 4)
    alone, two, four = (step(point(tp=n), usual(waited_sums=1.0)).exposed[0] for n in (8, 2, 4))
    for n, plain, by in ((2, two, 2.0), (4, four, 4.0), (8, alone, 8.0)):  # the more ranks, the longer
        assert isclose(step(point(tp=n), usual(waited_sums=8.0)).exposed[0], plain * by)
    assert (
        of_program("fsdp", "hopper", "compile; AsyncTP")["behind"]
        > of_program("fsdp", "hopper", "no AsyncTP")["behind"]
        == 0
    )
    assert isclose(step(point(tp=8, behind=0.4), usual(waited_sums=1.0)).exposed[0], 0.6 * alone)


def test_parameters_that_each_rank_sends_in_turn_pass_every_rank() -> None:
    """Of eight ranks in a server over the link, of sixteen the two servers over the network; and no more turns than there are parameters."""
    assert of_program("other", "ampere", "InternLM (InternEvo)")["turns"] == 1.0
    assert of_program("other", "ampere", "no InternEvo")["turns"] == of_program("fsdp", "ampere")["turns"] == 0.0
    k = usual(latency_scale=1.5)
    made = {"link_latency": 6e-6, "net_latency": 20e-6, "node": 8, "tp": 1, "zero": 1, "layers": 4, "pp": 1}
    for ranks, turns, ring in ((8, 8, 8 * 6e-6), (16, 16, 2 * 20e-6 + 14 * 6e-6), (64, 36, 8 * 20e-6 + 56 * 6e-6)):
        at_once, one_by_one = (
            communication.sums(point(dp=ranks, turns=flag, **made), k, *[np.full(1, 1e9)] * 3).gathered
            for flag in (0, 1)
        )
        assert isclose((one_by_one - at_once)[0], 1.5 * turns * ring)


def test_what_is_gathered_once_is_hidden_by_one_microbatch() -> None:
    """A slow network, by hand: a layer that computes for a third of what its parameters take to come, forward, and two thirds, backward."""
    k, net = usual(layer_floor=0.0, hidden_gathers=1.0), {"node": 1, "net_latency": 0.0}
    alone = point(dp=8, microbatch=1, **net)
    computing = layer(alone, k)[0][0]
    sent = communication._gather(alone, k, *(size * alone.weight for size in memory.of_layer(alone)))[0]
    made = {"dp": 8, "zero": 3, **net, "net": 25e9 * sent / computing, "summed": alone.weight[0]}
    for pp, whole, microbatches, left in (
        (1, 0, 8, 1 - 1 / 3 + 2 - 2 / 3),  # gathered twice a microbatch and scattered
        (1, 1, 8, 1 - 1 / 3 + (7 * (1 - 2 / 3) + 2 - 2 / 3) / 8),  # scattered once
        (2, 1, 8, (1 - 1 / 3 + 1 - 2 / 3) / 8),  # gathered and scattered once: of eight microbatches two send
        (2, 1, 1, 1 - 1 / 3 + 1 - 2 / 3),
    ):
        exposed = layer(point(**made, pp=pp, whole=whole, global_batch=8 * microbatches), k)[1][0]
        assert isclose(exposed, left * computing, rel_tol=1e-9), (pp, whole, microbatches)


def test_a_gather_between_servers_has_a_step_for_each_rank() -> None:
    """By hand: of 512 ranks in servers of 8 a ring goes 63 times to another server (14 us each) and 448 to a neighbour (3.4); in one server nothing is added."""
    none = np.zeros(1)
    for ranks, steps in ((8, 0.0), (512, 63 * 14e-6 + 448 * 3.4e-6), (1024, 127 * 14e-6 + 896 * 3.4e-6)):
        p = point(dp=ranks, zero=3, node=8, global_batch=ranks, microbatch=1, net_latency=5e-6, link_latency=6e-6)
        tree = np.log2(ranks / 8) * 5e-6 * ONE.latency_scale[0] * (ranks > 8)
        within = communication.gather(p, ONE, none, p.shards, p.tp)[0] - tree
        assert isclose(communication.gathers_of_layer(p, ONE, none, none)[0][0], within + steps), ranks


def test_tables_are_gathered_and_scattered_as_often_as_layers() -> None:
    for made, times in (({"whole": 0}, 8), ({"whole": 1}, 1), ({"whole": 0, "global_batch": 8}, 1)):
        p = point(dp=8, zero=3, microbatch=1, **made)
        summed = communication.sums(p, ONE, np.full(1, 1e9), np.zeros(1), np.full(1, 1e8))
        assert communication.of_gradients(p, summed)[0] == times * summed.tables[0]


def test_a_host_that_waits_for_each_kernel_adds_its_launches() -> None:
    said = "one iteration is measured (CUDA_LAUNCH_BLOCKING=1 from 320 GPUs on)"
    assert [blocks(said, n) for n in (319, 320)] == [False, True]
    assert [blocks(words, 8) for words in ("CUDA_LAUNCH_BLOCKING=1", "CUDA_LAUNCH_BLOCKING=0", "")] == [
        True,
        False,
        False,
    ]
    k, nothing = (
        usual(),
        usual(layer_floor=MEANINGS["layer_floor"].low, collective_floor=MEANINGS["collective_floor"].low),
    )
    for tokens in (64, 1 << 14):  # few, which are launched for longer than they are computed, and many
        p, waiting = (point(seq=tokens, microbatch=1, blocking=flag) for flag in (0, 1))
        alone, usually, added = layer(p, nothing)[0], layer(p, k)[0], layer(waiting, k)[0]
        quick = {name: getattr(p, name) * 1e9 for name in ("peak", "peak_wide", "bandwidth", "link")}
        launches = layer(replace(p, **quick), k)[0]
        assert isclose(usually[0], max(alone[0], launches[0]), rel_tol=0.01)
        assert isclose(added[0], alone[0] + launches[0], rel_tol=0.01)


def test_collectives_between_servers_are_rings() -> None:
    k = usual(link_share=1.0, net_share=1.0, latency_scale=1.0)
    size = np.array([1e9])
    p = point()
    inside = communication.all_reduce(p, k, size, np.array([8.0]), np.array([1.0]))[0]
    # 8 a server and 4 servers: an eighth goes over the network.
    both = communication.all_reduce(p, k, size, np.array([32.0]), np.array([1.0]))[0]
    assert isclose(both, inside + 2 * 3 / 4 * 1e9 / 8 / 25e9 + 2 * 2 * 5e-6)
    # Eight ranks between two neighbours: each is in another server.
    apart = communication.all_reduce(p, k, size, np.array([4.0]), np.array([8.0]))[0]
    assert isclose(apart, 2 * 3 / 4 * 1e9 / 25e9 + 2 * 2 * 5e-6)
    for collective in (communication.all_reduce, communication.gather, communication.all_to_all):
        assert collective(p, k, size, np.array([1.0]), np.array([1.0]))[0] == 0


def test_collectives_inside_a_server_are_as_measured() -> None:
    """nccl-tests on A100, by the usual shares; and, with a V100's link, near to what it measured there."""
    text = (Path(rings.__file__).parents[1] / "hardware/nccl_allreduce.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    off: dict[str, list[float]] = {"A100": [], "V100": []}
    for row in rows:
        if (n := float(row["n_gpus"])) in rings.RANKS and (row["gpu"] == "A100" or n == 8):
            share, link = (0.75, 300e9) if row["gpu"] == "A100" else (0.88, 150e9)
            size = np.array([float(row["bytes"])])
            took = rings.all_reduce(size, np.array([n]), np.array([link * share]), np.array([12e-6]))[0]
            off[row["gpu"]].append(abs(took / (float(row["time_us"]) * 1e-6) - 1))
    assert np.mean(off["A100"]) < 0.02
    assert np.mean(off["V100"]) < 0.15


@settings(max_examples=200, deadline=None)
@given(st.floats(1e2, 1e12), st.sampled_from([2.0, 3.0, 8.0, 72.0]), st.floats(1.0, 20.0))
def test_better_links_are_never_slower(size: float, n: float, times: float) -> None:
    took = lambda link, latency: rings.all_reduce(np.array([size]), np.array([n]), np.array([link]), np.array([latency]))[0]  # fmt: skip
    base = took(1e11, 1e-5)
    assert took(1e11 * times, 1e-5) <= base * (1 + 1e-9)
    assert took(1e11, 1e-5 / times) <= base * (1 + 1e-9)
    assert isclose(took(1e11 * times, 1e-5 / times) * times, base, rel_tol=1e-9)


def simulated(forward: list[float], backward: list[float], m: int) -> float:
    """1F1B event by event: a stage does what its order says as soon as it has what it needs."""
    stages = len(forward)
    orders = []
    for s in range(stages):
        warm = min(stages - s, m)
        order = [("F", i) for i in range(warm)]
        for i in range(m):
            order.append(("B", i))
            if warm + i < m:
                order.append(("F", warm + i))
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(orders[s]):
                kind, i = orders[s][at[s]]
                needs = ("F", s - 1, i) if kind == "F" else ("B", s + 1, i) if s + 1 < stages else ("F", s, i)
                if kind == "F" and s == 0:
                    ready = 0.0
                elif needs in done:
                    ready = done[needs]
                else:
                    break
                clock[s] = max(clock[s], ready) + (forward[s] if kind == "F" else backward[s])
                done[kind, s, i] = clock[s]
                at[s] += 1
    return max(clock)


@pytest.mark.parametrize("m", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("last", [0.0, 0.4])
def test_pipelines_take_what_a_simulation_takes(m: int, stages: int, last: float) -> None:
    """Stages that are alike, and a last one that is longer (the logits)."""
    p = point(pp=stages, global_batch=m)
    got = sum(pipeline.spent(p, np.array([3.0]), np.zeros(1), np.array([3 * last]), np.zeros(1), np.zeros(1)))[0]
    forward, backward = [1.0] * stages, [2.0] * stages
    forward[-1] += last
    backward[-1] += 2 * last
    assert isclose(got, simulated(forward, backward, m), rel_tol=1e-12)


def test_a_product_is_a_roofline() -> None:
    k = usual(product_share=0.8, product_half=100.0, product_half_inner=1.0, stream_share=1.0)
    p = point()
    n = 102400.0
    big = np.array([n])
    share = 0.8 * n / (n + 100) * (n / (n + 1)) ** 2
    assert isclose(arithmetic.product(p, k, big, big, big)[0], 2 * n**3 / (312e12 * share))
    one, wide = np.array([1.0]), np.array([1e4])  # one row: its matrix must be read
    assert isclose(arithmetic.product(p, usual(stream_share=1.0, product_half=1.0), one, wide, wide)[0], 2 * (1e4 + 1e8 + 1e4) / 2e12)  # fmt: skip


def test_a_compiler_pads_rows_of_products_with_weights() -> None:
    """An MLP of 2730 instead of 2816 left a compiled step as long, and an eager one half as long again (giyushino/torchure)."""
    k, rows, hidden = usual(product_half=1.0, product_half_inner=1.0), np.array([8192.0]), np.array([1024.0])
    took = lambda columns, **more: float(arithmetic.product(point(**more), k, rows, np.array([columns]), hidden)[0])
    for compiled, rate in ((0.0, 0.85), (1.0, 0.3)):
        as_many = took(2731.0, launches=compiled) / took(2730.0, launches=compiled)
        assert isclose(took(2730.0, launches=compiled) / took(2752.0, launches=compiled), 2730 / 2752 / rate, rel_tol=1e-3)
        assert isclose(as_many, 2731 / 2730, rel_tol=1e-3)


def test_published_anomalies_come_out() -> None:
    """BigScience's 100B: heads of 108 against heads of 144; and 14400 wide against 13824, with 7% fewer parameters."""
    k = repeated(known("megatron-deepspeed", "ampere"), 1)
    wide = {"layers": 78, "seq": 2048, "microbatch": 2, "global_batch": 128, "tp": 4, "pp": 13, "recompute": FULL}
    shape = lambda h, heads: {"hidden": h, "ffn": 4 * h, "heads": heads, "kv_heads": heads, "head_size": h / heads}
    took = lambda h, heads: step(point(**wide, **shape(h, heads)), k).time[0]
    assert 1.2 < took(13824, 128) / took(13824, 96) < 1.6  # measured: 1.38
    assert took(14400, 100) / took(13824, 96) > 1.1  # of 1.085 as many flops; measured: 1.38


def test_parameters_are_counted() -> None:
    """GPT-3: 175 billion; Mixtral 8x7B: 46.7."""
    gpt = point(layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=50257)
    assert isclose(memory.parameters(gpt)[0], 174.6e9, rel_tol=2e-3)
    mixtral = point(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=1, vocab=32000, experts=8, active=2, tied=0, ep=4
    )
    assert isclose(memory.parameters(mixtral)[0], 46.7e9, rel_tol=2e-3)


# --- what must hold of any plan ---------------------------------------------------------------------------

degree = st.sampled_from([1, 2, 4, 8])
plans = st.fixed_dictionaries(
    {
        "hidden": st.sampled_from([512, 2048, 8192]), "layers": st.sampled_from([8, 24, 96]), "tp": degree,
        "pp": degree, "dp": degree, "cp": st.sampled_from([1, 2]), "sp": st.sampled_from([0, 1]),
        "zero": st.sampled_from([0, 1, 2, 3]), "recompute": st.sampled_from([NONE, SELECTIVE, FULL]),
        "flash": st.sampled_from([0, 1]), "microbatch": st.sampled_from([1, 2]), "experts": st.sampled_from([0, 8]),
        "offload": st.sampled_from([0, 1]), "low": st.sampled_from([1, 2]), "global_batch": st.sampled_from([16, 64]), "whole": st.sampled_from([0, 1]), "casts": st.sampled_from([0, 1]),
    }
).map(lambda said: said | {"active": 2 if said["experts"] else 1, "heads": said["hidden"] / 64, "kv_heads": said["hidden"] / 64})  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(plans, st.sampled_from(["peak", "peak_wide", "bandwidth", "link", "net", "host"]), st.floats(1.0, 50.0))
def test_a_better_machine_is_never_slower(plan: dict[str, float], what: str, times: float) -> None:
    before, after = step(point(**plan), ONE), step(point(**plan, **{what: BASE[what] * times}), ONE)
    assert after.time[0] <= before.time[0] * (1 + 1e-12)
    assert after.memory[0] == before.memory[0]


@settings(max_examples=200, deadline=None)
@given(plans, st.floats(0.1, 10.0))
def test_time_scales_with_the_machine(plan: dict[str, float], times: float) -> None:
    """All rates times k, all latencies and overheads by k: the time by k."""
    rates = ("peak", "peak_wide", "bandwidth", "link", "net", "host")
    waits = ("link_latency", "net_latency")
    machine = {n: BASE[n] * times for n in rates} | {n: BASE[n] / times for n in waits}
    floors = (
        "layer_floor",
        "gather_floor",
        "collective_floor",
        "routing_floor",
        "microbatch_overhead",
        "step_overhead",
    )
    quick = usual(**{name: MEANINGS[name].default / times for name in floors})
    assert isclose(step(point(**plan, **machine), quick).time[0] * times, step(point(**plan), ONE).time[0], rel_tol=1e-9)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(plans)
def test_recomputation_never_raises_memory_nor_saves_time(plan: dict[str, float]) -> None:
    found = [step(point(**(plan | {"recompute": level})), ONE) for level in (NONE, SELECTIVE, FULL)]
    assert found[0].memory[0] * (1 + 1e-12) >= found[1].memory[0]
    assert found[0].time[0] <= found[1].time[0] <= found[2].time[0]


@settings(max_examples=200, deadline=None)
@given(plans)
def test_more_zero_never_raises_states(plan: dict[str, float]) -> None:
    states = [step(point(**(plan | {"zero": level})), ONE).states[0] for level in range(4)]
    assert all(a >= b for a, b in zip(states, states[1:], strict=False))


@settings(max_examples=100, deadline=None)
@given(plans)
def test_alone_nothing_is_sent_or_waited_for(plan: dict[str, float]) -> None:
    alone = plan | {"tp": 1, "pp": 1, "dp": 1, "cp": 1}
    found = step(point(**alone), ONE)
    assert found.exposed[0] == found.waiting[0] == found.gradients[0] == 0
    same = step(point(**(alone | {"zero": 0, "sp": 0})), ONE)
    assert same.states[0] == found.states[0]


def test_arrays_are_points_one_by_one() -> None:
    plans = [{"tp": 2, "pp": 4}, {"dp": 8, "zero": 3, "recompute": FULL}, {"experts": 8, "active": 2, "ep": 4, "dp": 4}]
    rows = points([BASE | plan for plan in plans])
    many = step(rows, repeated(known("megatron", "ampere"), 3))
    for i, plan in enumerate(plans):
        one = step(point(**plan), repeated(known("megatron", "ampere"), 1))
        for field in fields(one):
            assert getattr(many, field.name)[i] == getattr(one, field.name)[0], field.name
    assert len(rows.take(np.array([0, 2]))) == 2
    assert replace(rows, tp=rows.tp).devices.tolist() == [8, 8, 4]

"""The search: the whole space and nothing else, the best of it, what is said of it; models that are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyplan import spaces
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.planner import explain
from soli.planner import search as planner_search
from soli.planner.cost import memory
from soli.planner.cost.points import FULL, NONE
from soli.planner.hardware.clusters import read_cluster
from soli.planner.models import Model, read_model
from soli.planner.search import Task, costs, different, enough, peaks, search
from typed import soli

LLAMA = Model("llama", 32, 4096, 32, 8, 128, 14336, True, 128256, 0, 1, False, 8192)
SMALL = Model("small", 12, 1024, 16, 16, 64, 4096, False, 51200, 0, 1, True, 2048)


def task(model: Model = LLAMA, cluster: str = "h100:8x4", batch: int = 128, seq: int = 4096, **more: object) -> Task:
    return Task(model, read_cluster(cluster), batch, seq, **more)  # type: ignore[arg-type]


# --- the best ---------------------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(st.sampled_from(["tp", "pp", "dp", "zero", "microbatch"]), st.sampled_from([1, 2]), st.floats(1.0, 3.0))
def test_more_to_choose_from_or_to_use_is_never_slower(name: str, value: int, times: float) -> None:
    asked = task(memory=26e9)
    best = search(asked).cost.time[0]
    less = search(replace(asked, fixed={name: float(value)}))
    assert not len(less.points) or best <= less.cost.time[0]
    assert search(replace(asked, memory=26e9 * times)).cost.time[0] <= best
    device = asked.cluster.device
    for what in ("link_gbs", "net_gbits", "memory_gbs"):
        better = replace(asked.cluster, device=replace(device, **{what: getattr(device, what) * times}))
        assert search(replace(asked, cluster=better)).cost.time[0] <= best


@pytest.mark.parametrize("count", [1, 3, 20])
def test_so_many_layouts_are_found_as_are_asked_for(count: int) -> None:
    found = search(task(), count)
    assert len(different(found, count)) == count
    assert found.cost.time[0] == search(task()).cost.time[0]


def test_plans_that_are_shown_differ() -> None:
    found = search(task())
    places = different(found, 10)
    shown = {tuple(getattr(found.points, n)[i] for n in ("tp", "cp", "pp", "dp")) + (found.points.zero[i] >= 3,) for i in places}  # fmt: skip
    assert len(shown) == len(places) == 10
    assert places[0] == 0


# --- what is said -----------------------------------------------------------------------------------------


def test_the_parts_of_a_step_are_the_step() -> None:
    for one in explain.answer(task()).best:
        assert sum(one.parts_s.values()) == pytest.approx(one.step_time_s)
        assert one.time_low_s < one.step_time_s < one.time_high_s
        assert one.memory_high_gb <= 80 * 2**30 / 1e9
        assert 0 < one.mfu < 1


def test_flops_are_those_of_the_paper() -> None:
    """PaLM's count, of attention the half that is causal: 6 N + 6 L H Q T; 8 billion parameters, of which the table is read once."""
    p = spaces(task(batch=32, cluster="h100:1"))
    whole = memory.parameters(p)[0] - 128256 * 4096
    assert explain.flops(p, 0) == pytest.approx(6 * whole + 6 * 32 * 4096 * 32 * 128)


def test_why_not_says_what_it_costs_or_lacks() -> None:
    asked = task(memory=30e9)
    best = explain.answer(asked, 1).best[0]
    wanted = {"tp": 2.0 if Plan.parse(best.plan).tp == 8 else 8.0}
    said = explain.why_not(asked, wanted)
    other = explain.answer(replace(asked, fixed=wanted), 1).best[0]
    assert other.plan in said
    assert f"{(other.step_time_s - best.step_time_s) / best.step_time_s:.1%} more" in said
    assert "lacks" in explain.why_not(asked, {"tp": 1.0, "pp": 1.0, "zero": 0.0})
    assert "does not divide" in explain.why_not(asked, {"tp": 3.0})
    mine = explain.why_not(asked, {"tp": float(Plan.parse(best.plan).tp)})
    assert mine.endswith("the best plan has it")


def test_what_is_asked_may_be_what_is_fixed_otherwise() -> None:
    asked = task(fixed={"tp": 8.0})
    said = explain.why_not(asked, {"tp": 2.0, "recompute": FULL, "sp": 0.0})
    assert said.startswith("tp=2, recompute=full, sp=off (and not the tp=8 that is fixed): at best")
    quicker = explain.why_not(task(fixed={"tp": 8.0, "recompute": FULL}), {"recompute": NONE})
    assert "% less" in quicker


def test_states_of_programs_differ() -> None:
    """soli keeps fp32 and whole gradients: more memory than mixed precision, and no scatter a microbatch."""
    fixed = {"tp": 1.0, "pp": 1.0, "cp": 1.0, "microbatch": 1.0, "recompute": FULL, "replicate": 1.0}
    ours, theirs = (
        {zero: search(task(SMALL, seq=1024, fixed={**fixed, "zero": zero}, framework=name)) for zero in (1.0, 2.0, 3.0)}
        for name in ("soli", "fsdp")
    )
    assert ours[1.0].cost.states[0] > theirs[1.0].cost.states[0]
    assert ours[2.0].cost.states[0] == ours[1.0].cost.states[0]
    assert theirs[2.0].cost.states[0] < theirs[1.0].cost.states[0]
    assert theirs[2.0].cost.gradients[0] > theirs[1.0].cost.gradients[0]


def test_what_cannot_hold_a_model_says_what_would() -> None:
    asked = task(replace(LLAMA, layers=80, hidden=8192, heads=64, ffn=28672), "a100-40gb:8x1", batch=512)
    nodes = enough(asked)
    assert nodes is not None
    assert nodes > 1
    with pytest.raises(SoliError) as refused:
        explain.answer(asked)
    assert f"{nodes} servers of 8 would hold it ({8 * nodes} devices)" in str(refused.value)
    assert "lacks" in str(refused.value)
    assert "cannot hold" in str(refused.value)
    least = search(task(memory=1e9)).least  # up to which the plan takes that takes least
    with pytest.raises(SoliError, match="is not sure to hold"):
        explain.answer(task(memory=0.95 * least))
    assert len(search(replace(asked, cluster=replace(asked.cluster, nodes=nodes))).points)
    assert not len(search(replace(asked, cluster=replace(asked.cluster, nodes=nodes // 2))).points)


@pytest.mark.parametrize("least", [1, 5, 7, 11, 47, 50, 16384, 20000])
def test_the_fewest_servers_are_found_between_powers_of_two(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are tried up to 48, of more every sixteenth between a power of two, or three times one, and the next."""
    monkeypatch.setattr(planner_search, "holds", lambda asked: asked.cluster.nodes >= least)
    assert enough(task()) == (None if least == 20000 else least)


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({"tp": 3.0}, "tp=3 does not divide the 32 devices"),
        ({"tp": 8.0, "dp": 8.0}, "tp=8 and dp=8 contradict each other"),
        ({"tp": 2.0, "cp": 1.0, "pp": 2.0, "dp": 4.0}, "take 16 devices"),
        ({"dp": 32.0, "microbatch": 8.0}, "dp=32 and microbatch=8 take 256 sequences, and the global batch has 128"),
        ({"sp": 1.0, "tp": 1.0}, "sp=on and tp=1 contradict each other"),
        ({"chunks": 2.0, "pp": 1.0}, "chunks=2 and pp=1 contradict each other"),
        ({"zero": 3.0, "dp": 1.0, "cp": 1.0}, "zero=3 and dp=1 contradict each other"),
        ({"tensor": 2.0, "tp": 4.0}, "tensor=3d and tp=4 contradict each other: 4 ranks are no such cube"),
        ({"tensor": 1.0, "rows": 3.0, "tp": 8.0}, "tensor=2d and rows=3 and tp=8 contradict each other"),
        ({"pp": 32.0, "chunks": 2.0}, "pp=32 and chunks=2: 64 stages, and llama has 32 layers"),
        ({"tensor": 1.0, "tp": 999999999.0}, "tp=1e+09 does not divide the 32 devices"),
        ({"replicate": 3.0}, "replicate=3 does not divide the 32 ranks"),
        ({"replicate": 8.0, "tp": 8.0}, "replicate=8 does not divide the 4 ranks"),
        ({"replicate": 3.0, "dp": 8.0}, "replicate=3 does not divide dp=8"),
        ({"schedule": 4.0, "microbatches": 2.0, "pp": 2.0}, "schedule=zbv and microbatches=2 and pp=2 contradict each other: microbatches are two times pp or more"),
        ({"schedule": 1.0, "microbatches": 6.0, "pp": 4.0}, "schedule=interleaved and microbatches=6 and pp=4 contradict each other: microbatches are a multiple of pp"),
        ({"tensor": 2.0, "pp": 32.0, "schedule": 0.0, "recompute": 2.0, "sp": 0.0}, "fixed: tensor=3d, pp=32, schedule=1f1b, recompute=full, sp=off"),
    ],
)
def test_what_contradicts_itself_is_named(fixed: dict[str, float], said: str) -> None:
    with pytest.raises(SoliError) as refused:
        search(task(fixed=fixed))
    assert said in str(refused.value)


def test_too_small_a_batch_says_how_large() -> None:
    alone = {"tp": 1.0, "cp": 1.0, "pp": 1.0}
    with pytest.raises(SoliError) as refused:
        search(task(batch=16, fixed=alone))
    assert "a global batch of 32 or more" in str(refused.value)
    assert search(task(SMALL, batch=32, fixed=alone, seq=1024)).counted


def test_what_has_words_can_be_fixed() -> None:
    assert set(explain.WORDS) <= set(explain.FIXED)
    for name, values in explain.WORDS.items():
        for word, value in values.items():
            assert explain.fixed_of(f"{name}={word}") == {name: value}
            assert explain.spelt({name: value}) == f"{name}={word}"


def test_a_plan_that_was_printed_can_be_asked_about() -> None:
    """Its parts of a batch are a replica's microbatches, with a pipeline or without."""
    plan = "dp=8, zero=1,tp = 4,sp=on,accumulate=8,precision=bf16"
    fixed = {
        "dp": 8.0,
        "zero": 1.0,
        "tp": 4.0,
        "sp": 1.0,
        "microbatches": 8.0,
        "precision": explain.WORDS["precision"]["bf16"],
    }
    assert explain.fixed_of(plan) == fixed
    assert (
        explain.fixed_of("microbatches=4,accumulate=2")
        == explain.fixed_of("accumulate=2,microbatches=4")
        == {"microbatches": 8.0}
    )
    assert explain.fixed_of("pp=8,microbatches=16,recompute=0.523") == {
        "pp": 8.0,
        "recompute": 3.0,
        "microbatches": 16.0,
    }
    for more, said in (({"microbatch": 8.0}, "take 512 sequences"), ({"microbatches": 64.0}, "take 512 sequences")):
        with pytest.raises(SoliError, match=said):
            search(task(batch=256, fixed=fixed | more))
    with pytest.raises(SoliError, match="precision=bf16 is fixed, and fp8 is asked for"):
        search(task(precision="fp8", framework="megatron", fixed=explain.fixed_of("precision=bf16")))


@pytest.mark.parametrize("batch", [9, 31, 64, 100])
def test_a_plan_that_was_found_can_be_fixed(batch: int) -> None:
    """Where the batch does not divide too; and all that is found has what is fixed of its batch."""
    asked = task(SMALL, "h100:8x2", batch=batch, seq=1024)
    for one in explain.answer(asked, 4).best:
        fixed = explain.fixed_of(one.plan) | {"microbatch": float(one.microbatch)}
        again = explain.answer(asked.with_fixed(fixed), 1).best[0]
        assert (again.plan, again.microbatch) == (one.plan, one.microbatch)
    best = explain.answer(asked, 1).best[0]
    assert explain.why_not(asked, explain.fixed_of(best.plan)).endswith("the best plan has it")


def test_the_rows_of_a_grid_can_be_fixed() -> None:
    asked = task(SMALL, "h100:8", batch=64, seq=1003)
    text = "tp=8,tensor=2d,rows=2"
    best = explain.answer(asked.with_fixed(explain.fixed_of(text)), 1).best[0]
    assert text in best.plan
    assert explain.why_not(asked.with_fixed(explain.fixed_of("tp=8,tensor=2d")), {"rows": 2.0}).startswith("rows=2: at best")
    found = search(asked.with_fixed({"rows": 2.0})).points
    assert set(zip(found.tensor, found.rows, strict=True)) == {(1.0, 2.0)}
    for fixed, said in (("rows=2,tensor=3d", "rows=2 are of a grid, which tensor=3d is not"), ("rows=2,sp=on", "sp=on and a grid"), ("rows=2,schedule=zbv", "zbv and a grid")):
        with pytest.raises(SoliError, match=said):
            search(asked.with_fixed(explain.fixed_of(fixed)))
    with pytest.raises(SoliError, match="fsdp does not run tensor=2d or 3d"):
        search(replace(asked, framework="fsdp", fixed={"rows": 2.0}))


def test_a_fixed_microbatch_is_kept_or_refused() -> None:
    asked = task(SMALL, "h100:8x4", batch=64, seq=1024)
    for size in (3, 5):
        assert {one.microbatch for one in explain.answer(asked.with_fixed({"microbatch": float(size)})).best} == {size}
    for fixed, said in (
        ({"dp": 32.0, "microbatch": 3.0}, "take 96 sequences, and the global batch has 64"),
        ({"dp": 8.0, "microbatch": 5.0}, "dp=8 and microbatch=5 cannot be: a replica cuts its part of 64 sequences"),
        ({"dp": 8.0, "microbatches": 5.0}, "allowed dp=8 has microbatch=2, microbatches=4"),
        ({"dp": 8.0, "microbatch": 2.0, "microbatches": 2.0}, "cannot be"), ({"microbatch": 65.0}, "take 65 sequences"), ({"dp": 32.0, "tp": 1.0, "microbatches": 3.0}, "take 96 sequences"),
    ):  # fmt: skip
        with pytest.raises(SoliError, match=said):
            search(asked.with_fixed(fixed))


@pytest.mark.parametrize("framework", ["soli", "megatron"])
@pytest.mark.parametrize("batch", [120, 128])
def test_so_many_microbatches_are_of_each_replica(framework: str, batch: int) -> None:
    """Among all plans with as many, the best is what is found, whatever dp is; their microbatch is what they leave."""
    asked = task(
        SMALL, "h100:8x2", batch=batch, seq=1024, framework=framework, fixed={"recompute": 0.0, "schedule": 0.0}
    )
    every = spaces(asked)
    for parts in (1, 2, 8, 7)[: 4 if framework == "soli" else 3]:  # whose parts need not be equal
        found = search(asked.with_fixed({"microbatches": float(parts)}))
        assert set(found.points.microbatches) == {parts}
        at = np.flatnonzero((every.microbatches == parts) & (peaks(asked, every) <= asked.limit))
        best = costs(asked, every.take(at)).time.min(initial=np.inf)
        assert found.cost.time[0] <= best * (1 + 1e-12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("precision=fp32", "allowed bf16, fp16, fp8"), ("tp=0", "a whole number above 0"), ("tp=²", "a whole number above 0"), (" ", "nothing is said"), ("sp=yes", "on, off"), ("zero=4", "0, 1, 2, 3"), ("tq=2", "'tq' cannot be fixed"),
        ("recompute=half", "none, selective, full"), ("tp=2,tp=4", "fixed twice"), ("tp", "got     nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_fixed(text: str, said: str) -> None:
    with pytest.raises(SoliError) as refused:
        explain.fixed_of(text)
    assert said in str(refused.value.problems[0])


# --- models -----------------------------------------------------------------------------------------------


def config_of(**changes: object) -> str:
    said = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 100}
    return json.dumps(said | changes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "the model cannot be read"),
        ("{", "the model is no config.json"),
        ("[1]", "no object of JSON"),
        ('{"hidden_size": 4}', "layers"),
        ('{"hidden_size": 4, "num_hidden_layers": true}', "layers"),
        ('{"text_config": null, "hidden_size": null}', "hidden"),
        (config_of(num_key_value_heads=6), "6 key heads do not divide 8 heads"),
        (config_of(num_attention_heads=8192), "share a width of 64"),
        (config_of(num_hidden_layers=10**400), "layers"),
        (config_of(is_encoder_decoder=True), "'is_encoder_decoder', an encoder beside its decoder, are not understood"),
        (config_of(model_type="mt5"), "'model_type', an encoder beside its decoder, are not understood"),
        (config_of(num_local_experts=2, num_experts_per_tok=4), "goes to 4 of 2 experts"),
    ],
)
def test_what_is_no_model(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(SoliError) as refused:
        read_model(tmp_path)
    assert said in str(refused.value)


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(SoliError, match="cannot be read"):
        read_model(Path("x" * 300))


# --- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    said = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return tmp_path


def test_the_command_gives_the_best(config: Path) -> None:
    words = ["--cluster", "h100:8x4", "--global-batch", "128", "--seq", "4096", "--why-not", "tp=8", "--fix", "zero=1"]
    done = soli("plan", str(config), *words, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    asked = task(fixed={"zero": 1.0})
    assert [one["plan"] for one in said["best"]] == [one.plan for one in explain.answer(asked).best]
    assert said["why_not"] == [explain.why_not(asked, {"tp": 8.0})]
    assert all("zero=1" in one["plan"] for one in said["best"])
    shown = soli("plan", str(config), *words)
    assert "Why not tp=8" in shown.stdout
    assert said["best"][0]["plan"].split(",")[0] in shown.stdout


def test_the_command_says_a_length_that_nobody_said_and_counts_parameters_in_whole_numbers(config: Path) -> None:
    words = ["--cluster", "8xH100", "--global-batch", "16", "--count", "1"]
    said = json.loads(soli("plan", str(config), *words, "--framework", "torchtitan", "--json").stdout)
    assert [one for one in said["inferred"] if "no length: sequences are of 8192 tokens" in one]
    assert isinstance(said["parameters"], int)
    assert "fsdp hopper" in said["assumed"]
    given = json.loads(soli("plan", str(config), *words, "--seq", "8192", "--framework", "fsdp", "--json").stdout)
    assert given["best"] == said["best"]
    assert not given["inferred"]


def test_a_precision_that_is_fixed_is_asked_for(config: Path) -> None:
    words = ["--cluster", "h100:8", "--global-batch", "16", "--count", "1", "--framework", "megatron", "--json"]
    done = soli("plan", str(config), *words, "--fix", "precision=fp8")
    assert done.returncode == 0, done.stderr
    assert "precision=fp8" in json.loads(done.stdout)["best"][0]["plan"]
    done = soli("plan", str(config), *words, "--fix", "precision=fp8", "--precision", "bf16")
    assert "precision=fp8 is fixed, and bf16 is asked for" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "h1000:8", "--global-batch", "8"], "no device 'h1000' is known"),
        (["--global-batch", "8"], "Missing option '--cluster'"),
        (["--cluster", "h100:8", "--global-batch", "8", "--memory", "500GB"], "500.0 GB are more than h100 has"),
        (["--cluster", "h100:8", "--global-batch", "8", "--whatif", "seq", "--html", "x"], "answers its own questions"),
        (["--cluster", "h100:8", "--global-batch", "8", "--memory", "70"], "70GB, 64GiB"),
        (["--cluster", "h100:8", "--global-batch", "8", "--precision", "int4"], "bf16, fp16, fp8"),
        (["--cluster", "h100:8", "--global-batch", "8", "--precision", "fp8"], "soli does not run precision=fp8"),
        (["--cluster", "v100:8", "--global-batch", "8", "--precision", "bf16"], "v100 does not multiply bf16"),
        (["--cluster", "h100:8", "--global-batch", "8", "--framework", "alpa"], "soli, megatron, megatron-deepspeed"),
    ],
)
def test_mistakes_are_said(config: Path, words: list[str], said: str) -> None:
    done = soli("plan", str(config), *words)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr

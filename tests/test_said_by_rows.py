"""What a row or a name says is taken as it is meant, and a row that says more is predicted no worse."""

from __future__ import annotations

import csv
from dataclasses import replace
from math import isclose
from pathlib import Path

import numpy as np
import pytest

from soli.planner import explain
from soli.planner.cost import arithmetic, communication, memory
from soli.planner.cost.constants import known, repeated
from soli.planner.cost.points import points
from soli.planner.hardware.clusters import read_cluster
from soli.planner.models import named, read_model
from soli.planner.predict import predict
from soli.planner.rows import read
from soli.planner.search import Task, search
from test_cost import point, usual

ROW = {"gpu": "H100", "gpus": "64", "global_batch": "128", "seq_len": "4096", "framework": "megatron-core", "tp": "8", "microbatch": "1", "recompute": "full", "precision": "bf16", "sp": "on", "shard": "zero1"}  # fmt: skip
TABLES = sorted((Path(__file__).parents[1] / "benchmarks/published").glob("*.csv"))
SIZES = {"layers": "32", "hidden": "4096", "heads": "32", "ffn": "16384", "vocab": "50304"}


def test_cells_without_a_word_are_as_columns_that_are_not_there() -> None:
    """As where tables of several sources are put together: each row has the columns of all."""
    rows = [row for table in TABLES for row in list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))[::12]]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    alone = predict([{column: cell for column, cell in row.items() if cell} for row in rows])
    assert len(alone) > 300
    for empty in ("", "N/A"):
        assert predict([{column: row.get(column) or empty for column in columns} for row in rows]) == alone


def parameters(row: dict[str, str]) -> float:
    found = read(row)
    assert not found.refused, found.refused
    return float(memory.parameters(points([found.point]))[0])


@pytest.mark.parametrize("name", ["Llama-3-70B", "Llama-3.1-405B", "Falcon-40B", "Gemma-2-27B", "DeepSeek-V3", "Mixtral-8x7B"])
def test_a_row_that_says_a_known_models_sizes_has_all_of_that_model(name: str) -> None:
    """Its keys' heads, heads' size, shared experts and layers without experts too, which a row seldom has."""
    model = named(name)
    assert model is not None
    said = {key: str(getattr(model, key)) for key in ("layers", "hidden", "heads", "vocab")}
    said |= {"experts": str(model.experts), "topk": str(model.active - model.shared), "moe_ffn": str(model.ffn)} if model.experts else {"ffn": str(model.ffn)}
    alone, told = (parameters(ROW | {"model": name} | more) for more in ({}, said))
    assert told == alone
    assert model.experts or isclose(alone, model.parameters, rel_tol=1e-9)  # routers are counted in rows alone


def test_layers_of_experts_that_were_cut_from_a_model_have_experts() -> None:
    """SimuMax' "truncated to 4 layers" of DeepSeek-V3 takes 122 GB, of which its three first ones would take few."""
    assert [named(name).plain for name in ("deepseek-v3", "deepseek-v3-l4")] == [3, 0]  # type: ignore[union-attr]
    assert [read(ROW | {"model": "deepseek-v3", "pp": "1", **more}).point["plain"] for more in ({}, {"layers": "2"}, {"layers": "4"})] == [3, 0, 0]


def test_a_dimension_of_a_mesh_says_how_many_devices_there_are() -> None:
    row = {name: value for name, value in ROW.items() if name not in ("gpus", "shard", "global_batch")} | {"framework": "torchtitan", "model": "Llama-3-70B", "data_parallel_shard_degree": "32", "local_batch_size": "1"}  # fmt: skip
    unsaid, said = (read(row | more) for more in ({}, {"gpus": "256"}))
    assert (unsaid.point["dp"], unsaid.point["tp"]) == (said.point["dp"], said.point["tp"]) == (32, 8)


@pytest.mark.parametrize(
    ("more", "frozen"),
    [
        ({"q_lora_rank": "null"}, 0), ({"kv_lora_rank": "512 (MLA)"}, 0), ({"notes": "unlike LoRA all weights are trained"}, 0), ({"notes": "1.5x slower than LoRA"}, 0),
        ({"peft": "LoRA r=16"}, 1), ({"notes": "LoRA of rank 8"}, 1), ({"model": "Llama-3-8B QLoRA"}, 1),
    ],
)  # fmt: skip
def test_what_is_named_beside_lora_is_not_frozen(more: dict[str, str], frozen: float) -> None:
    assert read(ROW | SIZES | {"model": "gpt"} | more).point["frozen"] == frozen


@pytest.mark.parametrize("said", ["512", "512 (MLA)"])
def test_latent_attention_is_said_by_its_rank(said: str) -> None:
    row = ROW | SIZES | {"model": "a mixture", "experts": "64", "topk": "6", "moe_ffn": "1408"}
    assert read(row | {"kv_lora_rank": said}).point["compressed"] > 0
    assert read(row | {"multi_latent_attention": "true"}).point["compressed"] > 0
    for none in ({}, {"kv_lora_rank": "null"}, {"kv_lora_rank": "0"}, {"kv_lora_rank": "32", "multi_latent_attention": "False"}):  # Megatron's arguments have 32
        assert read(row | none).point["compressed"] == 0


@pytest.mark.parametrize("yes", ["true", "✓", "y", "Enabled", "ZeRO-1"])
def test_a_yes_of_any_kind_shards_the_optimizer(yes: str) -> None:
    row = {name: value for name, value in (ROW | SIZES).items() if name != "shard"}
    assert read(row | {"dist_opt": yes}).point["zero"] == 1
    assert read(row | {"dist_opt": "no"}).point["zero"] == 0


@pytest.mark.parametrize(
    ("more", "name", "value"),
    [
        ({"swiglu": "✓"}, "gated", 1), ({"swiglu": "SwiGLU"}, "gated", 1), ({"swiglu": "no"}, "gated", 0), ({"untie": "y"}, "tied", 0), ({"untie": "no"}, "tied", 1),
        ({"fp8_format": "hybrid", "precision": ""}, "low", 1), ({"enable_float8_linear": "true", "precision": ""}, "low", 1),
        ({"tp": "", "tp_degree": "4"}, "tp", 4), ({"pp_degree": "2"}, "pp", 2), ({"tp": "", "tensor_model_parallel": "4"}, "tp", 4), ({"tp": "", "Parallelism": "TP4xPP2"}, "pp", 2),
        ({"framework": "nemo", "grad_reduce_in_fp32": "true"}, "summed", 4), ({"framework": "nemo", "grad_reduce_in_fp32": "false"}, "summed", 2),
        ({"global_batch": "-1", "dp": "8", "grad_accum": "2"}, "batch", 16),
    ],
)  # fmt: skip
def test_columns_are_read(more: dict[str, str], name: str, value: float) -> None:
    found = read(ROW | SIZES | {"model": "gpt"} | more)
    assert not found.refused, found.refused
    got = found.point["global_batch"] if name == "batch" else found.point[name]
    assert got == value


@pytest.mark.parametrize("more", [{"recompute": "every 0"}, {"interconnect": "0 nodes"}, {"model": "llama-2-7b 0 layers"}])
def test_nothing_of_something_ends_no_table(more: dict[str, str]) -> None:
    first, second = predict([ROW | {"model": "llama-2-7b"} | more, ROW | {"model": "llama-2-7b"}])
    assert second.predicted_time_s is not None
    assert first.refused or isclose(first.predicted_time_s or 0.0, second.predicted_time_s, rel_tol=1e-9) or "recompute" in more


def test_gradients_are_scattered_as_wide_as_they_are_summed() -> None:
    """Of frozen weights there are none."""
    k = repeated(known("fsdp", "ampere"), 1)
    net = {"dp": 8, "zero": 3, "node": 1, "net": 1e9}
    gathers = lambda p: [float(x[0]) for x in communication.gathers_of_layer(p, k, *memory.of_layer(p))]
    sent = lambda **more: gathers(point(**net, **more))
    (one, again, narrow, _), wide = sent(summed=2.0), sent(summed=4.0)
    assert wide[0] == one
    assert isclose(wide[2] - again, 2 * (narrow - again), rel_tol=1e-3)
    frozen = sent(summed=4.0, frozen=1.0)
    assert (frozen[2], frozen[3]) == (again, again)


def test_a_frozen_last_product_has_no_gradient_of_its_weights() -> None:
    k = usual(logit_bytes=0.0)
    trained, frozen = (point(frozen=f, bandwidth=1e30) for f in (0.0, 1.0))
    assert isclose(arithmetic.logits(frozen, k)[0] / arithmetic.logits(trained, k)[0], 4 / 6, rel_tol=1e-9)


def test_a_rack_has_a_host_for_each_tray() -> None:
    """72 devices of one domain of NVLink are 18 servers of 4 (NVIDIA GB200 NVL72)."""
    k, parameters = usual(), np.array([1e9])
    took = lambda node: float(arithmetic.optimizer(point(offload=1.0, node=node, dp=72, host=225e9), k, parameters)[0])
    assert took(72) == took(4) < took(8)


@pytest.mark.parametrize(("cluster", "gbits"), [("p4d:8x8", 50), ("a3-megagpu:8x4", 200), ("a3-highgpu:8x4", 100), ("p3:8x2", 3.125), ("p4d:8x8@ib-hdr", 200), ("a100-40gb:8x8", 200), ("g6e:8x2", 50)])
def test_a_clouds_server_has_its_network(cluster: str, gbits: float) -> None:
    made = read_cluster(cluster)
    assert made.device.net_gbits == read_cluster(str(made)).device.net_gbits == gbits


def test_a_row_of_a_clouds_server_has_its_network() -> None:
    net = lambda gpu, **more: read({key: value for key, value in ROW.items()} | {"model": "llama-2-7b", "gpu": gpu} | more).point["net"]
    assert net("p4d") == net("p4d.24xlarge") == net("A100-40GB", interconnect="400 Gbit/s EFA") < net("A100-40GB")


def test_keys_heads_of_a_configuration_by_its_makers_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 32000, "model_type": "mistral"}')
    assert read_model(tmp_path / "config.json")[0].kv_heads == 8


def test_a_row_of_solis_own_plan_is_what_a_search_says_of_it() -> None:
    """Its stages' borders too, which lie where the longest is shortest: of 80 layers on 8 stages the last has 9 and six others 11 or 10."""
    model = named("llama-3-70b")
    assert model is not None
    found = search(Task(model, read_cluster("h100:8x8"), 256, 4096, fixed={"pp": 8, "tp": 4, "cp": 1, "recompute": 1, "microbatch": 1, "zero": 1}))
    p, row = found.points, {"model": "llama-3-70b", "gpu": "h100", "gpus": "64", "gpus_per_node": "8", "framework": "soli", "seq_len": "4096", "global_batch": "256", "precision": "bf16"}  # fmt: skip
    said = {name: f"{getattr(p, name)[0]:g}" for name in ("tp", "pp", "dp", "zero", "microbatch")} | {"recompute": "selective", "sp": "on" if p.sp[0] else "off", "vp": f"{p.chunks[0]:g}"}
    predicted = predict([row | said])[0]
    assert p.pp[0] == 8
    assert p.fewer[0] > 0
    assert (predicted.predicted_time_s, predicted.predicted_memory_gb) == (pytest.approx(found.cost.time[0]), pytest.approx(found.cost.memory[0] / 1e9))


def test_flops_of_a_token_are_the_models_and_not_the_plans() -> None:
    """Routers, which each rank of tp has whole, once."""
    model = named("kimi-k2")
    assert model is not None
    counts = [memory.parameters(point(**model.point(), tp=float(tp)))[0] for tp in (1, 2, 8)]
    assert counts == pytest.approx([model.parameters] * 3)


@pytest.mark.parametrize(("slower", "said"), [(1.03, True), (1.2, False)])
def test_plans_that_are_nearer_than_two_plans_are_known_are_to_be_measured(slower: float, said: bool) -> None:
    """However far programs are off: two plans of one are off alike."""
    model = named("llama-3-8b")
    assert model is not None
    (first,) = explain.answer(Task(model, read_cluster("h100:8"), 64, 4096), 1).best
    second = replace(first, step_time_s=slower * first.step_time_s, time_low_s=slower * first.time_low_s)
    assert ("Less than the error" in explain.why([first, second], 0.0257)) == said

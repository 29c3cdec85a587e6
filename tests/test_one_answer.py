"""A plan costs what `soli plan MODEL` says of it and what `soli plan predict` does: the same."""

from dataclasses import replace

import pytest

from soli.planner.explain import answer, fixed_of
from soli.planner.hardware.clusters import read_cluster
from soli.planner.models import named
from soli.planner.predict import predict
from soli.planner.task import Task


@pytest.mark.parametrize(
    ("model", "framework", "precision", "tp", "pp", "zero", "recompute"),
    [
        ("llama-3-8b", "fsdp", "bf16", 1, 1, 3, "selective"),
        ("llama-2-7b", "fsdp", "bf16", 2, 2, 1, "selective"),
        ("llama-3-8b", "fsdp", "bf16", 1, 1, 3, "full"),
        ("mixtral-8x7b", "fsdp", "bf16", 8, 1, 3, "selective"),
        ("llama-3-8b", "megatron", "bf16", 4, 1, 1, "selective"),
        ("llama-3-8b", "megatron", "fp8", 4, 1, 1, "selective"),
        ("llama-2-7b", "megatron", "fp16", 4, 2, 1, "selective"),
        ("llama-3-8b", "megatron-deepspeed", "bf16", 4, 1, 1, "selective"),
        ("llama-2-7b", "megatron-deepspeed", "bf16", 4, 2, 1, "selective"),
        ("llama-2-7b", "megatron-deepspeed", "fp16", 4, 2, 1, "selective"),
        ("llama-3-8b", "deepspeed", "bf16", 1, 1, 3, "full"),
        ("llama-2-7b", "soli", "bf16", 2, 2, 1, "selective"),
    ],
)
def test_a_search_says_what_a_prediction_does(model: str, framework: str, precision: str, tp: int, pp: int, zero: int, recompute: str) -> None:
    known = named(model)
    assert known is not None
    text = f"tp={tp},pp={pp},cp=1,zero={zero},recompute={recompute},microbatch=1" + ",replicate=1" * (zero > 0)
    text += ",tensor=1d" * (framework == "soli") + ",schedule=1f1b" * (pp > 1) + ",sp=off" + ",ep=1" * (known.experts > 0)
    task = Task(known, read_cluster("h200:8x8"), 64, 4096, precision, framework=framework)
    task = replace(task, fixed=fixed_of(text + ",offload=none"))
    searched = answer(task, 1).best[0]
    cells = {
        "model": model, "framework": framework, "gpu": "h200", "gpus": 64, "tp": tp, "pp": pp, "dp": 64 // tp // pp, "cp": 1, "ep": 1, "shard": f"zero{zero}",
        "microbatch": 1, "global_batch": 64, "seq_len": 4096, "recompute": recompute, "precision": precision, "sp": "off", "attn_backend": "flash",
    }  # fmt: skip
    [said] = predict([{name: str(value) for name, value in cells.items()}], [])
    assert not said.refused
    assert searched.memory_gb == pytest.approx(said.predicted_memory_gb, rel=0.01)
    assert searched.step_time_s == pytest.approx(said.predicted_time_s, rel=0.03)
    assert f"recompute={recompute}" in searched.plan

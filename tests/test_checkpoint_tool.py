"""show, check, export and import: weights out and in, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from noted import noted
from soli.checkpoint import load, read_manifest, save
from soli.checkpoint.tool import check, show
from soli.checkpoint.transfer import export, import_
from soli.core.errors import SoliError
from soli.core.layout import Box, Sharded, from_whole


def weights() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    special = torch.randn(6, generator=rng).bfloat16()
    special[0], special[1] = float("nan"), -0.0
    return {
        "model.embed.weight": torch.randn(10, 6, generator=rng),  # a module called model, as in many models
        "norm.weight": special,
        "scale": torch.tensor(2.5),
        "steps": torch.arange(4),
    }


def checkpoint(path: Path) -> Path:
    """Two chunks of the embedding, a tied head, and optimizer tensors that must not travel."""
    tensors = {f"model.{name}": from_whole(tensor) for name, tensor in weights().items()}
    embed = weights()["model.embed.weight"]
    pieces = [(Box((0, 0), (10, 2)), embed[:, :2]), (Box((0, 2), (10, 4)), embed[:, 2:])]
    tensors["model.model.embed.weight"] = Sharded((10, 6), torch.float32, pieces)
    tensors["optimizer.scale.exp_avg"] = from_whole(torch.tensor(1.0))
    save(path, tensors, {"step": 12, "plan": "dp=4,zero=2", "tied": {"head.weight": "model.embed.weight"}})
    return path


def same(held: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    bits = lambda t: (t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).tolist())
    return {k: bits(v) for k, v in held.items()} == {k: bits(v) for k, v in expected.items()}


def message(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(SoliError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_show_says_what_is_there(tmp_path: Path) -> None:
    text = show(checkpoint(tmp_path / "c"))
    rows = [line.split() for line in text.splitlines()]
    assert ["step", "12"] in rows
    assert ["plan", "dp=4,zero=2"] in rows
    assert ["model", "4", "tensors,", "288", "bytes"] in rows
    assert ["model.model.embed.weight", "10", "x", "6", "float32", "240", "bytes", "2"] in rows
    assert ["model.scale", "scalar", "float32", "4", "bytes", "1"] in rows
    assert check(tmp_path / "c") == []


def test_export_one_file_and_import_it_again(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c")
    out = tmp_path / "deep" / "m.safetensors"
    assert export(source, out) == [out]
    assert same(load_file(out), weights())
    import_(out, tmp_path / "back", tied={"head.weight": "model.embed.weight"})
    manifest = read_manifest(tmp_path / "back")
    tied = {"head.weight": "model.embed.weight"}
    assert manifest.state == {"step": 0, "imported_from": "m.safetensors", "tied": tied}
    assert set(manifest.tensors) == {f"model.{name}" for name in weights()}
    assert check(tmp_path / "back") == []
    export(tmp_path / "back", tmp_path / "again.safetensors")
    assert same(load_file(tmp_path / "again.safetensors"), weights())
    assert "exists" in message(export, source, out)


def test_export_in_shards_and_import_the_folder(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c")
    (tmp_path / "config.json").write_text('{"hidden_size": 6}')
    small = tmp_path / "sharded"
    written = export(source, small, format="hf", max_shard_bytes=45, config=tmp_path / "config.json")
    assert sorted(small.iterdir()) == sorted(written)
    index = json.loads((small / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 288
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    held = {name: load_file(small / file)[name] for name, file in index["weight_map"].items()}
    assert same(held, weights())
    assert json.loads((small / "config.json").read_text()) == {"hidden_size": 6}
    import_(small, tmp_path / "back")
    assert read_manifest(tmp_path / "back").state == {"step": 0, "imported_from": "sharded"}
    assert [p.name for p in export(tmp_path / "back", tmp_path / "one", format="hf")] == ["model.safetensors"]
    assert same(load_file(tmp_path / "one" / "model.safetensors"), weights())
    import_(tmp_path / "one", tmp_path / "third")
    assert read_manifest(tmp_path / "third").tensors.keys() == read_manifest(tmp_path / "back").tensors.keys()


def test_imported_weights_are_of_the_models_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.tensor([1.0, 2.5]).bfloat16(), "n": torch.tensor([7])}, tmp_path / "m.safetensors")
    import_(tmp_path / "m.safetensors", tmp_path / "c")
    real, whole = torch.zeros(2), torch.zeros(1, dtype=torch.int64)
    load(tmp_path / "c", {"model.a": from_whole(real), "model.n": from_whole(whole)})
    assert (real.tolist(), whole.tolist()) == ([1.0, 2.5], [7])
    assert "1 of its 2 tensors are cast, model.a from torch.bfloat16 to torch.float32" in capsys.readouterr().out
    with pytest.raises(SoliError, match=r"model\.n has another shape or dtype"):
        load(tmp_path / "c", {"model.a": from_whole(real), "model.n": from_whole(torch.zeros(1))})


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    both = weights() | {"head.weight": weights()["model.embed.weight"], "nan": weights()["norm.weight"]}
    save_file({name: tensor.clone() for name, tensor in both.items()}, tmp_path / "m.safetensors")
    import_(tmp_path / "m.safetensors", tmp_path / "c", {"head.weight": "model.embed.weight", "nan": "norm.weight"})
    export(tmp_path / "c", tmp_path / "out.safetensors")
    assert same(load_file(tmp_path / "out.safetensors"), weights())
    for tied, words in (({"scale": "steps"}, "are not equal"), ({"x": "y"}, "which is not there")):
        assert words in message(import_, tmp_path / "m.safetensors", tmp_path / "no", tied)
    assert not (tmp_path / "no").exists()
    tied = {"head.weight": "model.embed.weight"}
    stored = {f"model.{name}": from_whole(tensor) for name, tensor in both.items() if name != "nan"}
    save(tmp_path / "both", stored, {"tied": tied})
    export(tmp_path / "both", tmp_path / "both.safetensors")
    assert same(load_file(tmp_path / "both.safetensors"), weights())
    stored["model.head.weight"] = from_whole(both["head.weight"] + 1)
    save(tmp_path / "both", stored, {"tied": tied}, overwrite=True)
    assert "are not equal" in message(export, tmp_path / "both", tmp_path / "no")


def test_refusals_say_why_and_leave_nothing(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "c")
    torch.save(weights(), tmp_path / "pytorch_model.bin")
    (tmp_path / "folder").mkdir()
    torch.save(weights(), tmp_path / "folder" / "m.pt")
    for bad in ("pytorch_model.bin", "folder"):
        text = message(import_, tmp_path / bad, tmp_path / "out")
        assert "runs code when it is opened" in text
        assert "save_file" in text
    assert "nothing at" in message(import_, tmp_path / "none", tmp_path / "out")
    text = message(export, source, tmp_path / "out", format="gguf", max_shard_bytes=0, config=tmp_path / "none")
    for part in ("unknown export format", "must hold something", "no such config"):
        assert part in text
    (tmp_path / "config.json").write_text('{"hidden_size": 1024, "vocab_size": 6, "n_layer": 24}')
    export(source, tmp_path / "beside", format="hf", config=tmp_path / "config.json")
    assert any("may be of another model" in note["text"] and "it says hidden_size=1024, n_layer=24, and" in note["text"] for note in noted())
    (tmp_path / "config.json").write_text("[")
    assert "is no object of JSON" in message(export, source, tmp_path / "out", format="hf", config=tmp_path / "config.json")
    save(tmp_path / "bare", {"rng.cpu": from_whole(torch.zeros(1))}, {})
    assert "no model tensors" in message(export, tmp_path / "bare", tmp_path / "out")
    (tmp_path / "file").touch()
    assert "refused writing" in message(export, source, tmp_path / "file" / "out")
    data = bytearray((source / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (source / "rank-00000.safetensors").write_bytes(data)
    assert "damaged" in message(export, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, words in (
        ({"a": "x.safetensors"}, "b is not where it should be"),
        ({"a": "x.safetensors", "b": "y.safetensors"}, "y.safetensors"),
        ({"a": "../x.safetensors"}, "not beside it"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert words in message(import_, tmp_path, tmp_path / "out")
    index.write_text("{}")
    assert "is no index" in message(import_, tmp_path, tmp_path / "out")


MEMORY = """
import sys, threading, torch
from pathlib import Path
from soli.checkpoint import save
from soli.checkpoint.transfer import export
from soli.core.layout import from_whole
folder = Path(sys.argv[1])
one = torch.ones(1_000_000)
save(folder / "c", {f"model.{i}": from_whole(one) for i in range(40)}, {})
def memory():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) * 1024
before, peak, stop = memory(), 0, threading.Event()
def watch():
    global peak
    while not stop.wait(0.001):
        peak = max(peak, memory() - before)
watcher = threading.Thread(target=watch)
watcher.start()
if sys.argv[2] == "export":
    export(folder / "c", folder / "m.safetensors")
else:
    all_at_once = [one.clone() for _ in range(40)]
stop.set()
watcher.join()
print(peak)
"""


def test_export_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """160 MB of weights in 4 MB tensors take less than 24 MB; the same measure sees 160 MB held at once."""
    peaks = {}
    for way in ("export", "all at once"):
        (tmp_path / way).mkdir()
        command = [sys.executable, "-c", MEMORY, str(tmp_path / way), way]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        peaks[way] = int(done.stdout)
    assert peaks["export"] < 24_000_000, peaks
    assert peaks["all at once"] > 100_000_000, peaks


def test_experts_are_stacked_as_transformers_has_them_and_published_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    few = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    mixtral = transformers.MixtralConfig(**few, intermediate_size=6, num_local_experts=11)
    moe = {
        "num_experts": 3,
        "moe_intermediate_size": 6,
        "shared_expert_intermediate_size": 4,
        "tie_word_embeddings": True,
    }
    for number, config in enumerate((mixtral, transformers.Qwen2MoeConfig(**few, **moe))):
        torch.manual_seed(number)
        model = transformers.AutoModelForCausalLM.from_config(config)
        published, folder = tmp_path / f"hf{number}", tmp_path / f"c{number}"
        model.save_pretrained(published, max_shard_size="2KB" if number else "1GB")
        import_(published, folder)
        held = {
            name: tensor for name, tensor in model.state_dict().items() if not (number and name == "lm_head.weight")
        }
        export(folder, tmp_path / f"{number}.safetensors")
        assert same(load_file(tmp_path / f"{number}.safetensors"), held)
        assert "tensors of" in capsys.readouterr().out
        export(folder, tmp_path / f"back{number}", format="hf", config=published / "config.json")
        written = {n: t for file in published.glob("*.safetensors") for n, t in load_file(file).items()}
        assert same(load_file(tmp_path / f"back{number}" / "model.safetensors"), written)
        (published / "config.json").unlink()
        import_(published, tmp_path / f"as{number}")
        assert read_manifest(tmp_path / f"as{number}").tensors.keys() == {f"model.{name}" for name in written}
    (tmp_path / "part").mkdir()
    del written["model.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(written, tmp_path / "part" / "model.safetensors")
    (tmp_path / "part" / "config.json").write_bytes((tmp_path / "back1" / "config.json").read_bytes())
    assert "cannot be made as transformers makes it" in message(import_, tmp_path / "part", tmp_path / "no")
    twice = written | {"layers.0.input_layernorm.weight": torch.zeros(8)}
    save_file(twice, tmp_path / "part" / "model.safetensors")
    assert "model.layers.0.input_layernorm.weight is there more than once" in message(import_, tmp_path / "part", tmp_path / "no")
    del written["model.layers.0.mlp.experts.2.gate_proj.weight"]
    save_file(written, tmp_path / "part" / "model.safetensors")
    assert "would be of shape (2, 12, 8)" in message(import_, tmp_path / "part", tmp_path / "no")
    monkeypatch.delattr("transformers.core_model_loading.PrefixChange")  # as in 5.5
    assert "pip install 'soli[hf]'" in message(import_, tmp_path / "part", tmp_path / "no")

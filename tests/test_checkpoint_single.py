"""Checkpoints in one process: any tiling into any other, and everything that is refused."""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soli.checkpoint import latest, load, read_manifest, save, save_async
from soli.checkpoint.tensorfile import DTYPES, headers
from soli.checkpoint.tool import check
from soli.core.errors import SoliError
from soli.core.layout import Box, Sharded, flat_boxes, from_whole

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern: NaNs with payloads, denormals, infinities."""
    rng = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    return torch.randint(0, top, (count,), generator=rng, dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
@settings(max_examples=150, deadline=None)
def test_flat_boxes_cover_a_range_exactly_and_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    taken = [number for box in boxes for number in numbers[at(box)].reshape(-1).tolist()]
    assert taken == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel for box in boxes)


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Cut a random box of the tiling in two at a random place, a few times; then shuffle."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 7)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.sizes[dim]))
        sizes = list(box.sizes)
        low, high, offsets = list(sizes), list(sizes), list(box.offsets)
        low[dim], high[dim] = cut, sizes[dim] - cut
        offsets[dim] += cut
        boxes += [b for b in (Box(box.offsets, tuple(low)), Box(tuple(offsets), tuple(high))) if b.numel]
    return draw(st.permutations(boxes))


@st.composite
def reshardings(draw: st.DrawFn) -> dict[str, tuple[Tensor, list[Box], list[Box]]]:
    out = {}
    for i in range(draw(st.integers(1, 3))):
        shape, dtype = draw(SHAPES), draw(st.sampled_from(list(DTYPES)))
        whole = random_bits(shape, dtype, draw(st.integers(0, 1000)))
        out[f"model.t{i}"] = (whole, draw(tilings(shape)), draw(tilings(shape)))
    return out


@given(reshardings())
@settings(max_examples=60, deadline=None)
def test_any_tiling_loads_into_any_other_bitwise(case: dict[str, tuple[Tensor, list[Box], list[Box]]]) -> None:
    tensors, wanted, memory = {}, {}, {}
    for name, (whole, saved, asked) in case.items():
        shape, dtype = tuple(whole.shape), whole.dtype
        tensors[name] = Sharded(shape, dtype, [(box, whole[at(box)]) for box in saved])
        memory[name] = torch.zeros_like(whole)  # live memory, of which the pieces are strided views
        wanted[name] = Sharded(shape, dtype, [(box, memory[name][at(box)]) for box in asked])
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "c", tensors, {})
        assert check(Path(folder) / "c") == []
        load(Path(folder) / "c", wanted)
    for name, (whole, _, _) in case.items():
        assert bits(memory[name]) == bits(whole), name


def simple() -> dict[str, Sharded]:
    rng = torch.Generator().manual_seed(0)
    return {
        "model.a": from_whole(torch.randn(40, 30, generator=rng)),
        "model.b": from_whole(torch.randn(7, generator=rng).bfloat16()),
        "optimizer.a.step": from_whole(torch.tensor(3.0)),
    }


def message(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(SoliError) as caught:
        call(*args, **options)
    return str(caught.value)


def test_all_differences_are_reported_at_once_and_nothing_is_touched(tmp_path: Path) -> None:
    save(tmp_path / "c", simple(), {"step": 1})
    live = torch.zeros(7, dtype=torch.float32)
    wanted = {
        "model.a": from_whole(torch.zeros(40, 31)),
        "model.b": from_whole(live),
        "model.new": from_whole(torch.zeros(1)),
    }
    text = message(load, tmp_path / "c", wanted)
    for part in (
        "model.a has another shape",
        "saved (7,) bfloat16",
        "asked for (7,) float32",
        "model.new is missing",
        "optimizer.a.step is in the checkpoint, and nobody asks for it",
    ):
        assert part in text
    ignored = message(load, tmp_path / "c", wanted, ignore=lambda name: name.startswith("optimizer."))
    assert "optimizer.a.step" not in ignored
    assert not live.any()
    only = {"model.b": from_whole(torch.zeros(7, dtype=torch.bfloat16))}
    load(tmp_path / "c", only, ignore=lambda name: name != "model.b")
    assert torch.equal(only["model.b"].pieces[0][1], simple()["model.b"].pieces[0][1])


def test_damage_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    def damaged(name: str, change: Any) -> str:
        save(tmp_path / name, simple(), {"step": 1})
        file = tmp_path / name / ("manifest.json" if "manifest" in name else "rank-00000.safetensors")
        file.write_bytes(change(file.read_bytes()))
        wanted = {key: from_whole(torch.zeros_like(s.pieces[0][1])) for key, s in simple().items()}
        text = message(load, tmp_path / name, wanted)
        assert str(file) in text
        assert not any(s.pieces[0][1].any() for s in wanted.values())
        assert any(str(file) in str(problem) for problem in check(tmp_path / name))
        return text

    assert "truncated" in damaged("short", lambda data: data[:-1])
    assert "longer" in damaged("long", lambda data: data + b"\0")
    for place in (0, 20, 4000, -1):

        def flip(data: bytes, place: int = place) -> bytes:
            changed = bytearray(data)
            changed[place] ^= 0x10
            return bytes(changed)

        assert "damaged" in damaged(f"flip{place}", flip)
    assert "seal" in damaged("manifest1", lambda data: data.replace(b'"step": 1', b'"step": 2'))
    assert "damaged" in damaged("manifest2", lambda data: data[:-40])
    assert "no manifest" in damaged("manifest3", lambda data: b"[]")
    save(tmp_path / "gone", simple(), {})
    (tmp_path / "gone" / "rank-00000.safetensors").unlink()
    assert "is missing" in message(load, tmp_path / "gone", simple())
    (tmp_path / "gone" / "stray").touch()
    assert ["missing" in str(p) or "does not belong" in str(p) for p in check(tmp_path / "gone")] == [True, True]


def test_a_manifest_that_lies_is_found(tmp_path: Path) -> None:
    """Sealed again after the change, so that only the comparison with the file and the tiling can tell."""
    from soli.checkpoint.manifest import _seal

    def forged(name: str, old: str, new: str) -> str:
        save(tmp_path / name, simple(), {})
        file = tmp_path / name / "manifest.json"
        body = json.loads(file.read_text().replace(old, new))
        body.pop("seal")
        file.write_text(json.dumps(body | {"seal": _seal(body)}))
        return "\n".join(str(problem) for problem in check(tmp_path / name))

    assert "is not what the manifest says" in forged("dtype", '"bfloat16"', '"float16"')
    assert "do not cover" in forged("cover", '"sizes": [40, 30]', '"sizes": [39, 30]')
    assert "leaves the tensor" in forged("out", '"offsets": [0, 0]', '"offsets": [1, 0]')
    assert "rank-00000" in forged("path", '"rank-00000.safetensors"', '"../rank-00000.safetensors"')
    twice = '"chunks": [{"offsets": [0], "sizes": [7], "file": "rank-00000.safetensors"}, '
    assert "two boxes overlap" in forged("twice", '"chunks": [{"offsets": [0]', twice + '{"offsets": [0]')


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_foreign_folders_are_recognised(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"a": torch.ones(2)}, tmp_path / "m.pt")
    for name, file in (("hf", "model.safetensors"), ("bin", "pytorch_model.bin"), ("empty", "")):
        (tmp_path / name).mkdir()
        if file.endswith(".safetensors"):
            save_file({"a": torch.ones(2)}, tmp_path / name / file)
        elif file:
            torch.save({"a": torch.ones(2)}, tmp_path / name / file)
    save(tmp_path / "run" / "100", simple(), {})
    save(tmp_path / "cut", simple(), {})
    (tmp_path / "cut" / "manifest.json").unlink()
    for name, words in {
        "cut": ["a soli checkpoint that is not whole", "it has no manifest.json", "copy the whole folder"],
        "dcp": ["torch.distributed.checkpoint", "pickle", "soli checkpoint import"],
        "m.pt": ["pickle", "soli checkpoint import"],
        "hf": ["Hugging Face", "soli checkpoint import"],
        "hf/model.safetensors": ["safetensors file", "soli checkpoint import"],
        "bin": ["pickles", "pytorch_model.bin", "soli checkpoint import"],
        "empty": ["no manifest.json", "empty folder"],
        "run": ["folder of checkpoints", "100"],
        "run/200": ["no checkpoint at", "100"],
    }.items():
        for call in (read_manifest, lambda path: load(path, simple())):
            text = message(call, tmp_path / name)
            assert all(word in text for word in words), text
        assert len(check(tmp_path / name)) == 1
    assert "not a checkpoint, so it is not replaced" in message(save, tmp_path / "hf", simple(), {}, overwrite=True)
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_a_full_disk_is_an_error_that_leaves_nothing(small_disk: Path) -> None:
    save(small_disk / "1", simple(), {"step": 1})
    big = {"model.big": from_whole(torch.zeros(100_000))}
    for call in (save, lambda *args: save_async(*args).wait()):
        with pytest.raises(SoliError) as caught:
            call(small_disk / "2", big, {"step": 2})
        assert "No space left on device" in str(caught.value)
        assert "400,000 bytes" in str(caught.value)
        assert "free some space" in str(caught.value)
        assert caught.value.exit_code == 2
        assert [entry.name for entry in small_disk.iterdir()] == ["1"]
    assert latest(small_disk) == small_disk / "1"
    assert check(small_disk / "1") == []
    full = small_disk / "filler"
    with pytest.raises(OSError, match="No space"):
        full.write_bytes(bytes(1 << 20))
    assert "No space left" in message(save, small_disk / "3", {}, {"step": 3}), "the manifest alone does not fit"
    assert sorted(entry.name for entry in small_disk.iterdir()) == ["1", "filler"]


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = message(save, tmp_path / "file" / "100", simple(), {})
    assert "the operating system refused" in text
    assert "File name too long" in message(save, tmp_path / ("x" * 300), simple(), {})
    save(tmp_path / "c", simple(), {"step": 1})
    assert "exists" in message(save, tmp_path / "c", simple(), {"step": 2})
    assert "exists" in message(save_async, tmp_path / "c", simple(), {"step": 2})
    assert read_manifest(tmp_path / "c").state == {"step": 1}
    save(tmp_path / "c", simple(), {"step": 2}, overwrite=True)
    assert read_manifest(tmp_path / "c").state == {"step": 2}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "file"]


def test_a_path_that_is_a_link_stays_one(tmp_path: Path) -> None:
    """`last`, say: what it leads to is replaced, as often as one likes."""
    save(tmp_path / "disk", simple(), {"step": 1})
    (tmp_path / "last").symlink_to(tmp_path / "disk")
    for step in (2, 3):
        save(tmp_path / "last", simple(), {"step": step}, overwrite=True)
        for name in ("last", "disk"):
            assert load(tmp_path / name, simple())["step"] == step
    assert (tmp_path / "last").is_symlink()
    (tmp_path / "disk").rename(tmp_path / ".disk.replaced-0123456789ab")  # where a save ended before it put the new one there
    assert load(tmp_path / "last", simple())["step"] == read_manifest(tmp_path / "last").state["step"] == 3
    (tmp_path / ".disk.replaced-0123456789ab").rename(tmp_path / "disk")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["disk", "last"]


def test_state_must_be_json_and_every_culprit_is_named(tmp_path: Path) -> None:
    state = {"a": {"b": [1, torch.ones(1)]}, "c": float("nan"), "d": {3: 1}, "e": {1, 2}, "f": [0.1, "é", None]}
    text = message(save, tmp_path / "c", simple(), state)
    for part in ("state['a']['b'][1] is not JSON", "state['c'] is not JSON", "state['d']: a key", "state['e']"):
        assert part in text
    assert "state['f']" not in text
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "c", simple(), {"f": state["f"], "big": 2**80, "tiny": 5e-324})
    assert load(tmp_path / "c", simple()) == {"f": [0.1, "é", None], "big": 2**80, "tiny": 5e-324}


def test_pieces_must_be_what_their_boxes_say(tmp_path: Path) -> None:
    box = Box((0,), (4,))
    for sharded, words in (
        (Sharded((4,), torch.float32, [(box, torch.zeros(3))]), "not what its box says"),
        (Sharded((4,), torch.float32, [(box, torch.zeros(4).half())]), "not what its box says"),
        (Sharded((4,), torch.float32, [(box, torch.zeros(4, device="meta"))]), "not what its box says"),
        (Sharded((3,), torch.float32, [(box, torch.zeros(4))]), "leaves the tensor"),
        (Sharded((4,), torch.float32, [(box, torch.zeros(4))] * 2), "given twice"),
        (Sharded((4,), torch.float32, []), "do not cover"),
        (from_whole(torch.zeros(2, dtype=torch.complex32)), "cannot be stored"),
    ):
        assert words in message(save, tmp_path / "c", {"model.x": sharded}, {})
    assert list(tmp_path.iterdir()) == []


def test_saving_in_the_background_equals_saving(tmp_path: Path) -> None:
    save(tmp_path / "sync", simple(), {"step": 1})
    live, state = simple(), {"step": 1}
    first = save_async(tmp_path / "async", live, state)
    for sharded in live.values():
        sharded.pieces[0][1].zero_()
    state["step"] = 99
    first.wait()
    assert first.done()
    one, other = read_manifest(tmp_path / "sync"), read_manifest(tmp_path / "async")
    assert (one.tensors, one.files, one.state) == (other.tensors, other.files, other.state)
    second = save_async(tmp_path / "two", simple(), {"step": 2})
    (tmp_path / "file").touch()
    third = save_async(tmp_path / "file" / "three", simple(), {"step": 3})
    assert second.done()
    with pytest.raises(SoliError, match="refused"):
        save_async(tmp_path / "four", simple(), {})  # nobody waited for the third, so it is told here
    with pytest.raises(SoliError, match="refused"):
        third.wait()


def test_latest_goes_by_step_then_by_time(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "none") is None
    save(tmp_path / "z", {}, {})
    time.sleep(0.01)
    save(tmp_path / "a", {}, {})
    (tmp_path / "zz").mkdir()
    assert latest(tmp_path) == tmp_path / "a"
    save(tmp_path / "step-10", {}, {"step": 10})
    save(tmp_path / "step-9", {}, {"step": 9})
    assert latest(tmp_path) == tmp_path / "step-10"
    (tmp_path / ".step-11.partial-0123456789ab").mkdir()
    (tmp_path / ".step-11.partial-0123456789ab" / "manifest.json").write_text("{}")
    assert latest(tmp_path) == tmp_path / "step-10"
    (tmp_path / "step-9" / "manifest.json").write_text("{}")
    assert "step-9" in message(latest, tmp_path), "an older one is not taken in silence"


def test_files_are_plain_safetensors_and_nothing_is_pickled(tmp_path: Path) -> None:
    save(tmp_path / "c", simple(), {})
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    held = headers(tmp_path / "c" / "rank-00000.safetensors")
    assert held == {
        "model.a@0,0": ((40, 30), torch.float32),
        "model.b@0": ((7,), torch.bfloat16),
        "optimizer.a.step@": ((), torch.float32),
    }
    json.loads((tmp_path / "c" / "manifest.json").read_text())

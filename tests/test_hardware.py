"""Devices and clusters: what is known, what a text or a file says, and what is said of those that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from soli.cli.main import app
from soli.core.errors import SoliError
from soli.planner.hardware.clusters import Cluster, read_cluster
from soli.planner.hardware.devices import NUMBERS, UNITS, devices, named
from soli.planner.hardware.networks import networks

WANTED = ["V100", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "B300", "GB200", "GB300", "MI300X", "cpu"]


def problems(text: str) -> list[str]:
    with pytest.raises(SoliError) as caught:
        read_cluster(text)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("name", WANTED)
def test_every_device_has_all_its_numbers(name: str) -> None:
    device = named(name)
    assert device is not None
    assert device.source
    assert all(getattr(device, key) > 0 for key in NUMBERS)
    assert set(device.tflops) & {"bf16", "fp16"}


def test_names_are_one_devices() -> None:
    words = [word for device in devices().values() for word in (device.name, *device.aliases)]
    assert len(words) == len(set(words))


def test_peaks_grow_as_types_get_shorter() -> None:
    """Each table of data sheets has been mistyped once."""
    order = ("fp32", "tf32", "fp16", "fp8", "fp4")
    for device in devices().values():
        peaks = [device.tflops[key] for key in order if key in device.tflops]
        assert peaks == sorted(peaks), device.name
        assert device.memory_gbs > device.link_gbs > device.net_gbits / 8, device.name


def test_texts() -> None:
    assert str(read_cluster("h100:8x64")) == "h100:8x64"
    assert read_cluster("H100:8x64").size == 512
    assert read_cluster("gb200").size == 72
    assert read_cluster("a100-80gb:4") == Cluster(read_cluster("a100:4").device, 1)
    assert read_cluster("cpu:2x4").size == 8


def test_a_file_says_what_is_different(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('like = "h100"\nnodes = 3\nnode = 4\nnet_gbits = 200.5\ntflops = { fp8 = 1500 }\n')
    found = read_cluster(str(file))
    assert (found.nodes, found.size, found.device.net_gbits) == (3, 12, 200.5)
    assert str(found) == f"h100:4x3 as {file} has it"
    assert found.device.tflops == {**devices()["h100"].tflops, "fp8": 1500}
    assert found.device.memory_gib == devices()["h100"].memory_gib


def test_a_file_describes_a_new_device(tmp_path: Path) -> None:
    file = tmp_path / "new.toml"
    numbers = "".join(f"{key} = {n}\n" for n, key in enumerate(NUMBERS, 1))
    file.write_text(f'name = "tpu"\ntflops = {{ bf16 = 100 }}\n{numbers}')
    found = read_cluster(str(file))
    assert (found.device.name, found.nodes, found.device.memory_gib) == ("tpu", 1, 1 + NUMBERS.index("memory_gib"))


def test_what_joins_devices(tmp_path: Path) -> None:
    """Named networks take the place of the device's usual ones; what servers share is divided among their devices."""
    usual, efa, slow = (read_cluster(text) for text in ("h100:8x4", "h100:8x4@efa-v2", "h100:4x4@ethernet-100, pcie5"))
    assert (efa.device.net_gbits, efa.device.net_us, efa.device.link_gbs) == (400, 15, usual.device.link_gbs)
    assert (slow.device.net_gbits, slow.device.link_gbs, slow.device.node) == (25, 50, 4)
    assert str(efa) == "h100:8x4@efa-v2"
    for name, said in networks().items():
        assert len(said) == 2, name
        assert {"link_gbs", "link_us"} == set(said) or "net_us" in said, name
    file = tmp_path / "ours.toml"
    file.write_text('like = "a100"\nnodes = 2\nnetwork = "ethernet-25"\n')
    assert read_cluster(str(file)).device.net_gbits == 25 / 8
    file.write_text('like = "a100"\nnodes = 2\nnetwork = "ethernet-25"\nnet_gbits = 7\n')
    assert (read_cluster(str(file)).device.net_gbits, read_cluster(str(file)).device.net_us) == (7, 40)
    (said,) = problems("h100:8@efa")
    assert "no network 'efa' is known" in said
    assert "efa-v1" in said
    assert len(problems("h10:0x0@nothing")) == 3
    file.write_text('like = "a100"\nnetwork = 3\n')
    assert "is text" in problems(str(file))[0]


def test_an_unknown_device_and_its_nearest() -> None:
    (said,) = problems("h10:8")
    assert "no device 'h10'" in said
    assert "h100" in said
    assert 'like = "' in said
    (said,) = problems("wombly")
    assert "v100, " in said
    assert "mi300x" in said


def test_devices_of_a_server_may_stand_in_front() -> None:
    for text in ("8xH100", "8x h100", "8 x H100@efa-v2"):
        assert str(read_cluster(text)).startswith("h100:8x1"), text


@pytest.mark.parametrize(
    ("said", "name"), [("RTX 4080 SUPER", "rtx-4080-super"), ("GeForce RTX 4070 Ti", "rtx-4070-ti"), ("RTX5080", "rtx-5080"), ("3070", "rtx-3070")]
)
def test_cards_by_the_names_that_people_write(said: str, name: str) -> None:
    found = named(said)
    assert found is not None
    assert found.name == name


def test_an_unknown_network_says_what_was_given() -> None:
    with pytest.raises(SoliError) as refused:
        read_cluster("h100:8x2@ethernet-40")
    assert refused.value.problems[0].got == "ethernet-40"


@pytest.mark.parametrize("text", ["", "h100:", "h100:8x", "h100:8x4x2", "h100:x4", "h100:-8"])
def test_what_is_no_cluster(text: str) -> None:
    (said,) = problems(text)
    assert "h100:8x64" in said


def test_a_cluster_of_more_devices_than_there_are_is_refused(tmp_path: Path) -> None:
    """Before a search looks for the divisors of their number, which took without end."""
    for text in ("h100:99999999999x99999999999", "h100:8x125001", "1000001xh100"):
        assert "no cluster has so many devices" in problems(text)[0]
    file = tmp_path / "vast.toml"
    file.write_text('like = "h100"\nnodes = 1000000000\n')
    assert "1000000000 servers of 8" in problems(str(file))[0]
    assert "how many servers" in problems(f"h100:{'9' * 5000}")[0]
    assert read_cluster("h100:8x125000").size == 1_000_000


def test_numbers_of_another_unit_are_refused(tmp_path: Path) -> None:
    """All that is known is at least three times inside of what can be."""
    file = tmp_path / "units.toml"
    for line, said in (
        ("tflops = { fp32 = 60, bf16 = 9.895e14 }", "'tflops.bf16' of"), ("memory_gib = 85899345920", "is in GiB"), ("memory_gbs = 3350e9", "is in GB/s, and no device has so many"),
        ("link_gbs = 450000", "link_gbs"), ("net_gbits = 4e11", "Gbit/s"), ("net_us = 5e-6", "is in microseconds, and no device has so few"), ("link_us = 5e6", "link_us"), ("host_gbs = 64e9", "host_gbs"),
    ):  # fmt: skip
        file.write_text(f'like = "h100"\n{line}\n')
        (found,) = problems(str(file))
        assert said in found
    for device in devices().values():
        for key, (least, most, _) in UNITS.items():
            for value in device.tflops.values() if key == "tflops" else (getattr(device, key),):
                assert 3 * least <= value <= most / 3, (device.name, key)


def test_all_problems_at_once(tmp_path: Path) -> None:
    assert len(problems("h10:0x0")) == 3
    file = tmp_path / "wrong.toml"
    file.write_text('like = "h101"\nnode = 2.5\nnodes = 0\nmemory = 80\nlink_us = "fast"\ntflops = { int3 = 4 }\n')
    said = problems(str(file))
    assert len(said) == 6
    assert any("did you mean 'memory_" in line for line in said)
    file.write_text('name = "mine"\nnodes = 2\n')
    (line,) = problems(str(file))
    assert "leaves out tflops, memory_gib" in line
    file.write_text("nodes =")
    assert "not TOML" in problems(str(file))[0]
    assert "cannot be read" in problems(str(tmp_path / "none.toml"))[0]


def test_the_command() -> None:
    run = CliRunner()
    table = run.invoke(app, ["hardware"])
    assert table.exit_code == 0
    assert all(name in table.output for name in devices())
    said = json.loads(run.invoke(app, ["hardware", "h100:8x64", "--json"]).output)
    assert (said["nodes"], said["devices"], said["device"]["name"]) == (64, 512, "h100")
    assert "64 servers of 8, 512 devices" in run.invoke(app, ["hardware", "h100:8x64"]).output

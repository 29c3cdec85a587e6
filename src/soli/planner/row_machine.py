"""The devices of a row, what joins them, and in which type they multiply."""

import re
from collections.abc import Mapping
from dataclasses import replace

from soli.core.errors import SoliError
from soli.planner.cells import SILENT, text, true
from soli.planner.columns import SYSTEMS
from soli.planner.cost.programs import SAID
from soli.planner.hardware import interconnect
from soli.planner.hardware.clusters import read_cluster, unknown
from soli.planner.hardware.devices import Device
from soli.planner.hardware.networks import networks
from soli.planner.row import Row, Said
from soli.planner.spellings import device, mentioned, precision, switch

TOLD = ("model", "recipe", "notes", "source", "interconnect", "framework", "test_case", "env")
"""Cells that may name a device where no column does."""

COUNT = re.compile(r"^(\d+)(?:\s*[x×]\s*(?=[a-z]|\d{4})|\s+(?=[a-z]))|(?<=[\d\s])[x×]\s*(\d+)$", re.I)
"""How many devices a cell counts; a slot's lanes and an RTX's number are none."""
SERVER = re.compile(r"dgx|hgx|node|server|\bper\b|pci-?e[\w .]*x", re.I)
"""Cells that count a server's devices, or a slot's lanes."""


INSTANCE = re.compile(r"\.\d*x?large|\.metal")
"""A cloud's name of a server, which says its network too."""
LEAST = 0.4
"""Of a known device's memory what a cell may say that one has less of: half of it is another device, or a part of one."""


def machine_named(row: dict[str, str]) -> dict[str, str]:
    """A row that says its device where it says its server: "p5.48xlarge", "DGX H100"."""
    named = (cell for name in SYSTEMS if device(cell := text(row, name))[0])
    return row if text(row, "gpu") else row | {"gpu": next(named, "")}


def device_of(row: Mapping[str, str], found: Row) -> Device | None:
    said = text(row, "gpu")
    if not said:
        elsewhere = mentioned(*(text(row, name) for name in TOLD))
        if elsewhere is None:
            found.refused.append("it names no gpu")
        else:
            found.inferred.append(f"gpu={elsewhere.name}")
        return elsewhere
    if said.endswith(".toml"):
        try:
            return read_cluster(said).device
        except SoliError as error:
            found.refused += [f"{problem.what}: {problem.got}" for problem in error.problems]
            return None
    one, size = device(said)
    several = {(other.name.split("-")[0], other.generation) for part in re.split(r"[+/,;&|]|\b(?:and|or)\b", said) if (other := device(part)[0])}
    if len(several) > 1:
        found.refused.append(f"gpu: '{said}' names {' and '.join(sorted(name for name, _ in several))}: a row is of devices of one kind")
        return None
    if one is None:
        problem = unknown(said, "and write its name, mine.toml, into gpu")
        found.refused.append(f"{problem.what}; {problem.allowed}; {problem.fix}")
        return None
    odd = [form for form in ("pcie", "nvl", "ti", "super", "laptop") if form in re.split(r"[\s_-]", said.lower()) and form not in one.name]
    sold = any(name.endswith(f"-{size:g}gb") for name in one.aliases)  # a Grace Hopper's name counts its CPU's memory
    share = 1.0 if sold or not size else size / one.memory_gib
    if odd or share > 1.15 or share < LEAST:
        found.refused.append(f"no device '{said}' is known; {one.name} has {one.memory_gib:g} GiB, as SXM or as sold")
        return None
    if share < 0.85:
        # Made for one machine, with fewer stacks of memory: Leonardo's A100 of 64 GB has 1.64 TB/s of 2.04.
        found.inferred.append(f"gpu={one.name} with {size:g} of its {one.memory_gib:g} GiB")
        return replace(one, memory_gib=size, memory_gbs=one.memory_gbs * share)
    return one


def counted(row: Mapping[str, str], said: Said, found: Row) -> None:
    """Takes the devices that a cell counts ("4x RTX 4090") for all that there are, where nothing else says how many."""
    cell = text(row, "gpu")
    count = COUNT.search(cell)
    model = (said["tp"] or 1.0) * (said["pp"] or 1.0) * (said["cp"] or said["ulysses"] or 1.0)
    others = any(said[name] for name in ("gpus", "nodes", "per_node", "dp"))
    if count and not others and not interconnect.server(cell) and not SERVER.search(cell):
        gpus = float(count[1] or count[2])
        if gpus and gpus % model == 0:
            said["gpus"] = gpus
            found.inferred.append(f"{gpus:g} gpus of '{cell}'")


def network_of(row: Mapping[str, str], said: Said, device: Device, found: Row) -> dict[str, float]:
    """What a row says of servers and of what joins them, where it differs from the device's usual one."""
    cell, gpu = text(row, "interconnect"), text(row, "gpu")
    # "2 nodes, 25 Gbit/s Ethernet"
    told = re.match(r"([1-9]\d*) (?:nodes?|servers?|machines)\b(?! *(?:per|of|with|in|a)\b)", cell)
    nodes = said["nodes"] or 0.0
    if told and said["gpus"] and said["gpus"] % float(told[1]) == 0 and not interconnect.server(f"{cell} {gpu}"):
        nodes = nodes or float(told[1])
    per_node = said["per_node"] or (said["gpus"] / nodes if said["gpus"] and nodes else None)
    node = interconnect.server(f"{cell} {gpu}") or device.node
    if per_node and device.node <= 16:  # servers of a rack that is one domain of NVLink say nothing
        node = max(int(per_node), 1)
    beside = gpu if INSTANCE.search(gpu) or gpu.lower() in networks() else ";".join(re.findall(r"\((.*)\)", gpu))
    device, odd = interconnect.joined(replace(device, node=node), cell, beside)
    found.inferred += odd
    return {
        "node": float(node), "net": device.net_gbits * 1e9 / 8, "net_latency": device.net_us * 1e-6,
        "link": device.link_gbs * 1e9, "link_latency": device.link_us * 1e-6,
    }  # fmt: skip


def precision_of(row: Mapping[str, str], device: Device, found: Row, frozen: bool) -> str:
    """Of linear products, which beside frozen weights of few bits is not theirs; empty where the device has it not, which refuses the row."""
    said = text(row, "precision") or next((name for name in ("fp16", "bf16") if true(row, name)), "")
    eight = text(row, "fp8")  # products of 8 bits beside what is kept in 16: NeMo's and Megatron-LM's `fp8: hybrid`
    if not SILENT.fullmatch(eight) and switch(eight) is not False and "fp4" not in said.lower():
        said = "fp8"
    rest = re.sub("|".join([*SAID["narrow"], *SAID["narrowed"]]), "mixed", said.lower()) if frozen else said.lower()
    name = precision(rest)
    if not name and (SILENT.fullmatch(said) or re.search("mixed|amp|^(true|yes|on|o[12])$", rest)):
        name = precision(re.sub(r"[_-]", " ", text(row, "model")))
        name = name or ("bf16" if "bf16" in device.tflops else "fp16")
        found.inferred.append(f"precision={name}")
    if name in device.tflops:
        return name
    found.refused.append(f"{device.name} multiplies no {name or said} (it has {', '.join(device.tflops)})")
    return ""

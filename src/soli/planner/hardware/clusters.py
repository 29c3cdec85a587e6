"""What a plan is made for: so many devices of one kind, in servers, as `h100:8x64` or as a TOML file says it.

    h100:8x64    64 servers of 8          h100:4    one server of 4          h100    one server as it is sold
    8xH100       one server of 8
    h100:8x64@efa-v2, a100:4@pcie4        what joins them, where it is not the usual (networks.toml)

A file starts from a known device and says what is different, or describes a new one whole:

    like = "h100"          # or "name" and every field of hardware/devices.toml
    nodes = 64
    network = "efa-v2"     # or several: "ib-hdr,nvlink3"
    net_gbits = 200        # a field of hardware/devices.toml
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from soli.core import tables
from soli.core.errors import Problem, SoliError, nearest, raise_all
from soli.planner.hardware.devices import NUMBERS, PRECISIONS, UNITS, Device, devices, named, names
from soli.planner.hardware.networks import joined, networks

SHORT = re.compile(r"([^:@]+?)(?::(\d{1,99})(?:x(\d{1,99}))?)?(?:@(.+))?")
COUNTED = re.compile(r"^(\d+)\s*x\s*([a-z][^:@]*)", re.I)
"""A server's devices in front: 8xH100."""
WORDS = ("like", "name", "source", "generation", "nodes", "network", "tflops", *NUMBERS)
DESCRIBE = 'describe it in a file, {}: like = "{}", and the fields that differ (soli hardware --help)'
LARGEST = 1_000_000
"""Devices: more than anybody has; a search among the divisors of any number would not end."""


@dataclass(frozen=True)
class Cluster:
    """`nodes` servers, each with `device.node` devices."""

    device: Device
    nodes: int = 1
    network: str = ""

    @property
    def size(self) -> int:
        """All devices."""
        return self.nodes * self.device.node

    def __str__(self) -> str:
        file = f" as {self.device.source} has it" * self.device.source.endswith(".toml")
        return f"{self.device.name}:{self.device.node}x{self.nodes}" + f"@{self.network}" * bool(self.network) + file


def read_cluster(text: str) -> Cluster:
    """A cluster of its short text, or of a file that ends in .toml. SoliError with every problem."""
    if text.endswith(".toml"):
        return _of_file(Path(text))
    found = SHORT.fullmatch(COUNTED.sub(r"\2:\1", text.strip()))
    if found is None:
        allowed = "h100, h100:8, h100:8x64, h100:8x64@ib-hdr, or a file that ends in .toml"
        raise SoliError("a cluster is a device, and how many a server and how many servers", got=text, allowed=allowed)
    name, per_node, nodes, network = found.groups(default="")
    device, problems, network = named(name), [], network or name.strip().lower() * (name.strip().lower() in networks())
    if device is None:
        problems.append(unknown(name))
    else:
        device, problems = joined(replace(device, node=int(per_node or device.node) or device.node), network)
    for what, number in (("devices a server", per_node), ("servers", nodes)):
        if number and int(number) == 0:
            problems.append(Problem(f"a cluster of no {what}", got=text, allowed="1, 2, 3, ..."))
    raise_all(problems + _vast(int(per_node or 1), int(nodes or 1)))
    assert device is not None
    return Cluster(device, int(nodes or 1), network)


def _vast(node: int, nodes: int) -> list[Problem]:
    """What to say of more devices than a cluster has."""
    said = Problem("no cluster has so many devices", f"{nodes} servers of {node}", f"{LARGEST:,} devices at most")
    return [said] * (node * nodes > LARGEST)


def unknown(name: str, given: str = "--cluster mine.toml") -> Problem:
    """What to say of a device that the table has not. `given`: how a file is, that describes one."""
    near = difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.3)
    known = dict.fromkeys(names()[word].name for word in near)
    allowed = "the nearest are " + ", ".join(known) if known else ", ".join(devices())
    fix = DESCRIBE.format(given, next(iter(known), "h100"))
    return Problem(f"no device '{name}' is known", got=name, allowed=allowed, fix=fix)


def _of_file(path: Path) -> Cluster:
    said, _ = tables.read(path, "the file of the cluster")
    odd, known = [key for key in said if key not in WORDS], ", ".join(WORDS)
    problems = [Problem(f"{path} says '{k}', which no cluster has", "", known, nearest(k, WORDS)) for k in odd]
    problems += [problem for key, value in said.items() if (problem := _unfit(path, key, value))]
    base = named(said["like"]) if isinstance(said.get("like"), str) else None
    if "like" in said and base is None:
        problems.append(unknown(str(said["like"])))
    if needed := [key for key in ("name", "tflops", *NUMBERS) if "like" not in said and key not in said]:
        fix = 'say them, or start from a known device with like = "h100"'
        problems.append(Problem(f"{path} describes a device and leaves out {', '.join(needed)}", fix=fix))
    raise_all(problems)
    usual: dict[str, Any] = asdict(base) if base else {"generation": "unknown", "tflops": {}}
    own = {key: value for key, value in said.items() if key not in ("like", "nodes", "network")}
    tflops, network = {**usual["tflops"], **said.get("tflops", {})}, said.get("network", "")
    device, problems = joined(Device(**{**usual, **own, "tflops": tflops, "source": str(path)}), network)
    raise_all(problems + _vast(device.node, said.get("nodes", 1)))
    # which count beside a network's name
    numbers = {key: value for key, value in own.items() if key in NUMBERS}
    return Cluster(replace(device, **numbers), said.get("nodes", 1), network)


def _unfit(path: Path, key: str, value: Any) -> Problem | None:
    """What is wrong with the value of a known word."""
    if key in NUMBERS or key == "nodes":
        whole = key in ("nodes", "node", "units")
        if not _positive(value) or (whole and not isinstance(value, int)):
            wanted = "a whole number above 0" if whole else "a number above 0"
            return Problem(f"'{key}' of {path} cannot be", got=repr(value), allowed=wanted)
        return _odd(path, key, key, value)
    elif key == "tflops":
        fit = isinstance(value, Mapping) and value
        if not fit or any(k not in PRECISIONS or not _positive(v) for k, v in value.items()):
            allowed = "TFLOP/s above 0 by type, of " + ", ".join(PRECISIONS)
            return Problem(f"'tflops' of {path} cannot be read", got=repr(value), allowed=allowed)
        return next(filter(None, (_odd(path, key, f"tflops.{name}", one) for name, one in value.items())), None)
    elif key in WORDS and not isinstance(value, str):
        return Problem(f"'{key}' of {path} is text", got=repr(value))
    return None


def _odd(path: Path, key: str, name: str, value: float) -> Problem | None:
    """What is wrong with a number that no device has: it is in another unit."""
    least, most, unit = UNITS.get(key, (0, math.inf, ""))
    if least <= value <= most:
        return None
    what = f"'{name}' of {path} is in {unit}, and no device has so {'many' if value > most else 'few'}"
    return Problem(what, got=f"{value:g}", allowed=f"{least:g} to {most:g} {unit}")


def _positive(value: Any) -> bool:
    # nan is in no range
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15

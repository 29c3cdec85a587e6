"""What joins devices, as data: links inside a server, networks between servers. The table is networks.toml."""

import difflib
from dataclasses import replace
from functools import cache
from typing import Any

from soli.core.errors import Problem
from soli.core.tables import table
from soli.planner.hardware.devices import Device

SHARED = "server_gbits"


@cache
def networks() -> dict[str, dict[str, float]]:
    """The entries of networks.toml."""
    return table(__package__, "networks.toml")


def joined(device: Device, said: str) -> tuple[Device, list[Problem]]:
    """A device with these, "ib-hdr,nvlink3", in place of its usual link and network; and what is wrong with them."""
    problems = []
    for name in map(str.strip, said.split(",") if said else ()):
        found = networks().get(name.lower())
        if found is None:
            near = difflib.get_close_matches(name.lower(), networks(), n=3, cutoff=0.3)
            fix = "describe it in a file, --cluster mine.toml: net_gbits or link_gbs of a device"
            problems.append(Problem(f"no network '{name}' is known", said, ", ".join(near or networks()), fix))
            continue
        own: dict[str, Any] = {key: value for key, value in found.items() if key != SHARED}
        if SHARED in found:
            own["net_gbits"] = found[SHARED] / device.node
        device = replace(device, **own)
    return device, problems

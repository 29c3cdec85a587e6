"""`soli hardware`: the devices that are known, or what a cluster's text or file says."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from rich import box
from rich.console import Console
from rich.table import Column, Table
from typer import Argument

from soli.cli.options import AsJson
from soli.planner.hardware.clusters import read_cluster
from soli.planner.hardware.devices import Device, devices
from soli.planner.hardware.networks import SHARED, networks

COLUMNS = {
    "memory_gib": "GiB", "memory_gbs": "GB/s", "node": "node", "link_gbs": "link", "net_gbits": "net", "host_gbs": "host",
}  # fmt: skip
CAPTION = (
    "16 bit, 8 bit: dense peak, TFLOP/s. GiB, GB/s: memory. node: devices of a server. link, host: GB/s in one "
    "direction to the server's other devices and its memory. net: Gbit/s to other servers. All of one device."
)


def hardware(
    cluster: Annotated[
        str, Argument(help="Such as h100:8x64 or mine.toml. Without one: every device that is known.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """The devices that are known, or one cluster as it was understood.

    A cluster is DEVICE, DEVICE:PER_SERVER or DEVICE:PER_SERVERxSERVERS, with @NETWORK where it is not the usual one, or
    a TOML file: like = "h100" and what is different (nodes, network, node, tflops, memory_gib, memory_gbs, units, link_gbs, link_us, net_gbits, net_us, host_gbs).
    """
    if not cluster:
        known = list(devices().values())
        if as_json:
            print(json.dumps([asdict(device) for device in known], indent=2))
            return
        _show(known)
        _networks()
        return
    found = read_cluster(cluster)
    if as_json:
        said = {"nodes": found.nodes, "devices": found.size, "device": asdict(found.device)}
        print(json.dumps(said, indent=2))
        return
    _show([found.device])
    servers = "one server" if found.nodes == 1 else f"{found.nodes} servers"
    print(f"{found}: {servers} of {found.device.node}, {found.size} devices. Source: {found.device.source}")


def _networks() -> None:
    table = Table("network", box=box.SIMPLE, caption="--cluster DEVICE:8x64@NETWORK", caption_justify="left")
    for title in ("GB/s in a server", "Gbit/s a device", "Gbit/s a server", "us"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, said in networks().items():
        own = (said.get(key) for key in ("link_gbs", "net_gbits", SHARED))
        rates = (*own, said.get("link_us", said.get("net_us")))
        table.add_row(name, *("" if n is None else f"{n:g}" for n in rates))
    Console().print(table)


def _show(known: list[Device]) -> None:
    columns = [Column(title, justify="right", no_wrap=True) for title in ("16 bit", "8 bit", *COLUMNS.values())]
    table = Table("device", *columns, box=box.SIMPLE, caption=CAPTION, caption_justify="left")
    for device in known:
        peak = device.tflops.get("bf16", device.tflops.get("fp16"))
        numbers = (peak, device.tflops.get("fp8"), *(getattr(device, key) for key in COLUMNS))
        table.add_row(device.name, *("" if n is None else f"{n:g}" for n in numbers))
    Console().print(table)

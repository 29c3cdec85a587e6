"""`soli hardware`: the devices that are known, or what a cluster's text or file says."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from typer import Argument

from soli.cli.options import AsJson
from soli.cli.tables import show
from soli.planner.hardware.clusters import read_cluster
from soli.planner.hardware.devices import Device, devices
from soli.planner.hardware.networks import SHARED, networks

COLUMNS = {"memory_gib": "GiB", "memory_gbs": "GB/s", "node": "node", "link_gbs": "link", "net_gbits": "net", "host_gbs": "host"}  # fmt: skip
CAPTION = (
    "16 bit, 8 bit: dense peak, TFLOP/s. GiB, GB/s: memory. node: devices of a server. link, host: GB/s in one "
    "direction to the server's other devices and its memory. net: Gbit/s to other servers. All of one device."
)


def hardware(
    cluster: Annotated[str, Argument(help="Such as h100:8x64 or mine.toml. Without one: every device that is known.")] = "",
    as_json: AsJson = False,
) -> None:
    """The devices that are known, or one cluster as it was understood.

    A cluster is DEVICE, DEVICE:PER_SERVER or DEVICE:PER_SERVERxSERVERS, with @NETWORK where it is not the usual one, or
    a TOML file: like = "h100" and what is different (nodes, network, node, tflops, memory_gib, memory_gbs, units, link_gbs, link_us, net_gbits, net_us, host_gbs).
    """
    found = read_cluster(cluster) if cluster else None
    known = [found.device] if found else list(devices().values())
    if as_json:
        said = [asdict(device) for device in known]
        print(json.dumps({"nodes": found.nodes, "devices": found.size, "device": said[0]} if found else said, indent=2))
        return
    _show(known)
    if found is None:
        _networks()
        return
    servers = "one server" if found.nodes == 1 else f"{found.nodes} servers"
    print(f"{found}: {servers} of {found.device.node}, {found.size} devices. Source: {found.device.source}")


def _networks() -> None:
    titles = ("GB/s in a server", "Gbit/s a device", "Gbit/s a server", "us")
    rows = {name: (*map(said.get, ("link_gbs", "net_gbits", SHARED)), said.get("link_us", said.get("net_us"))) for name, said in networks().items()}
    _table("network", titles, rows, "--cluster DEVICE:8x64@NETWORK")


def _show(known: list[Device]) -> None:
    rows = {}
    for one in known:
        peak = one.tflops.get("bf16", one.tflops.get("fp16"))
        rows[one.name] = (peak, one.tflops.get("fp8"), *(getattr(one, key) for key in COLUMNS))
    _table("device", ("16 bit", "8 bit", *COLUMNS.values()), rows, CAPTION)


def _table(what: str, titles: Sequence[str], rows: Mapping[str, Sequence[Any]], caption: str) -> None:
    said = ([name, *("" if n is None else f"{n:g}" for n in numbers)] for name, numbers in rows.items())
    show([what], titles, said, caption=caption, caption_justify="left")

"""How people write what joins devices: "NVLink4 + 8x400Gb IB", "EFA 3.2Tbps", "HDR200", "PCIe only", "100 GbE".

A cell is read clause by clause. A rate between servers is of a server where the clause says so or counts adapters, of a
device where it says that; else of an adapter that each device of a server has, but for EFA, Ethernet and rates of a
device's whole server. What is guessed so, and what is not understood, is said.
"""

from __future__ import annotations

import re
from dataclasses import replace

from soli.planner.hardware.devices import Device
from soli.planner.hardware.networks import networks

NAMED = (
    ("ib-fdr", r"\bfdr"), ("ib-edr", r"\bedr|\dx ?edr"), ("ib-hdr", r"\bhdr|\dx ?hdr"), ("ib-ndr", r"\bndr|\dx ?ndr"), ("ib-xdr", r"\bxdr|\dx ?xdr"),
    ("slingshot-11", "slingshot"), ("efa-v1", r"\bp4de?\b"), ("efa-v3", r"\bp5en\b"), ("efa-v2", r"\bp5e?\b"),
)  # fmt: skip
"""Networks whose name says their rate."""
SIZES = (
    r"(\d+)[- ]GPUs? (?:nodes?|servers?|machines?|box|instances?|island)", r"NVL(\d+)", r"(\d+)/node",
    r"(?<!\w)(\d+)x? ?[\w-]*(?:GPUs?|SXM\d?|\d00s?) ?(?:an?|per|/) ?(?:node|server|machine)", r"NVLink\w* (\d+)-GPU",
)  # fmt: skip
RATE = re.compile(r"(\d+(?:\.\d+)?)[ -]?([TGtg])(?:(B/s|Bps)|b(?:its?)?(?:/s|ps|E|e)?|BE|)(?![A-Za-z])")
COUNT = re.compile(
    r"(?<![\w.])(\d{1,2}) ?(?:[x×*]|rails?|ports?|nics?|adapters?|hcas?)|[x×*] ?(\d{1,2})(?!\d| ?[GT])", re.I
)
BETWEEN = re.compile(
    r"\bib\b|infiniband|[efhnx]dr(?![a-z])|roce|rdma|ethernet|\d ?gbe|\befa|\bnics?\b|\bhcas?\b|omni-?path|\bopa\b|slingshot"
    r"|connectx|\bcx-?\d|inter-?(?:node|server)|between|network|\bper[ -](?:gpu|node|server|vm|host)|/ ?(?:gpu|node|server)|\bp[45]", re.I,
)  # fmt: skip
INSIDE = re.compile(r"nv-?link|nv-?switch|nvl\d|xgmi|infinity fabric|intra-?node|in(?:side)? (?:a |the |each )?(?:node|server)|pcie|pci-e", re.I)  # fmt: skip
OWN = re.compile(r"nv-?link|nv-?switch|xgmi", re.I)
DENIED = re.compile(r"\b(?:no|without|w/o|not)[ -](?:any )?[\w-]+", re.I)
SERVER = re.compile(
    r"(?:\b(?:per|a|each)[ -]|/ ?)(?:node|server|vm|host|machine|instance|box)|inter-node per node", re.I
)
DEVICE = re.compile(r"(?:\b(?:per|a|each)[ -]|/ ?)(?:gpu|device|accelerator|rank)", re.I)
SHARED = re.compile(r"\befa|ethernet|\d ?gbe|\bp[345]\w*\.|\bp[345]de?\b|\bT(?:b|B)?(?:ps|/s)", re.I)
WHERE = re.compile(
    r"not (?:stated|given|known)|unknown|one node|single node|dgx|hgx|selene|\beos\b|teton|fat.?tree|noise|host|^[\W\d]*$|stated|assumed",
    re.I,
)
"""Clauses that say nothing of a network, or name a usual one."""


def server(said: str) -> int:
    """Devices of a server; 0: not said."""
    sizes = [int(match[1]) for pattern in SIZES if (match := re.search(pattern, said, re.I))]
    return max(sizes[0], 1) if sizes else 16 if "dgx-2" in said.lower() else 0


def joined(device: Device, said: str, beside: str = "") -> tuple[Device, list[str]]:
    """A device as these words join it, and what of them is guessed or not understood. `beside`: words that are not all of networks."""
    odd, usual = [], device
    own = OWN.search(DENIED.sub(" ", said))
    said = re.sub(r"[;,] *(?=\d+ ?(?:x ?)?(?:rails?|ports?|nics?|adapters?|hcas?)\b)", " ", said, flags=re.I)
    for clause in filter(None, map(str.strip, re.split(r"[;,+&]|\band\b|\bwith\b", f"{said};{beside}"))):
        link = INSIDE.search(clause)
        rate, sure = _between(clause, usual)
        if rate and not (link and not BETWEEN.search(clause)):
            device = replace(device, net_gbits=rate, net_us=_latency(clause, usual.net_us))
            if not sure and abs(rate / usual.net_gbits - 1) > 0.01:
                odd.append(f"interconnect: '{clause}' as {rate:g} Gbit/s of a device")
        elif (link and "pci" in clause.lower()) or re.search(r"(?:no|without|w/o)[ -]nv-?link", clause, re.I):
            if not own and not re.search(r"\bto\b|host|cpu", clause, re.I):
                device = replace(device, link_gbs=min(_pcie(clause, usual), usual.link_gbs), link_us=10.0)
        elif link or clause in beside or server(clause) or WHERE.search(clause):
            device = replace(device, link_gbs=_link(clause, device))
        else:
            usually = BETWEEN.search(clause) and not DENIED.search(clause)
            taken = f"as the usual {usual.net_gbits:g} Gbit/s of a device" if usually else "is not counted"
            odd.append(f"interconnect: '{clause}' {taken}")
    return device, odd


def _between(clause: str, device: Device) -> tuple[float, bool]:
    """Gbit/s of a device to other servers, 0 where none is said; and whether nothing of it is guessed."""
    if DENIED.search(clause) and not RATE.search(clause):
        return 0.0, True
    named = next((networks()[name] for name, words in NAMED if re.search(words, clause, re.I)), {})
    rate = next((m for m in RATE.finditer(clause) if m[0][-1] not in "GgT" or BETWEEN.search(clause)), None)
    glued = re.search(r"[hn]dr[ -]?(\d{3})\b", clause, re.I)
    if rate:
        gbits = float(rate[1]) * (1e3 if rate[2] in "Tt" else 1.0) * (8.0 if rate[3] else 1.0)
    else:
        gbits = float(glued[1]) if glued else named.get("net_gbits", named.get("server_gbits", 0.0))
    count = COUNT.search(clause)
    if count and not DEVICE.search(clause):
        return gbits * float(count[1] or count[2]) / device.node, True
    if SERVER.search(clause) or DEVICE.search(clause):
        return gbits / (1.0 if DEVICE.search(clause) else device.node), True
    whole = SHARED.search(clause) or "server_gbits" in named or gbits == device.net_gbits * device.node
    if not whole and not BETWEEN.search(clause):
        whole = gbits != device.net_gbits
    return gbits / (device.node if whole else 1.0), False


def _latency(clause: str, usual: float) -> float:
    """Of one message between servers, where it is known to be another one."""
    slow = (("efa-v2", r"\befa|\bp[45]"), ("ethernet-100", r"ethernet|\d ?gbe"))
    return next((networks()[name]["net_us"] for name, words in slow if re.search(words, clause, re.I)), usual)


def _pcie(clause: str, device: Device) -> float:
    """GB/s of PCI Express of the generation that is said, or of the one that leads to the host."""
    generation = re.search(r"pci-?e(?:xpress)?[ -]?(?:gen)?[ -]?([345])", clause, re.I)
    return networks()[f"pcie{generation[1]}"]["link_gbs"] if generation else device.host_gbs


def _link(clause: str, device: Device) -> float:
    """GB/s inside a server in one direction: makers say the sum of both."""
    rate = RATE.search(clause) if OWN.search(clause) else None
    if rate is None or not rate[3]:
        return device.link_gbs
    one = float(rate[1]) * (1e3 if rate[2] in "Tt" else 1.0)
    return one if one == device.link_gbs or re.search("direction|one way", clause) else one / 2

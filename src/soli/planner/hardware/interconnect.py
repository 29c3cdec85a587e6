"""How people write what joins devices: "NVLink4 + 8x400Gb IB", "EFA 3.2Tbps", "HDR200", "PCIe only", "100 GbE".

A cell is read clause by clause. A rate between servers is of a server where the clause says so or counts adapters, of a
device where it says that; else of an adapter that each device of a server has, but for EFA, Ethernet and rates of a
device's whole server. What is guessed so, and what is not understood, is said.
"""

import re
from dataclasses import replace

from soli.core.tables import table
from soli.planner.hardware.devices import Device
from soli.planner.hardware.networks import networks

RATE = re.compile(r"(\d+(?:\.\d+)?)[ -]?([TGtg])(?:(B/s|Bps)|b(?:its?)?(?:/s|ps|E|e)?|BE|)(?![A-Za-z])")
RACK, TRAY = 16, 4
"""Above so many devices that NVLink joins they are a rack's, and a server, which has the adapters that are counted, is a tray of these (NVIDIA GB200 NVL72)."""
MOST = 4.0
"""How often the usual a device's rate can be: what is more is its server's."""
WORDS = table(__package__, "interconnect.toml")
DIGITS = {"one": "1", "two": "2", "four": "4", "eight": "8"}


def _has(name: str, clause: str) -> re.Match[str] | None:
    return re.search(WORDS[name], clause, re.I)


def _named(table: str, clause: str) -> dict[str, float]:
    """The network that a clause names, by its name here or as people write it."""
    if (own := clause.strip().lower()) in networks():
        return networks()[own]
    found = (name for name, words in WORDS[table].items() if re.search(words, clause, re.I))
    return networks().get(next(found, ""), {})


def server(said: str) -> int:
    """Devices of a server; 0: not said."""
    said = re.sub(r"(?<=\bof )(?:one|two|four|eight)\b|\bone(?= [\w-]+ (?:an?|per) (?:node|server|machine))", lambda word: DIGITS[word[0]], said)
    sizes = [int(match[1]) for pattern in WORDS["sizes"] if (match := re.search(pattern, said, re.I))]
    return max(sizes[0], 1) if sizes else 16 if "dgx-2" in said.lower() else 0


def joined(device: Device, said: str, beside: str = "") -> tuple[Device, list[str]]:
    """A device as these words join it, and what of them is guessed or not understood. `beside`: words that are not all of networks."""
    odd, usual = [], device
    own = _has("own", re.sub(WORDS["denied"], " ", said, flags=re.I))
    said = re.sub(WORDS["adapters"], " ", said, flags=re.I)
    for clause in filter(None, map(str.strip, re.split(r"[;,+&|]| / |\band\b|\bwith\b", f"{said};{beside}"))):
        link = _has("inside", clause)
        rate, sure = _between(clause, usual)
        if rate and not (link and not _has("between", clause)):
            device = replace(device, net_gbits=rate, net_us=_named("slow", clause).get("net_us", usual.net_us))
            if (not sure and abs(rate / usual.net_gbits - 1) > 0.01) or rate > 2 * usual.net_gbits:
                odd.append(f"interconnect: '{clause}' as {rate:g} Gbit/s of a device")
        elif (link and "pci" in clause.lower()) or _has("no_link", clause):
            if not own and not _has("host", clause):
                # of the generation that is said, or of the one that leads to the host
                rate = networks()[f"pcie{generation[1]}"]["link_gbs"] if (generation := _has("pcie", clause)) else usual.host_gbs
                device = replace(device, link_gbs=min(rate, usual.link_gbs), link_us=10.0)
        elif link or clause in beside or server(clause) or _has("nothing", clause):
            device = replace(device, link_gbs=_link(clause, device))
        else:
            usually = _has("between", clause) and not _has("denied", clause)
            taken = f"as the usual {usual.net_gbits:g} Gbit/s of a device" if usually else "is not counted"
            odd.append(f"interconnect: '{clause}' {taken}")
    return device, odd


def _between(clause: str, device: Device) -> tuple[float, bool]:
    """Gbit/s of a device to other servers, 0 where none is said; and whether nothing of it is guessed."""
    if _has("denied", clause) and not RATE.search(clause):
        return 0.0, True
    node = device.node if device.node <= RACK else TRAY
    clause, named = re.sub(WORDS["link_rate"], "", clause, flags=re.I), _named("named", clause)
    rate = next((m for m in RATE.finditer(clause) if m[0][-1] not in "GgT" or _has("between", clause)), None)
    glued = _has("glued", clause)
    if rate:
        gbits = float(rate[1]) * (1e3 if rate[2] in "Tt" else 1.0) * (8.0 if rate[3] else 1.0)
    else:
        gbits = float(glued[1]) if glued else named.get("net_gbits", named.get("server_gbits", 0.0))
    count = _has("count", clause)
    if count and not _has("device", clause):
        return gbits * float(count[1] or count[2]) / node, True
    if _has("server", clause) or _has("device", clause):
        return gbits / (1.0 if _has("device", clause) else node), True
    whole = _has("shared", clause) or "server_gbits" in named
    if not whole and not glued:
        unnamed = not _has("between", clause) and gbits != device.net_gbits
        whole = unnamed or gbits == device.net_gbits * node or gbits > MOST * device.net_gbits
    return gbits / (node if whole else 1.0), False


def _link(clause: str, device: Device) -> float:
    """GB/s inside a server in one direction: makers say the sum of both, or that of a server."""
    rate = RATE.search(clause) if _has("own", clause) else None
    if rate is None or not rate[3]:
        return device.link_gbs
    one = float(rate[1]) * (1e3 if rate[2] in "Tt" else 1.0)
    return min(one if one == device.link_gbs or _has("one_way", clause) else one / 2, device.link_gbs)

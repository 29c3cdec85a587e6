"""How people write what a row says in words: sharding, recomputation, types, programs, devices. A word that nobody knows is None."""

import re
from dataclasses import dataclass
from typing import Any, cast

from soli.core.tables import table
from soli.planner.cells import SILENT
from soli.planner.hardware import devices
from soli.planner.hardware.devices import Device

TABLES: dict[str, dict[str, Any]] = table(__package__, "spellings.toml")
OTHER, NANOTRON, FSDP, DEEPSPEED, PYTORCH = "other", "nanotron", "fsdp", "deepspeed", "pytorch"
DENIED = re.compile(r"\b(?:no|non|not|without|w/o)[\s_-]+(?:yet\s+)?[a-z]+(?:\.[a-z]+)*(?:[\s_-]?\d\b)?|\b[a-z_.]+\d?[\s=:]+(?:off|false|disabled)\b")
"""What is said not to be: "no offload", "fsdp off", "torch_compile=False"."""
STAGE = re.compile(r"(?<![a-z])(?:zero|stage|z)(?:[\s_=:-]*(?:dp|stage))?[\s_=:-]*([0-3])(?![\da-z])|^([0-3])$")

OTHERS = re.compile(r"(?<![a-z])(?:tp|pp|cp|ep|sp|[a-z]+[\s_-]parallel\w*)[\s=:]*\d+")
"""Degrees of other ways, beside which a number is not of those that share a state: "FSDP 8, CP 1"."""
GROUPED = re.compile(r"(?:shards?|shard\w+ (?:with)?in|size|groups? of|groups?)[\s=:]*(\d+)|(?:\S\s+|^\W*=\s*)(\d+)$")
"""How many share a state, of what is said behind a stage: "zero1=8", "zero1, sharded within 8 GPUs"."""

CLOUD = re.compile(r"\d+|[pg]\d[a-z]{0,2}")
"""Names of devices by a number alone, and of a cloud's servers, which elsewhere are of other things."""

WHOLE = re.compile(r"\bno_shard\b")
"""FSDP's word for what it does not share out, which is no denial of another word."""
TECHNIQUE = re.compile(r"^(?:ac\b|(?:use_)?remat(?:[\s_]?policy)?(?![a-z])|(?:(?:act|grad)[a-z]*[\s_-]*)?(?:checkpoint|ckpt|recomput)[a-z]*)[\s:=_,;(-]*")
"""A name of recomputation before what is said of it."""


def affirmed(said: str) -> str:
    """What is said, in lower case, without what is said not to be."""
    return DENIED.sub(" none ", said.lower())


def meant(table: str, said: str) -> Any:
    """What the first pattern of a table of spellings.toml that is there says; None where none is."""
    return next((value for pattern, value in TABLES[table].items() if re.search(pattern, said)), None)


@dataclass(frozen=True)
class Sharding:
    """`zero`: None where nothing is said. `group`: ranks that share a state; `replicate`: copies; 0: not said. `copied`: HSDP."""

    zero: float | None = None
    offload: bool = False
    copied: bool = False
    group: int = 0
    replicate: int = 0


def sharding(said: str) -> Sharding | None:
    """What is sharded, of words such as "zero1", "FULL_SHARD", "HSDP (replicate 4, shard 16)", "zero3 (no offload)"."""
    words = re.sub(r"^([0-3])\.0+$", r"\1", said.lower().strip(" \"'[]{}()"))
    if SILENT.fullmatch(words) and words != "none":
        return Sharding()
    plain = affirmed(words)
    stage = STAGE.search(plain)
    zero = float(stage[1] or stage[2]) if stage else (0.0 if WHOLE.search(words) else meant("sharding", plain))
    offload = bool(re.search(r"offload|infinity|nvme|(?:zero[\s_-]*[123]|fsdp\d?|gemini)[\s_+(-]*cpu", plain))
    if zero is None and not offload:
        return None
    pair = re.search(r"(\d+)\s*[x×]\s*(\d+)", plain)
    copies, size = (int(pair[1]), int(pair[2])) if pair else (0, 0)
    group = GROUPED.search(OTHERS.sub(";", STAGE.sub(" ", plain)))
    copied = bool(re.search(r"hybrid|hsdp|(?:full_shard|fsdp) ?\+ ?d?dp\b(?! ?att)", plain)) and zero != 0.0
    replicate = re.search(r"replicat\w*[\s=:]*(\d+)", plain)
    return Sharding(zero, offload, copied, size or (int(group[1] or group[2]) if group else 0), copies or (int(replicate[1]) if replicate else 0))  # fmt: skip


def recomputation(said: str) -> tuple[float, float, int] | None:
    """What is recomputed, the share of layers of which it is, and how many of a stage's where that is said: "full 5 of 48", "block, 4 layers"."""
    words = said.lower().strip(" \"'[]{}()")
    if re.fullmatch(r"0?\.\d+", words):  # as plans print it
        words = f"{100 * float(words):g}%"
    level = meant("recomputed", TECHNIQUE.sub("", words))
    level = meant("recomputed", words) if level is None else level
    if level is None:
        return None
    part = re.search(r"(\d+)\s*(?:of|/)\s*(\d+)", words)
    count = re.search(r"(\d+) ?layers|(?:block|layers)\D{0,3}(\d+)", words)
    share = min(float(part[1]) / max(float(part[2]), 1.0), 1.0) if part else 1.0
    if some := re.search(r"(\d+(?:\.\d+)?) ?%|every[ _-]?([1-9]\d*)|^(?:partial|half|some layers)", words):
        share = min(float(some[1]) / 100, 1.0) if some[1] else 1 / float(some[2] or 2)
    # Uniform recomputation counts the layers of a piece, and recomputes them all (Megatron-LM, recompute_num_layers).
    several = count and not part and "uniform" not in words and share == 1
    return level, share, int(count[1] or count[2]) if count and several else 0


def modules(said: str) -> list[str] | None:
    """Parts of a layer that a cell names for recomputation, and nothing else beside them; or all that a list of them has."""
    words, colon, column = said.lower().partition("selective:")
    names = re.findall(r"[a-z_]+", column or words)
    if not colon:
        names = [name for name in names if name not in ("selective", "recompute", "core", "only", "and")]
        return names if names and {*names} <= {*TABLES["parts"]} else None
    return [name for name in names if name != "none"]


def switch(said: str) -> bool | None:
    """Yes or no, whatever is said of it behind in parentheses."""
    return cast("bool | None", meant("switch", re.sub(r"\s*\(.*\)$", "", said.lower())))


def offloaded(said: str) -> list[str]:
    """What a cell says lies in the host's memory, part by part: "optimizer to CPU, parameters to CPU", "activations; optimizer: none"."""
    parts = (affirmed(part.strip()) for part in re.split(r"[+,;]|\band\b", said))
    return [part for part in parts if part and not re.search(r"[:= ](?:none|no|off|false)\b|\bon (?:the )?(?:gpu|device)|^none\b", part)]


def way(table: str, said: str) -> float | None:
    """Which of several ways a program goes, as cost/points.py numbers them; None where nobody counted it. "1F1B", "p2p", "a2a"."""
    found = meant(table, re.sub(r"[\s_()-]", "", said.lower()))
    return None if found is None or found < 0 else float(found)


def precision(said: str) -> str:
    """The narrowest type that is named, but for those that are said not to be; empty where none is."""
    words = re.sub(r"\(?\b(?:no|without) \w+\)?|\(?\w+ off\)?", " ", said.lower())
    return str(meant("types", words.replace("tfloat32", "tf32")) or "")


def program(framework: str, source: str) -> str:
    """Whose program ran: by its name, and by where a row is from where that is not said."""
    return str(meant("programs", (framework or source).lower()) or OTHER)


def device(said: str) -> tuple[Device | None, float]:
    """The device that words name, and the GB that they say it has (0: none): "8x NVIDIA A100-SXM4-40GB", "H100 80G HBM3", "DGX H100"."""
    said = re.sub(r"gpu-\d+g\b", "gpu", said.lower().strip())  # how many a cloud's server has
    words = re.sub(
        r"\(.*|\b(?:nvidia|tesla|amd|instinct|geforce|dgx|hgx)\b|\b\d+\s*[x×]\s*(?=[a-z]|\d{4})|^\s*\d+\s+(?=[a-z])|(?<=\d)\s*x\s*\d+$"
        r"|\b(?:aws|gcp|azure|ec2|ml)\b\.?|\.(?:\d*x?large|metal)\b",
        "",
        said,
    )
    words = re.sub(r"[\s_-]+", "-", words).strip("-")
    words = re.sub(r"-(?:sxm|hbm)\w*", "", words)
    size = re.search(r"(?<![a-z\d.])(\d+(?:\.\d+)?)\s*-?g(?:i?b)?(?![a-z/\d])", said)
    parts = words.split("-")
    tries = [words, words.removesuffix("s"), *("-".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))]
    if size:
        tries = [f"{parts[0]}-{size[1]}gb", *tries]
    tries = [f"{parts[0]}-{form}" for form in ("pcie", "nvl") if form in parts] + tries
    found = next((one for name in tries if (one := devices.named(name)) is not None), None)
    return found or mentioned(said), float(size[1]) if size else 0.0


def mentioned(*cells: str) -> Device | None:
    """The first known device that any of these names with a letter; None if none does."""
    words = re.sub(r"[\s_]", "-", " ; ".join(filter(None, cells)).lower())
    names = [name for name in devices.names() if not CLOUD.fullmatch(name) and name != "cpu"]
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    match = re.search(rf"(?<![a-z0-9])({pattern})(?![a-z0-9])", words)
    return devices.named(match[0]) if match else None

"""Accelerators as data: what each can at most. The table is devices.toml, one entry a device, each with its source."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache

from soli.core.tables import table

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
USABLE = 0.97
"""Of a device's memory what a program's tensors can have: of published runs that say what theirs took none has more (BigScience's 0.969 of an
A100, where CUDA's kernels are taken off). PyTorch finds 79.10 to 79.33 of 80 GiB (huggingface/trl#3436, torchtune#2071 and others that ran out
of memory), and 0.4 to 1.5 GiB of them are CUDA's and NCCL's."""


@dataclass(frozen=True)
class Device:
    """One accelerator in its usual server. Units are those of devices.toml, which explains each field."""

    name: str
    source: str
    generation: str
    tflops: Mapping[str, float]
    memory_gib: float
    memory_gbs: float
    units: int
    node: int
    link_gbs: float
    link_us: float
    net_gbits: float
    net_us: float
    host_gbs: float
    aliases: Sequence[str] = ()
    unthrottled: float = 1.0

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.memory_gib * 2**30

    @property
    def usable(self) -> float:
        """Bytes that tensors can take."""
        return USABLE * self.memory


NUMBERS = tuple(field.name for field in fields(Device) if field.type in (float, int) and field.default is MISSING)
"""The fields that are numbers above 0, and that a device must have."""
UNITS = {
    "tflops": (0.001, 1e5, "TFLOP/s"), "memory_gib": (0.1, 1e4, "GiB"), "memory_gbs": (1, 1e5, "GB/s"), "link_gbs": (0.001, 2e4, "GB/s"), "link_us": (0.01, 1e6, "microseconds"),
    "net_gbits": (0.001, 2e4, "Gbit/s"), "net_us": (0.01, 1e6, "microseconds"), "host_gbs": (0.001, 2e4, "GB/s"),
}  # fmt: skip
"""The least and the most of what a device can have, far beside all that are known (tests): a number outside is one of another unit."""


@cache
def devices() -> dict[str, Device]:
    """All that are known, by name, in the order of the table."""
    return {name: Device(name=name, **entry) for name, entry in table(__package__, "devices.toml").items()}


def named(name: str) -> Device | None:
    """The device of this name or alias, whatever the case; None if there is none."""
    return names().get(name.strip().lower().replace("_", "-").replace(" ", "-"))


@cache
def names() -> dict[str, Device]:
    """Every name and alias."""
    return {word: device for device in devices().values() for word in (device.name, *device.aliases)}

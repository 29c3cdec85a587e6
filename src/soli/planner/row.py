"""What one row of a table says: a point for the cost model, what was inferred where it is silent, and why it is refused."""

from dataclasses import dataclass, field

from soli.planner.hardware.devices import Device

Said = dict[str, float | None]
"""A row's numbers, by their names here (columns.toml)."""
RECOMPUTE, SIZE, DEVICES, GROUP, KERNEL, BY_EYE = ("recompute=", "microbatch=", "gpus=", "shard_group=", "attention=", "a time read by eye")


@dataclass
class Row:
    """What one row says. `point`: the fields of Points; empty where it is refused."""

    point: dict[str, float] = field(default_factory=dict)
    framework: str = ""
    device: Device | None = None  # None: it is refused
    inferred: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    time: float | None = None  # measured, seconds
    memory: float | None = None  # measured, bytes
    states: float | None = None  # of it what is there between steps
    timeless: bool = False  # it says not how large a step is
    plain: bool = False  # its program is PyTorch, with no library that is known
    grouped: bool = False  # states are shared out in groups, and it says not of how many
    fits: bool = True  # False: it is known to have run out of memory

    @property
    def generation(self) -> str:
        """The device's."""
        return self.device.generation if self.device else ""

    @property
    def unsaid(self) -> bool:
        """Whether it leaves out what is recomputed."""
        return any(word.startswith(RECOMPUTE) for word in self.inferred)

    @property
    def whole(self) -> bool:
        """Whether it says all that memory depends on: the kernel of attention goes with a framework and its devices."""
        return all(word.startswith(KERNEL) for word in self.inferred)

    @property
    def chosen(self) -> bool:
        """Whether it leaves out what was then chosen so that it fits."""
        return any(word.startswith((RECOMPUTE, SIZE, GROUP, "zero=")) for word in self.inferred)

    def assumed(self, said: Said, name: str, usual: float) -> float:
        """A number, or the usual one, which is said."""
        value = said[name]
        if value is None:
            self.inferred.append(f"{name}={usual:g}")
            return usual
        return value

"""What a lab is asked for, and the numbers that follow from it: bursts, frames, queues. No commands here."""

import argparse
import re
from dataclasses import dataclass

MTU = 1500
BURST_MS = 0.5
LEAST_BURST = 8192
QUEUE = 64 * 2**20  # bytes a shaper may hold: so much that nothing is dropped, whoever sends at once
UNITS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}
TCP_PAYLOAD = (MTU - 52) / (MTU + 14)
"""Of what a shaper counts, the part that is TCP's payload: it counts Ethernet's 14 bytes and no checksum."""


class LabError(Exception):
    """The lab cannot be built here, or cannot be what it was asked to be."""


@dataclass(frozen=True)
class Network:
    """`hosts` machines around one switch, each with `per_host` ranks and one link of its own.

    rate: Mbit/s of a host's link, in each direction; None: as fast as the kernel goes. latency: ms from one
    host to another, one way. Inside a host there is neither. slowest: the least rate that links are given later
    (lab.reshape); a connection keeps the frames that it began with.
    """

    hosts: int
    per_host: int = 1
    rate: float | None = None
    latency: float = 0.0
    slowest: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= 250 or self.per_host < 1:
            raise LabError(f"a lab has 1 to 250 hosts and at least 1 rank on each, not {self}")
        if self.rate is not None and self.rate < 1:
            raise LabError(f"the shapers hold 1 Mbit/s and more, not {self.rate:g} Mbit/s")
        if self.latency < 0:
            raise LabError(f"a latency is not negative: {self.latency:g} ms")
        if self.latency and self.rate is None:
            raise LabError("a latency needs a rate: the relay that delays frames has to know that it can keep up")

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.hosts * self.per_host

    @property
    def burst(self) -> int:
        """Bytes that pass a shaper at once after a pause.

        A shaper that wakes late makes it good only up to its burst, so this is long beside a late timer; and it
        is a gift to every first message, so it is no longer than that needs.
        """
        return burst(self.rate or 0.0)

    @property
    def largest_frame(self) -> int:
        """Bytes of the largest frame that TCP hands down: a shaper would cut one larger than its burst."""
        least = min((rate for rate in (self.rate, self.slowest) if rate is not None), default=None)
        return 65536 if least is None else min(65536, burst(least) // 2)

    @property
    def window(self) -> int:
        """Bytes that one TCP connection may have on its way: enough to fill the link, there and back."""
        return 4 * 2**20 + int(4 * (self.rate or 0.0) * 1e6 / 8 * 2 * self.latency / 1e3)

    def __str__(self) -> str:
        ranks = f"{self.hosts} hosts" + (f" of {self.per_host} ranks" if self.per_host > 1 else "")
        return f"{ranks}, {spell(self.rate)}, {self.latency:g} ms"


def burst(rate: float) -> int:
    """Bytes of BURST_MS at this rate, in Mbit/s."""
    return max(LEAST_BURST, int(rate * 1e6 / 8 * BURST_MS / 1e3))


def parse_rate(text: str) -> float | None:
    """Mbit/s of `100mbit`, `2.5gbit`; None of `none`."""
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"a rate is a number with kbit, mbit or gbit, or none; not {text}")
    return float(found.group(1)) * UNITS[found.group(2)]


def spell(rate: float | None) -> str:
    """`100mbit` of 100."""
    if rate is None:
        return "none"
    return f"{rate / 1e3:g}gbit" if rate >= 1e3 else f"{rate:g}mbit"

"""The bytes that this rank's host has sent and received over its link, as its kernel counts them."""

from pathlib import Path

COUNTS = Path("/sys/class/net/eth0/statistics")


def crossed() -> dict[str, int]:
    """Since the lab was made. TCP's frames have one header for up to 64 kB here, so this is nearly the payload."""
    return {name: int((COUNTS / f"{name}_bytes").read_text()) for name in ("tx", "rx")}

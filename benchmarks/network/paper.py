"""What every result of the lab says of its making, and how values are summed up. Imports no torch."""

import argparse
import contextlib
import resource
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from network import LabError, Network, spell

sys.path.append(str(Path(__file__).resolve().parents[1]))

import probe
import record

__all__ = ["RESULTS", "between", "head", "measured", "noise", "origin", "probe", "record", "spread", "watched"]
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def head() -> dict[str, object]:
    """record.head with the command as it is typed in the repository's root: no other folder of this machine."""
    program = Path(sys.argv[0]).resolve()
    words = [f"benchmarks/network/{program.name}", *map(within, sys.argv[1:])]
    return record.head() | {"command": shlex.join(["python", *words])}


def within(word: str) -> str:
    """A path below the repository's root relative to it, another path's last part, any other word as it is."""
    if not word.startswith("/"):
        return word
    path = Path(word)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


@contextlib.contextmanager
def watched(shares: list[dict[str, float]]) -> Iterator[None]:
    """Add what the host and other programs took of the cores while the block ran: probe.cpu_shares."""
    ticks, before = probe.cpu_ticks(), spent()
    try:
        yield
    finally:
        shares.append(probe.cpu_shares(ticks, probe.cpu_ticks(), spent() - before))


def measured(
    args: argparse.Namespace, result: dict, network_of: Callable[[float | None, float], Network],
    measure: Callable[[Network], dict], write: Callable[[], None], always: dict | None = None,
) -> None:  # fmt: skip
    """Measure a lab for each of the latencies and rates asked for, and write after each; LabError where not even the first can be.

    `always`: what the result of each lab has besides, one that could not be too.
    """
    shares: list[dict[str, float]] = []
    for latency in args.latencies:
        for rate in args.rates:
            if rate is None and latency:
                continue  # there is no such lab
            network = network_of(rate, latency)
            print(f"{network} ...", flush=True)
            about = (always or {}) | {"rate": spell(rate), "mbit": rate, "latency_ms": latency}
            try:
                with watched(shares):
                    result["labs"].append(about | measure(network))
            except LabError as error:
                if not result["labs"]:
                    raise
                print(f"  {error}", flush=True)
                result["labs"].append(about | {"error": str(error)})
            result["noise"] = noise(shares)
            write()


def spent() -> float:
    """CPU seconds of this process and of all those that it started and that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def noise(shares: list[dict[str, float]]) -> dict[str, float]:
    """How quiet the machine was: the means of `watched` over the labs."""
    return {k: round(statistics.fmean([s[k] for s in shares] or [0.0]), 4) for k in ("steal", "others")}


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def between(values: dict[str, float] | None, form: str = ".0f") -> str:
    """`median [min, max]` of a spread."""
    if values is None:
        return ""
    return f"{values['median']:{form}} [{values['min']:{form}}, {values['max']:{form}}]"


def origin(result: dict) -> list[str]:
    """The first lines of a page: when, how, where."""
    about = result["machine"]
    return [
        f"{result['date']}, `{result['command']}`",
        "",
        f"{about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}; "
        + ", ".join(f"{name} {number}" for name, number in result["versions"].items()) + ". "
        f"The host stole {result['noise']['steal']:.1%} of the cores' time, other programs (and the kernel's "
        f"networking where it ran in none of ours) took {result['noise']['others']:.1%}.",
    ]  # fmt: skip

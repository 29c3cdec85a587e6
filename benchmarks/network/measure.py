"""Is the lab what it was asked to be? `python benchmarks/network/measure.py --rates 100mbit 1gbit --latencies 0 10`.

For every rate and latency: plain TCP (one way, both ways at once, two hosts to one, round trips), then calls of
torch.distributed. Writes results/network-lab.json and .md after every lab.
"""

import argparse
import statistics
import sys
from pathlib import Path

import paper
import stream
from lab import Lab, end_well, figures, lab, stopped
from launch import launch
from network import TCP_PAYLOAD, LabError, Network, parse_rate
from paper import record

RANK = Path(__file__).resolve().parent / "measure_rank.py"


def main() -> None:
    """Measure and write; LabError where not even the first lab can be."""
    end_well()
    args = arguments()
    result: dict = paper.head() | {
        "hosts": args.hosts, "repeat": args.repeat, "seconds": args.seconds, "noise": paper.noise([]), "labs": [],
    }  # fmt: skip
    paper.measured(
        args, result, lambda rate, latency: Network(args.hosts, rate=rate, latency=latency), lambda network: measure(network, args),
        lambda: record.write(result, markdown(result), args.out),
    )  # fmt: skip
    print(markdown(result))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", nargs="+", type=parse_rate, default=[100.0, 1000.0, 10000.0])
    parser.add_argument("--latencies", nargs="+", type=float, default=[0.0, 1.0, 10.0], help="ms, one way")
    parser.add_argument("--backends", nargs="*", choices=("gloo", "local"), default=["gloo", "local"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[2**16, 2**20, 2**23], help="bytes of a call")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each stream")
    parser.add_argument("--repeat", type=int, default=5, help="streams of each kind, calls of each size")
    parser.add_argument("--out", type=Path, default=paper.RESULTS / "network-lab", help="without a suffix")
    args = parser.parse_args()
    if args.hosts < 3 or args.repeat < 1:
        parser.error("two hosts that send to a third are 3 hosts; --repeat is at least 1")
    return args


def measure(network: Network, args: argparse.Namespace) -> dict:
    """One lab: streams, round trips, calls, and what the network says of itself afterwards."""
    with lab(network) as made:
        found: dict = {
            "mbit_of_payload": streams(made, args.seconds, args.repeat),
            "round_trip_ms": trips(made, args.repeat),
            "calls": {backend: calls(made, backend, args) for backend in args.backends},
            "network": figures(made),
        }
    if network.rate is not None:
        # TCP's payload against the most that TCP can have of the rate, its headers being counted by the shapers
        most = network.rate * TCP_PAYLOAD
        found["of_rate"] = {name: round(s["median"] / most, 4) for name, s in found["mbit_of_payload"].items()}
    return found


def streams(made: Lab, seconds: float, repeat: int) -> dict[str, dict[str, float]]:
    """Mbit/s of payload. A host's two directions do not share its rate; two senders to one host share its link."""
    a, b, c = (made.place(h) for h in range(3))
    kinds = {"one way": [(b, a)], "both ways, each": [(a, b), (b, a)], "two to one, sum": [(b, a), (c, a)]}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeat):
        for name, pairs in kinds.items():
            each = [found["mbit"] for found in stream.bandwidth(pairs, seconds)]
            rates[name].append(sum(each) if name.endswith("sum") else min(each))
    return {name: paper.spread(values) for name, values in rates.items()}


def trips(made: Lab, repeat: int) -> dict[str, float]:
    """Milliseconds of one byte there and back: the spread of `repeat` medians of 50."""
    return paper.spread(
        [statistics.median(stream.round_trips(made.place(1), made.place(0), 50)) for _ in range(repeat)]
    )


def calls(made: Lab, backend: str, args: argparse.Namespace) -> dict:
    """{call: {bytes: spread of ms of the slowest rank, bytes that the busiest host sent}}."""
    command = [
        str(RANK), "--backend", backend, "--times", str(args.repeat), "--sizes", *map(str, args.sizes),
    ]  # fmt: skip
    outcome = launch(made, command, 600.0)
    if outcome.error:
        return {"error": outcome.error}
    found: dict[str, dict] = {}
    for name, sizes in outcome.records[0].items():
        found[name] = {}
        for size in sizes:
            ranks = [r[name][size] for r in outcome.records]
            slowest = [1e3 * max(times) for times in zip(*(r["s"] for r in ranks), strict=True)]
            found[name][size] = {**paper.spread(slowest), "tx": max(r["tx"] for r in ranks)}
    return found


def markdown(result: dict) -> str:
    """The page: what was asked for beside what was there, then the calls."""
    lines = [
        "# The slow-network lab beside what it was asked to be",
        "",
        *paper.origin(result),
        f"{result['hosts']} hosts, one link each. Medians of {result['repeat']}, [min, max]. of rate: TCP's payload "
        f"over the {TCP_PAYLOAD:.1%} of the rate that its headers leave.",
        "",
        "| rate | latency ms | one way Mbit/s | of rate | both ways, of rate | two to one, of rate | round trip ms | dropped |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in result["labs"]:
        if "error" in one:
            lines.append(f"| {one['rate']} | {one['latency_ms']:g} | {one['error']} | | | | | |")
            continue
        ratios = [f"{value:.1%}" for value in one.get("of_rate", {}).values()] or [""] * 3
        lines.append(
            f"| {one['rate']} | {one['latency_ms']:g} | {paper.between(one['mbit_of_payload']['one way'])} | "
            + " | ".join(ratios)
            + f" | {paper.between(one['round_trip_ms'], '.2f')} | {one['network']['dropped']} |"
        )
    lines += ["", "## Calls of torch.distributed: ms of the slowest rank", ""]
    lines += ["wire: what the bytes that the busiest host sends in a call take at the rate.", ""]
    lines += ["| rate | latency ms | backend | call | bytes | ms | wire ms |", "|---|---:|---|---|---:|---:|---:|"]
    for one in result["labs"]:
        for backend, found in one.get("calls", {}).items():
            lines += call_lines(one, backend, found)
    return "\n".join(lines) + "\n"


def call_lines(one: dict, backend: str, found: dict) -> list[str]:
    """The rows of one backend in one lab."""
    where = f"| {one['rate']} | {one['latency_ms']:g} | {backend}"
    if "error" in found:
        return [f"{where} | {found['error'].replace('|', '/')} | | | |"]
    lines = []
    for name, sizes in found.items():
        for size, times in sizes.items():
            wire = "" if one["mbit"] is None else f"{times['tx'] * 8 / 1e3 / one['mbit']:.2f}"
            lines.append(f"{where} | {name} | {int(size):,} | {paper.between(times, '.2f')} | {wire} |")
    return lines


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(stopped("measure", error))

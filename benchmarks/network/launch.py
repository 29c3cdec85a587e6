"""Start one program on every rank of a lab, and end all of them with the first that fails.

`python benchmarks/network/launch.py --hosts 2 --per-host 2 --rate 1gbit --latency 0 PROGRAM [ARGUMENT ...]` runs a
program as it is and prints what its ranks print. Ranks lie host by host: rank r is on host r // per_host.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lab import LINK, Lab, end_well, lab, stopped
from network import LabError, Network, parse_rate

sys.path.append(str(Path(__file__).resolve().parents[1]))
from ranks import kill, wait

GRACE_S = 3.0  # what the others get after the first failure, to say why themselves
PORTS = itertools.count(29500)  # the store's, a fresh one a launch: namespaces have no other users


@dataclass
class Outcome:
    """What came of a launch. error: empty, or which rank failed first and why."""

    error: str = ""
    failed: int | None = None
    printed: list[str] = field(default_factory=list)
    records: list[dict] = field(default_factory=list)  # what each rank left in the file LAB_RECORD; {}: nothing
    seconds: float = 0.0


def environment(made: Lab, rank: int, folder: Path, extra: dict[str, str]) -> dict[str, str]:
    """A rank's variables: torchrun's, the link's, soli's, and the two files that belong to the lab."""
    network = made.network
    host, local = divmod(rank, network.per_host)
    return {
        **os.environ,
        "RANK": str(rank), "WORLD_SIZE": str(network.ranks),
        "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(network.per_host), "GROUP_RANK": str(host),
        "MASTER_ADDR": made.address(0), "GLOO_SOCKET_IFNAME": LINK,
        "SOLI_HOST": f"host{host}",  # namespaces share memory and processes, so soli would take them for one host
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or every rank says that the lab's addresses have no names
        "LAB_RECORD": str(folder / f"{rank}.json"), "LAB_MEETING": str(folder / "meeting"),
        **extra,
    }  # fmt: skip


def launch(
    made: Lab,
    program: list[str],
    deadline: float,
    extra: dict[str, str] | None = None,
    show: bool = False,
    watch: Callable[[Path], None] = lambda folder: None,
) -> Outcome:
    """`program` (a Python file and its arguments) on all ranks; at most `deadline` seconds.

    Never raises for what the ranks do; the Outcome says it. show: print as the ranks print, do not collect. watch:
    called every 50 ms with the folder where LAB_MEETING lies.
    """
    extra = {"MASTER_PORT": str(next(PORTS)), **(extra or {})}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{made.prefix}-") as scratch:
        folder, ranks = Path(scratch), []
        try:
            for rank in range(made.network.ranks):
                command = [*made.inside(rank // made.network.per_host), sys.executable, *program]
                # a session of its own a rank, so that what it starts dies with it
                with (folder / f"{rank}.log").open("wb") as log:
                    ranks.append(
                        subprocess.Popen(
                            command, env=environment(made, rank, folder, extra), stdin=subprocess.DEVNULL,
                            stdout=None if show else log, stderr=None if show else subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )  # fmt: skip

            def look() -> None:
                relay_runs(made)
                watch(folder)

            first, late = wait(ranks, start + deadline, GRACE_S, look)
        finally:
            kill(ranks)
        outcome = Outcome(failed=first, seconds=time.monotonic() - start)
        for rank in range(len(ranks)):
            record = folder / f"{rank}.json"
            outcome.records.append(json.loads(record.read_text()) if record.exists() else {})
            outcome.printed.append((folder / f"{rank}.log").read_text(errors="replace"))
        if first is not None:
            said = reason(outcome, first, ranks[first].returncode)
            outcome.error = f"rank {first}: {said}" + ("; it is printed above" if show else "")
        elif late:
            outcome.error = (
                f"killed after the deadline of {deadline:.0f} s; rank 0 printed last: {last(outcome.printed[0])}"
            )
    return outcome


def relay_runs(made: Lab) -> None:
    """LabError if the network itself has ended."""
    if made.relay is not None and made.relay.poll() is not None:
        raise LabError("the relay ended while ranks were running")


def reason(outcome: Outcome, rank: int, code: int) -> str:
    """Why a rank failed: what it wrote down, else its signal and its last printed line."""
    if "error" in outcome.records[rank]:
        return str(outcome.records[rank]["error"])
    died = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    printed = last(outcome.printed[rank])
    return f"{died}; last line: {printed}" if printed else died


def last(printed: str) -> str:
    """The last line that is not blank, or nothing."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def main() -> int:
    """The program of the command line; 1 if a rank fails."""
    end_well()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument("--rate", type=parse_rate, default=None, help="of a host's link: 100mbit, 1gbit, none")
    parser.add_argument("--latency", type=float, default=0.0, help="ms, one way")
    parser.add_argument("--backend", choices=("local", "gloo"), default="local", help="SOLI_BACKEND")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds after which all are killed")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a Python file and its arguments")
    args = parser.parse_args()
    if not args.program:
        parser.error("which program?")
    try:
        with lab(Network(args.hosts, args.per_host, args.rate, args.latency)) as made:
            outcome = launch(made, args.program, args.deadline, {"SOLI_BACKEND": args.backend}, show=True)
    except LabError as error:
        return stopped("launch", error)
    if outcome.error:
        print(f"launch: {outcome.error}", file=sys.stderr)
    return 1 if outcome.error else 0


if __name__ == "__main__":
    sys.exit(main())

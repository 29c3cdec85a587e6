"""A slow network on one machine: every host a network namespace, its link shaped by tbf in both directions.

    with lab(Network(hosts=4, rate=100.0)) as made:
        subprocess.run([*made.inside(2), "ping", "-c", "1", made.address(0)])

The hosts' links, `eth0` in each, end at a switch in a namespace of its own, so the machine's own network is not
touched. The switch is a bridge; with a latency it is a process (relay.py). `python benchmarks/network/lab.py`
removes what killed programs left behind.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import commands
import delay
from commands import run
from network import MTU, QUEUE, LabError, Network
from stream import Place

LINK = "eth0"
"""The name of every host's link, in its namespace."""
NAMES = re.compile(r"solilab-(\d+)-(\d+)-\d+-\w+")
TURNS = itertools.count()


@dataclass
class Lab:
    """A network that is there. Host h is `address(h)`; `inside(h)` are the words that run a command on it."""

    network: Network
    prefix: str
    relay: subprocess.Popen | None = None
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def switch(self) -> str:
        """The switch's namespace."""
        return f"{self.prefix}-switch"

    def host(self, h: int) -> str:
        """A host's namespace."""
        return f"{self.prefix}-h{h}"

    def inside(self, h: int) -> list[str]:
        """The words that run a command on host h; it dies with this process."""
        return commands.inside(self.host(h))

    def address(self, h: int) -> str:
        """Of host h's link."""
        return f"10.77.0.{h + 1}"

    def place(self, h: int) -> Place:
        """Host h, for stream.py."""
        return self.inside(h), self.address(h)


@contextlib.contextmanager
def lab(network: Network) -> Iterator[Lab]:
    """The network, until the block ends, however it does. LabError if it cannot be here."""
    reason = commands.why_not()
    if reason:
        raise LabError(reason)
    sweep()
    made = Lab(network, f"solilab-{os.getpid()}-{born(os.getpid())}-{next(TURNS)}")
    try:
        build(made)
        yield made
    finally:
        if made.relay is not None:
            delay.stop(made.relay)
        for name in namespaces():
            if name.startswith(made.prefix + "-"):
                remove(name)


def build(made: Lab) -> None:
    """Namespaces, links, the switch, the relay where there is latency, and the shapers last."""
    network = made.network
    hosts = range(network.hosts)
    for name in [made.switch, *map(made.host, hosts)]:
        run("ip", "netns", "add", name)
        settle(name, network)
        run("ip", "-n", name, "link", "set", "lo", "up")
    for h in hosts:
        connect(made, h)
    if network.latency:
        ports = [port(h) for h in hosts]
        if network.hosts > 1:
            carried = delay.capacity(made.switch, ports, made.place(1), made.place(0))
            made.facts["relay_mbit_a_cpu_second"] = round(carried)
            delay.refuse_if_too_slow(network, carried)
        made.relay = delay.start(made.switch, ports, network.latency)
    else:
        run("ip", "-n", made.switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", made.switch, "link", "set", "bridge", "up")
        for h in hosts:
            run("ip", "-n", made.switch, "link", "set", port(h), "master", "bridge")
    if network.rate is not None:
        for where, end in ends(made):
            shape(where, end, network)


def port(h: int) -> str:
    """The switch's end of host h's link."""
    return f"port{h}"


def settle(namespace: str, network: Network) -> None:
    """What a fresh namespace does otherwise than a lab needs. Nothing of it is seen outside."""
    settings = {
        "net/ipv6/conf/all/disable_ipv6": "1",  # its neighbour discovery would be counted as the ranks' bytes
        "net/ipv6/conf/default/disable_ipv6": "1",
        # steady, and there in every kernel: bbr sends next to nothing for 200 ms every 10 s to learn the delay
        "net/ipv4/tcp_congestion_control": "reno",
        "net/ipv4/tcp_slow_start_after_idle": "0",  # or every step would begin slowly after its computing
        "net/ipv4/tcp_no_metrics_save": "1",  # or a connection would begin as an earlier one ended
        "net/ipv4/tcp_rmem": f"4096 131072 {2 * network.window}",
        "net/ipv4/tcp_wmem": f"4096 65536 {2 * network.window}",
    }
    enter = commands.inside(namespace)
    for name, value in settings.items():
        if Path("/proc/sys", name).exists():  # a kernel without IPv6 has none of its settings
            run(*enter, "tee", f"/proc/sys/{name}", given=value)


def connect(made: Lab, h: int) -> None:
    """Host h's link, from its namespace to the switch's, not shaped yet."""
    network, host = made.network, made.host(h)
    pair = ["type", "veth", "peer", "name", port(h), "netns", made.switch]
    run("ip", "link", "add", LINK, "netns", host, "address", hardware(h), *pair)
    for namespace, end in ((host, LINK), (made.switch, port(h))):
        size = str(network.largest_frame)
        run("ip", "-n", namespace, "link", "set", end, "mtu", str(MTU), "gso_max_size", size, "up")
    run("ip", "-n", host, "addr", "add", f"{made.address(h)}/24", "dev", LINK)
    # All others are introduced: neighbours that a host must ask for are counted over all namespaces, and more than
    # 1,024 of them (33 hosts) overflow the kernel's table.
    others = [other for other in range(network.hosts) if other != h]
    words = "neigh add {} lladdr {} dev {} nud permanent"
    known = [words.format(made.address(other), hardware(other), LINK) for other in others]
    run("ip", "-n", host, "-batch", "-", given="\n".join(known) + "\n")


def hardware(h: int) -> str:
    """The Ethernet address of host h's link."""
    return f"02:00:00:00:00:{h + 1:02x}"


def shape(namespace: str, end: str, network: Network) -> None:
    """What leaves by this end leaves at the network's rate."""
    assert network.rate is not None
    rate = f"{round(network.rate * 1e3)}kbit"
    queue = ["burst", str(network.burst), "limit", str(QUEUE)]
    run("tc", "-n", namespace, "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, *queue)


def reshape(made: Lab, rate: float | None) -> None:
    """Give every link another rate, while ranks run: none of them may be sending. Only where there is no latency."""
    if made.network.latency:
        raise LabError("the relay was tried for one rate: a lab with latency keeps it")
    before, made.network = made.network.rate, replace(made.network, rate=rate)
    for where, end in ends(made):
        if before is not None:
            run("tc", "-n", where, "qdisc", "del", "dev", end, "root")
        if rate is not None:
            shape(where, end, made.network)


def ends(made: Lab) -> list[tuple[str, str]]:
    """Both ends of every link, each with its namespace."""
    hosts = range(made.network.hosts)
    return [*((made.host(h), LINK) for h in hosts), *((made.switch, port(h)) for h in hosts)]


def figures(made: Lab) -> dict[str, object]:
    """What the network says of itself: frames that it dropped (none, or something is wrong), the relay's figures."""
    queues = [json.loads(run("tc", "-n", where, "-s", "-j", "qdisc", "show", "dev", end)) for where, end in ends(made)]
    dropped = sum(q.get("drops", 0) for found in queues for q in found)
    relay = {} if made.relay is None else {"relay": delay.ask(made.relay)}
    return {"dropped": dropped, **made.facts, **relay}


def namespaces() -> list[str]:
    """The names of all that there are on this machine."""
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]


def remove(namespace: str) -> None:
    """The namespace, and the processes that still run in it."""
    for pid in run("ip", "netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):  # it ended by itself in between
            os.kill(int(pid), signal.SIGKILL)
    run("ip", "netns", "del", namespace)


def sweep() -> list[str]:
    """Remove the namespaces, and launch.py's folders of files, whose maker is dead; their names."""
    gone = [name for name in namespaces() if left_behind(name)]
    for name in gone:
        remove(name)
    for folder in Path(tempfile.gettempdir()).iterdir():
        if left_behind(folder.name):
            shutil.rmtree(folder)
            gone.append(folder.name)
    return gone


def left_behind(name: str) -> bool:
    """Whether a lab is named so whose process is no more."""
    made = NAMES.fullmatch(name)
    return made is not None and born(int(made[1])) != int(made[2])


def born(pid: int) -> int | None:
    """When the process began, in ticks since boot; None if it is no more. Numbers of processes come again."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if words[0] == "Z" else int(words[19])


def end_well() -> None:
    """Let a polite end (SIGTERM, SIGHUP) unwind this program, so that it takes its labs down."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))


def stopped(program: str, error: LabError) -> int:
    """Say why a program cannot do what it was asked to; its exit status."""
    print(f"{program}: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        for gone in sweep():
            print(f"removed {gone}")
    except LabError as error:
        sys.exit(stopped("lab", error))

"""The relay as the lab sees it: start it, ask it, end it, and refuse rates that it would not carry."""

import json
import subprocess
import sys
from pathlib import Path

import commands
import stream
from network import LabError, Network, spell

RELAY = Path(__file__).resolve().parent / "relay.py"
MOST_SHARE = 0.6
"""Of one core: what the relay may need when every host sends at its full rate. Beyond it, it would be late."""
TRIAL_S = 0.4


def start(switch: str, ports: list[str], latency: float) -> subprocess.Popen:
    """The relay between the ports of the namespace `switch`; it hands frames on when this returns."""
    command = [*commands.inside(switch), sys.executable, "-I", str(RELAY), str(latency), *ports]
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert relay.stdout is not None
    if relay.stdout.readline() != "ready\n":
        _, errors = relay.communicate()
        raise LabError(f"the relay did not start: {(errors.strip().splitlines() or ['(nothing said)'])[-1]}")
    return relay


def ask(relay: subprocess.Popen) -> dict[str, float]:
    """Its figures until now: frames, bytes, dropped, cpu_s, and by how many ms the latest frame was late."""
    assert relay.stdin is not None
    assert relay.stdout is not None
    try:
        relay.stdin.write("?\n")
        relay.stdin.flush()
        return json.loads(relay.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError) as error:
        _, errors = relay.communicate()
        raise LabError(f"the relay is gone: {(errors.strip().splitlines() or ['killed'])[-1]}") from error


def stop(relay: subprocess.Popen) -> None:
    """End it."""
    relay.kill()
    relay.wait()
    for pipe in (relay.stdin, relay.stdout, relay.stderr):
        if pipe is not None:
            pipe.close()


def capacity(switch: str, ports: list[str], source: stream.Place, target: stream.Place) -> float:
    """Mbit that the relay carries in one second of one core, from a moment of TCP through it without delay.

    By its CPU time and not by the clock: what other programs take of the machine does not make it smaller.
    The links must not be shaped yet.
    """
    relay = start(switch, ports, 0.0)
    try:
        stream.bandwidth([(source, target)], TRIAL_S)
        figures = ask(relay)
    finally:
        stop(relay)
    return figures["bytes"] * 8 / 1e6 / figures["cpu_s"]


def refuse_if_too_slow(network: Network, mbit_a_cpu_second: float) -> None:
    """LabError if all links at their full rate were too much."""
    assert network.rate is not None  # a Network with a latency has one
    share = network.hosts * network.rate / mbit_a_cpu_second
    if share > MOST_SHARE:
        most = MOST_SHARE * mbit_a_cpu_second / network.hosts
        raise LabError(
            f"the relay that delays frames would need {share:.0%} of a core for {network.hosts} links of "
            f"{spell(network.rate)}, and may have {MOST_SHARE:.0%}: on this machine it carries links of "
            f"{spell(float(f'{most:.2g}'))} and less, or any with --latency 0"
        )

"""Plain TCP between two hosts of a lab, without torch: one end of it a process, and what drives two.

`stream.py receive PORT` and `send ADDRESS PORT SECONDS`, `echo PORT` and `ping ADDRESS PORT COUNT`.
"""

import itertools
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
PIECE = 2**20
PORTS = itertools.count(5000)
Place = tuple[list[str], str]
"""A host: the words that run a command there, and its address."""


def receive(port: int) -> None:
    """Print bytes, seconds and the Mbit/s of payload after the first fifth of the time, when TCP has begun."""
    connection = accept(port)
    buffer = bytearray(PIECE)
    marks: list[tuple[float, int]] = []
    total = 0
    while got := connection.recv_into(buffer):
        total += got
        marks.append((time.perf_counter(), total))
    began, ended = marks[0][0], marks[-1][0]
    first = next(mark for mark in marks if mark[0] >= began + (ended - began) / 5)
    rate = (total - first[1]) * 8 / 1e6 / max(1e-9, ended - first[0])
    print(json.dumps({"bytes": total, "seconds": ended - began, "mbit": rate}), flush=True)


def send(address: str, port: int, seconds: float) -> None:
    """As much as goes."""
    with socket.create_connection((address, port)) as connection:
        data, until = bytes(PIECE), time.monotonic() + seconds
        while time.monotonic() < until:
            connection.sendall(data)


def echo(port: int) -> None:
    """Give back what comes, at once."""
    connection = accept(port)
    while data := connection.recv(65536):
        connection.sendall(data)


def ping(address: str, port: int, count: int) -> None:
    """Print the milliseconds of `count` round trips of one byte."""
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(1e3 * (time.perf_counter() - began))
            time.sleep(0.002)
    print(json.dumps(times), flush=True)


def accept(port: int) -> socket.socket:
    """The first who comes; prints `ready` when one may."""
    with socket.create_server(("", port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def start(place: Place, *words: object) -> subprocess.Popen:
    """One end on a host."""
    command = [*place[0], sys.executable, "-I", str(HERE), *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def listen(place: Place, *words: object) -> subprocess.Popen:
    """The end that is there first."""
    made = start(place, *words)
    assert made.stdout is not None
    if made.stdout.readline() != "ready\n":
        raise RuntimeError(f"{words} did not start on {place[1]}")
    return made


def said(process: subprocess.Popen, seconds: float) -> object:
    """What an end printed last."""
    out, _ = process.communicate(timeout=seconds)
    return json.loads(out)


def bandwidth(pairs: list[tuple[Place, Place]], seconds: float) -> list[dict[str, float]]:
    """From the first to the second of every pair at once: bytes, seconds and Mbit/s of payload."""
    ports = [next(PORTS) for _ in pairs]
    started: list[subprocess.Popen] = []
    try:
        for (_, target), port in zip(pairs, ports, strict=True):
            started.append(listen(target, "receive", port))
        for (source, target), port in zip(pairs, ports, strict=True):
            started.append(start(source, "send", target[1], port, seconds))
        return [said(process, seconds + 60) for process in started[: len(pairs)]]  # type: ignore[misc]
    finally:
        end(started)


def round_trips(source: Place, target: Place, count: int) -> list[float]:
    """Milliseconds of `count` round trips."""
    port = next(PORTS)
    started = [listen(target, "echo", port)]
    try:
        started.append(start(source, "ping", target[1], port, count))
        return said(started[1], 60 + count)  # type: ignore[return-value]
    finally:
        end(started)


def end(started: list[subprocess.Popen]) -> None:
    """Whatever state they are in."""
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "receive":
        receive(int(rest[0]))
    elif kind == "send":
        send(rest[0], int(rest[1]), float(rest[2]))
    elif kind == "echo":
        echo(int(rest[0]))
    elif kind == "ping":
        ping(rest[0], int(rest[1]), int(rest[2]))
    else:
        sys.exit(f"{kind}: not one of receive, send, echo, ping")

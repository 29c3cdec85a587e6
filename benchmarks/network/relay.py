"""A switch that takes its time: `relay.py MS PORT PORT ...` hands every frame on, each MS milliseconds later.

It runs in the switch's namespace, with a raw socket on each port; lab.py starts it. A frame here is up to 64 kB
of TCP that the kernel has not cut into packets yet (PACKET_VNET_HDR keeps what the cutting needs in front of
it), which is why plain Python is fast enough. Prints `ready`, then one line of figures for each line it reads;
it ends with its input, and so with whoever started it.
"""

import errno
import gc
import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque

# linux/if_packet.h
SOL_PACKET, PACKET_STATISTICS, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 6, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE, ETH_P_ALL = 32, 33, 3
FULL = (errno.ENOBUFS, errno.EAGAIN)  # what sending says when the port's shaper has no room
VNET = 10  # bytes of the header that the kernel puts before a frame
ROOM = 65536 + 128
BATCH = 32  # frames read from one port before those that are due are sent


def port(name: str) -> socket.socket:
    """Everything that enters the switch by this device, and the way out by it."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    made.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 2**26)
    # more than a shaper holds, which is to be the one that drops
    made.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 2**28)
    made.bind((name, ETH_P_ALL))
    made.setblocking(False)
    return made


def read(source: socket.socket) -> list[bytes]:
    """What has arrived at a port, at most BATCH frames."""
    frames = []
    for _ in range(BATCH):
        try:
            frames.append(source.recv(ROOM))
        except BlockingIOError:
            break
    return frames


def lost(source: socket.socket) -> int:
    """Frames since the last question for which there was no room, as this process did not read in time."""
    return struct.unpack("II", source.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]


def relay(delay: float, names: list[str]) -> None:
    """Until the input ends. `delay`: seconds."""
    ports = [port(name) for name in names]
    where: dict[bytes, socket.socket] = {}  # by hardware address
    queue: deque[tuple[float, socket.socket, bytes]] = deque()  # in the order of arrival, so of departure too
    figures = {"frames": 0, "bytes": 0, "dropped": 0, "latest_ms": 0.0}
    print("ready", flush=True)
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        ready, _, _ = select.select([sys.stdin, *ports], [], [], wait)  # to the microsecond, as poll is not
        due = time.monotonic() + delay
        if sys.stdin in ready:
            if not sys.stdin.readline():
                return
            figures["dropped"] += sum(map(lost, ports))
            print(json.dumps({**figures, "cpu_s": time.process_time()}), flush=True)
        for source in (p for p in ports if p in ready):
            for frame in read(source):
                where[frame[VNET + 6 : VNET + 12]] = source
                queue.append((due, source, frame))
        while queue and queue[0][0] <= (now := time.monotonic()):
            left, source, frame = queue.popleft()
            goal = where.get(frame[VNET : VNET + 6])
            for target in [goal] if goal else [p for p in ports if p is not source]:
                try:
                    target.send(frame)
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    figures["dropped"] += 1  # as a switch does
            figures["frames"] += 1
            figures["bytes"] += len(frame)
            figures["latest_ms"] = max(figures["latest_ms"], 1e3 * (now - left))


if __name__ == "__main__":
    gc.disable()  # nothing here refers in a circle, and a collection is a pause
    # before the ranks, which would keep it waiting
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    relay(float(sys.argv[1]) / 1e3, sys.argv[2:])

"""Where the ranks of a launch meet beside the network that is measured: a file socket, which no shaper sees."""

import json
import os
import socket
import time


class Meeting:
    """Every rank makes one. Rank 0 is the table that the others sit at."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        path = os.environ["LAB_MEETING"]
        if self.rank == 0:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path)
                server.listen(self.world)
                guests = [server.accept()[0].makefile("rw") for _ in range(1, self.world)]
            self.others = dict(sorted((int(guest.readline()), guest) for guest in guests))
        else:
            table = socket.socket(socket.AF_UNIX)
            while True:
                try:
                    table.connect(path)
                    break
                except (FileNotFoundError, ConnectionRefusedError):  # rank 0 is not there yet
                    time.sleep(0.02)
            self.others = {0: table.makefile("rw")}
            self._tell(0, str(self.rank))

    def gather(self, said: str = "") -> list[str]:
        """What every rank says, in their order, when all have; ConnectionError if one is gone."""
        if self.rank:
            self._tell(0, json.dumps(said))
            return json.loads(self._told(0))
        everything = [said, *(json.loads(self._told(other)) for other in self.others)]
        for other in self.others:
            self._tell(other, json.dumps(everything))
        return everything

    def _tell(self, other: int, line: str) -> None:
        self.others[other].write(line + "\n")
        self.others[other].flush()

    def _told(self, other: int) -> str:
        line = self.others[other].readline()
        if not line:
            raise ConnectionError(f"rank {other} has left the meeting")
        return line

"""What rank 0 does for all: the others wait, however long it takes, and get its answer or its error."""

import threading
from collections.abc import Callable
from typing import Any

from soli.core.errors import SoliError
from soli.mesh.collectives import gather_json
from soli.mesh.mesh import all_ranks
from soli.mesh.world import World

BEAT_SECONDS = 0.5


def from_rank_0(world: World, make: Callable[[], Any], what: str) -> Any:
    """The JSON-able result of `make()`, which only rank 0 calls; on every rank.

    Encoding a large corpus takes longer than a collective may: so rank 0 works in a thread, and the ranks
    meet twice a second until it is done. A SoliError of rank 0 is raised on every rank.
    """
    if world.size == 1:
        return make()
    axis = all_ranks(world)
    answer: dict[str, Any] = {"state": "working"}
    caught: list[BaseException] = []

    def work() -> None:
        try:
            answer.update(value=make(), state="done")
        except SoliError as error:
            answer.update(error=error.to_json(), state="refused")
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=work, name=what, daemon=True) if world.is_first else None
    if thread:
        thread.start()
    while True:
        if thread:
            thread.join(BEAT_SECONDS)
            if caught:
                raise caught[0]
        told = gather_json(dict(answer) if thread else None, axis, label=what)[0]
        if told["state"] == "refused":
            error = SoliError.from_json(told["error"])
            error.everywhere = True
            raise error
        if told["state"] == "done":
            return told["value"]

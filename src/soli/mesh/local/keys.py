"""Waiting for what other ranks put into the store while a group is made."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from soli.core.errors import failure


def awaited(store: Any, keys: dict[int, str], timeout: timedelta, where: str) -> list[str]:
    """The values of all keys, in their order, once every rank has set its own. SoliError names the late ones.

    `keys`: a rank's number and its key; `where` says of what they are the ranks, for the error.
    """
    try:
        store.wait(list(keys.values()), timeout)
    except RuntimeError as error:  # a DistStoreError, or what a FileStore raises
        missing = [str(rank) for rank, key in keys.items() if not store.check([key])]
        what = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)} of {where} did not come in {timeout.total_seconds():g} s"
        raise failure(what, fix="are they started, and do they make the same groups in the same order?") from error
    return [store.get(key).decode() for key in keys.values()]

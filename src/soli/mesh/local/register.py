"""Importing this makes torch.distributed know the backend `local`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from soli.mesh.local.group import LocalGroup


def _create(options: Any, _: Any = None) -> LocalGroup:
    return LocalGroup(options.store, options.group_rank, options.group_size, options.timeout, str(options.group_id))


if "LOCAL" not in dist.Backend._plugins:
    dist.Backend.register_backend("local", _create, extended_api=True, devices=["cpu"])

"""Importing this makes torch.distributed know the backend `local`."""

import torch.distributed as dist

from soli.mesh.local.group import LocalGroup

if "LOCAL" not in dist.Backend._plugins:
    dist.Backend.register_backend("local", lambda options, *_: LocalGroup(options), extended_api=True, devices=["cpu"])

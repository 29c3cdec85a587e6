"""Checkpoints without a plan: saved under one layout, loaded under any other, bit for bit.

A checkpoint is a folder: one safetensors file a rank, and `manifest.json`, which says what they hold. The
resharding is that of torch.distributed.checkpoint (DCP); nothing is pickled to disk or unpickled from it.
"""

from soli.checkpoint.load import WIDE, load
from soli.checkpoint.manifest import Chunk, FileEntry, Manifest, Saved, latest, read_manifest
from soli.checkpoint.save import PendingSave, finish, save, save_async

__all__ = ["WIDE", "Chunk", "FileEntry", "Manifest", "PendingSave", "Saved", "finish", "latest", "load", "read_manifest", "save", "save_async"]  # fmt: skip

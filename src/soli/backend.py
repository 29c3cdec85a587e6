"""`import soli.backend` makes `torch.distributed.init_process_group("local")` work, for any program.

Ranks of one machine meet in shared memory; see soli.mesh.local.group.
"""

from soli.mesh.local import register

__all__ = ["register"]

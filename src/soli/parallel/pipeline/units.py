"""Where a model may be cut: the modules that a stage runs as wholes, its units.

A unit is an outermost module with parameters that holds no repeated blocks, or a repeated block: an embedding, each
layer, a final norm, a head. What the model's own code does between their calls (sums, masks, positions) is glue, and
runs on every stage. No list of attribute names: children of the outermost lists of modules are the blocks.
"""

from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from soli.core.versions import FLOPS
from soli.parallel.units import parts

Unit = tuple[str, nn.Module]


def units(model: nn.Module, finer: int = 0) -> list[Unit]:
    """The units in the order of registration. `finer`: how often the largest kind is taken apart into its children, if one can be."""
    found = _children(("", model))
    for _ in range(finer):
        kind = _largest_kind(found)
        if kind is None:
            return found
        found = [part for unit in found for part in (_children(unit) if type(unit[1]) is kind else [unit])]
    return found


def _largest_kind(found: list[Unit]) -> type | None:
    """The class of the largest unit that has parts."""
    wholes = [module for _, module in found if _children(("", module))]
    sizes = {type(module): sum(p.numel() for p in module.parameters()) for module in wholes}
    return max(sizes, key=lambda kind: sizes[kind]) if sizes else None


def _children(unit: Unit) -> list[Unit]:
    """Units below one that is taken apart."""
    name, module = unit
    return [(path, part) for path, part, _ in parts(module, name)]


class Flops(TorchDispatchMode):
    """Sums the flops of products. torch's FlopCounterMode also follows modules, with operations of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in FLOPS:
            self.total += FLOPS[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out

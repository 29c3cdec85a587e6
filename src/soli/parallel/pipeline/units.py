"""Where a model may be cut: the modules that a stage runs as wholes, its units.

A unit is an outermost module with parameters that holds no repeated blocks, or a repeated block: an embedding, each
layer, a final norm, a head. What the model's own code does between their calls (sums, masks, positions) is glue, and
runs on every stage. No list of attribute names: children of the outermost lists of modules are the blocks.
"""

from __future__ import annotations

from torch import nn

CONTAINERS = nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
Unit = tuple[str, nn.Module]


def units(model: nn.Module, finer: int = 0) -> list[Unit]:
    """The units in the order of registration. `finer`: how often the largest kind is taken apart into its children."""
    found = _within(model, "", isinstance(model, nn.Sequential))
    for _ in range(finer):
        kind = _largest_kind(found)
        if kind is None:
            return found
        found = [part for unit in found for part in (_children(unit) if type(unit[1]) is kind else [unit])]
    return found


def can_be_finer(model: nn.Module, finer: int) -> bool:
    return _largest_kind(units(model, finer)) is not None


def _within(module: nn.Module, path: str, in_list: bool) -> list[Unit]:
    """Units below a module that is taken apart; `in_list`: its children are blocks."""
    found: list[Unit] = []
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, CONTAINERS):
            found += _within(child, where, True)
        elif in_list or not _has_blocks(child):
            found.append((where, child))
        else:
            found += _within(child, where, isinstance(child, nn.Sequential))
    return found


def _has_blocks(module: nn.Module) -> bool:
    return any(isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(m) for m in module.modules())


def _largest_kind(found: list[Unit]) -> type | None:
    """The class of the largest unit that has parts."""
    sizes = {
        type(module): sum(p.numel() for p in module.parameters()) for _, module in found if _children(("", module))
    }
    return max(sizes, key=lambda kind: sizes[kind]) if sizes else None


def _children(unit: Unit) -> list[Unit]:
    name, module = unit
    return _within(module, name, isinstance(module, nn.Sequential))

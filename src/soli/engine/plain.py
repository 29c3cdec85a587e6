"""Options of an optimizer and states of a scheduler in values that JSON has, and back."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

PAIRS, NUMBER = "pairs by number", "a number that is not finite"


def plain(value: Any) -> Any:
    """An option of a group as JSON can hold it: a learning rate may be a tensor, or numpy's."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def like(old: Any, value: Any) -> Any:
    """What `plain` made of an option, in the form that it has here."""
    if isinstance(old, Tensor):
        return old.fill_(value)
    return type(old)(value) if isinstance(old, np.generic | tuple) else value


def numbered(value: Any) -> Any:
    """A scheduler's state, or the program's, as JSON can hold it: dicts by numbers (MultiStepLR's milestones, a Counter) as pairs, inf as text."""
    if isinstance(value, dict) and value and all(type(key) is int for key in value):
        return {PAIRS: [[key, numbered(item)] for key, item in value.items()]}
    if isinstance(value, dict):
        return {key: numbered(item) for key, item in value.items()}
    found = plain(value)
    if isinstance(found, float) and not math.isfinite(found):
        return {NUMBER: str(found)}
    return [numbered(item) for item in found] if isinstance(found, list) else found


def counted(value: Any, made: Callable[[dict[int, Any]], Any] = Counter) -> Any:
    """What `numbered` was given; dicts by numbers are Counters in schedulers."""
    if isinstance(value, dict) and value.keys() == {PAIRS}:
        return made({key: counted(item, made) for key, item in value[PAIRS]})
    if isinstance(value, dict) and value.keys() == {NUMBER}:
        return float(value[NUMBER])
    if isinstance(value, dict):
        return {key: counted(item, made) for key, item in value.items()}
    return [counted(item, made) for item in value] if isinstance(value, list) else value

"""What a function of torch is called, and whether it writes into its first argument."""

from __future__ import annotations

from typing import Any

_QUESTIONS = ("__invert__", "__int__", "__index__", "__iter__", "__init__")


def name_of(func: Any) -> str:
    """Its name; of the getter of an attribute, the attribute's."""
    name = getattr(func, "__name__", str(func))
    return str(func.__self__.__name__) if name == "__get__" else str(name)


def in_place(func: Any) -> bool:
    """Whether it writes into its first argument."""
    name = name_of(func)
    if name.startswith("__"):
        return name.startswith(("__set", "__i")) and name not in _QUESTIONS
    return name.endswith("_")

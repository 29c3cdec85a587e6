"""`soli roles`: what each weight of a model is to tensor parallelism, and why."""

import inspect
import json
import math
import re
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from soli.cli import programs
from soli.cli.options import AsJson
from soli.cli.tables import show
from soli.core.errors import SoliError, blaming

FORMS = f"{programs.FORM}; or a transformers config.json"
TOKENS, ROWS = 8, 2  # of the batch that is made for a transformers model


def roles(
    model: Annotated[str, Argument(help=FORMS)], tp: Annotated[int, Option(help="Ranks of the tensor axis.")] = 2,
    sp: Annotated[bool, Option("--sp", help="Cut the sequence too.")] = False,
    role: Annotated[list[str] | None, Option(help="PATTERN=ROLE, as parallelize(roles=...).")] = None,
    every: Annotated[bool, Option("--all", help="Every weight, not one row for each kind.")] = False, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Find what each weight is to tensor parallelism: column, row, vocabulary or replicated, with the reason."""
    made, batch, loss_fn = _made(model)
    with blaming(_failed):
        found, sizes = find(made, batch, loss_fn, tp, sp, _hints(role or []))
    if as_json:
        print(json.dumps({n: _as_dict(r, sizes[n]) for n, r in found.items()}, indent=1))
        return
    _show(found, sizes, tp, every)


def _failed(error: Exception) -> SoliError:
    got = f"{type(error).__name__}: {error}".split("\n")[0]
    return SoliError("the model does not run on its batch, which tells the roles", got=got, fix=f"run a step of it by itself; or give {programs.FORM}")


def find(model: Any, batch: Any, loss_fn: Any, tp: int, sp: bool, hints: dict[str, str]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The role and the shape of every weight."""
    from soli.core.errors import raise_all
    from soli.core.plan import Plan
    from soli.engine import layout
    from soli.engine.batch import Caller, rows_of, take, to_device
    from soli.engine.remembered import Remembering
    from soli.losses import from_model

    plan = Plan(tp=tp, sp=sp)
    raise_all(layout.problems(hints, model), everywhere=True)
    rows = min(rows_of(batch), layout.ROWS)
    data = to_device(take(batch, 0, rows), next(model.parameters()).device)
    found, _ = layout.Runner(model, Caller(model), Remembering(loss_fn or from_model()), data, rows, plan).search(tp, sp, hints)
    return found, {name: tuple(model.get_parameter(name).shape) for name in found}


def _show(found: dict[str, Any], sizes: dict[str, tuple[int, ...]], tp: int, every: bool) -> None:
    """The roles, layers of one kind in one row."""
    kinds: dict[Any, list[str]] = {}
    said = lambda split: "" if split is None else f"dim {split.dim}: {' + '.join(map(str, split.parts))} in {split.atoms}"
    for name, role in found.items():
        shown = name if every else re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name, count=1)
        kinds.setdefault((shown, sizes[name], role.kind, said(role.split)), []).append(name)
    rows = [[shown, str(len(names)), " x ".join(map(str, shape)), kind, cut, found[names[0]].why] for (shown, shape, kind, cut), names in kinds.items()]
    show(("weight", "of", "shape", "role", "cut", "why"), [], rows, wide=None if sys.stdout.isatty() else 200)
    numel = {name: math.prod(shape) for name, shape in sizes.items()}
    whole = sum(numel.values())
    cut_count = sum(numel[name] for name, role in found.items() if role.split is not None)
    share, held = cut_count / max(whole, 1), whole - cut_count + cut_count // tp
    print(f"{cut_count:,} of {whole:,} parameters ({share:.0%}) are cut over tp={tp}; a rank holds about {held:,}")


def _as_dict(role: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    split = role.split and {"dim": role.split.dim, "parts": role.split.parts, "atoms": role.split.atoms}
    return {"role": role.kind, "shape": shape, "cut": split, "why": role.why}


def _hints(given: list[str]) -> dict[str, str]:
    if wrong := [text for text in given if "=" not in text]:
        raise SoliError("--role has no value", got=", ".join(wrong), allowed="PATTERN=ROLE")
    return dict(text.split("=", 1) for text in given)


def _made(text: str) -> tuple[Any, Any, Any]:
    """The model, a batch and its loss (None: the model's own)."""
    if (program := programs.named(text)) is not None:
        return programs.from_file(*program)
    place = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    if place.name.endswith(".json") and place.is_file():
        return _from_config(place)
    raise SoliError("there is no such model", got=text, allowed=FORMS)


def _from_config(place: Path) -> tuple[Any, Any, Any]:
    """A transformers model of random weights, as its configuration names it, and a batch that it takes."""
    import torch

    from soli.checkpoint.published import built

    model = built(place).bfloat16()  # roles are of shapes, and kernels of experts are of bf16 there
    config, takes = model.config, inspect.signature(model.forward).parameters
    if model.main_input_name not in ("pixel_values", "input_ids"):
        got = f"{type(model).__name__}, whose input is {model.main_input_name}"
        raise SoliError("soli makes no batch for such a model", got=got, allowed="models of token ids and of images", fix=f"give {programs.FORM}")
    if model.main_input_name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        shape = (ROWS, getattr(vision, "num_channels", 3), vision.image_size, vision.image_size)
        batch = {"pixel_values": torch.zeros(shape, dtype=torch.bfloat16)}
        if "labels" in takes:
            batch["labels"] = torch.zeros(ROWS, dtype=torch.int64)
    else:
        tokens = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % (config.get_text_config().vocab_size - 1) + 1
        batch = {"input_ids": tokens, "labels": tokens.clone()} if "labels" in takes else {"input_ids": tokens}
    return model, batch, lambda output, _: (output[0].sum(), 1)  # its loss, or what it computes

"""`soli plan`: check a plan and fill it in; predict what the rows of a table take."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from typer import Argument, Option, Typer
from typer.core import TyperGroup

from soli.cli import plan_search
from soli.cli.options import AsJson, Ranks
from soli.cli.tables import show
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.planner.legality import plain, resolve

if TYPE_CHECKING:
    from soli.planner.predict import Prediction

FORMS = ("text", "toml", "json")


class Group(TyperGroup):
    """What is no command's name is a plan to check, `soli plan dp=2`, or a model, `soli plan MODEL --cluster h100`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = [_meant(args), *args]
        return super().parse_args(ctx, args)


def _meant(args: list[str]) -> str:
    """The command that these words leave out. A plan has no path's signs in it, and no option of a search."""
    first = args[0].lower()
    if first.endswith((".csv", ".tsv")):
        return "predict"
    searched = any(word.split("=")[0] in ("--cluster", "--global-batch") for word in args)
    named = re.match(r"[^-=,][^=,]*$|\w+:", first) and first not in ("auto", *Plan.__dataclass_fields__)
    return "search" if searched or named or "/" in first or first.endswith(".json") or ".py" in first else "check"


app = Typer(
    cls=Group,
    help="The best plans of a model, by its name, its config.json or its program (soli plan llama-3-70b --cluster h100:8x64 "
    "--global-batch 1024, soli plan examples/plan_model.py:llama_8b --cluster ...); what the runs of a table "
    "take (soli plan predict ROWS.csv); a plan, checked and filled in (soli plan dp=2,zero=3 -n 2).",
    no_args_is_help=True,
)
app.command("search")(plan_search.search)


@app.command("check")
def check(
    text: Annotated[str, Argument(help='Such as "dp=2,zero=3", or auto.')],
    ranks: Ranks = 1,
    form: Annotated[str, Option("--format", help=", ".join(FORMS))] = "text",
) -> None:
    """Check a plan for N ranks and print it with every degree filled in. "check" may be left out."""
    if form not in FORMS:
        raise SoliError("a plan has no such format", got=form, allowed=", ".join(FORMS))
    if text == "auto":
        made, why = plain(ranks, "it is chosen when a program runs, by rehearsing its layouts")
        print(why, file=sys.stderr)
    else:
        made = resolve(Plan.parse(text), ranks)
    print({"text": str(made), "toml": made.to_toml().rstrip(), "json": made.to_json()}[form])


@app.command("predict")
def predict(
    table: Annotated[Path, Argument(help="A CSV file: a run a row, its model, plan and devices.")],
    measured: Annotated[Path | None, Option(help="A CSV file of measured runs (iter_time_s), to which the constants are fitted first.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time and memory of a step of each row, with 90% intervals, or why it cannot be said.

    A row needs layers and hidden (or params_b), seq_len, gpu, gpus (or dp) and global_batch (or microbatch and
    grad_accum); tp, pp, dp, cp, ep, vp, microbatch, heads, kv_heads, ffn, vocab, arch, precision, recompute, shard,
    sp, framework and interconnect are used where they stand, and inferred, which is said, where they do not. A few
    words in model, notes, source, impl, env and attn_backend are looked for (LoRA, flash attention); what was measured
    of a row is not looked at.
    """
    from soli.planner import predict as planner
    from soli.planner.columns import strangers

    rows = _rows(table)
    if not rows:
        raise SoliError("the table has no rows", got=str(table))
    found = planner.predict(rows, [] if measured is None else _rows(measured))
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=1, allow_nan=False))
    else:
        _show(found)
        if odd := strangers(rows[0]):
            print(f"Columns that are not known, and count at most by their words: {', '.join(odd)}.")


def _rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table whose cells are parted by what its first line has most of; SoliError if it is none, or has none of the columns that
    say what runs, or several of one name. What a row has beyond its columns is under None, for which it is refused by itself."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "")
            parted = max(",\t;", key=re.sub('"[^"]*"', "", first).count)
            reader = csv.DictReader(chain([first], file), strict=True, restval="", delimiter=parted)
            reader.fieldnames = names = [name.strip() for name in reader.fieldnames or []]
            rows = list(reader)
    except OSError as error:
        raise SoliError("the table cannot be read", got=f"{path}: {error.strerror}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        fix = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise SoliError("the table is no CSV file", got=f"{path}: {error}", fix=fix) from error
    from soli.planner.columns import KNOWN, plain

    read = [name for name in map(plain, names) if name in KNOWN]
    if twice := [name for name in dict.fromkeys(read) if read.count(name) > 1]:
        fix = "leave one of each, or give the others names of their own"
        raise SoliError("several columns of the table have one name", got=f"{path}: {', '.join(twice)}", fix=fix)
    if not read:
        got = f"{path}: {', '.join(names) or 'an empty file'}"
        fix = "name the columns in its first line: gpu, gpus, layers, hidden, seq_len, global_batch, tp, pp, ..."
        raise SoliError("the table has none of the columns that say what runs", got=got, fix=fix)
    return rows


def _show(found: list[Prediction]) -> None:
    rows = ([str(number), *_cells(one)] for number, one in enumerate(found, 1))
    titles = ("step, s", "from", "to", "memory, GB", "to", "fits")
    caption = "Intervals: 90%. fits: what is predicted of memory is there."
    show(["row"], titles, rows, ["inferred, or why not"], caption=caption)


def _cells(one: Prediction) -> list[str]:
    if one.refused:
        return [*[""] * 6, escape(one.refused)]
    numbers = (one.predicted_time_s, one.time_low_s, one.time_high_s, one.predicted_memory_gb, one.memory_high_gb)
    return [*("-" if n is None else f"{n:.4g}" for n in numbers), "yes" if one.feasible else "no", escape("; ".join(one.inferred))]

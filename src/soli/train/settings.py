"""Read, check, override and write the configuration. Everything that is wrong is told at once."""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from soli.core.errors import Problem, SoliError, blaming, nearest, on_all_ranks, raise_all
from soli.core.files import write_whole
from soli.core.plan import Plan
from soli.train.config import Config
from soli.train.schedule import MEASURED_TO

Tables = dict[str, dict[str, tuple[Any, str]]]
"""By table and key what was said, and where."""
KIND_WORDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}


def load(path: Path | None, overrides: Mapping[str, object] | None = None) -> Config:
    """The configuration: defaults, then the TOML at `path`, then `overrides`.

    overrides: what the command line says, `table.key` -> value; a value None says nothing.
    Raises one SoliError with every unknown table and key, wrong type and impossible value.
    """
    problems: list[Problem] = []
    tables = _from_file(path, problems)
    for name, value in (overrides or {}).items():
        if value is not None:
            table, key = name.split(".")
            tables.setdefault(table, {})[key] = (value, "command line")
    config = _build(tables, problems)
    raise_all(problems, everywhere=True)
    return config


def write(config: Config, path: Path) -> None:
    """Write the configuration as TOML, each setting with its meaning; `load` reads it back equal."""
    lines: list[str] = []
    for table in fields(config):
        lines.append(f"[{table.name}]")
        section = getattr(config, table.name)
        for entry in fields(section):
            # of texts, numbers and flags TOML has JSON's form, but for the one sign that it wants spelt
            value = json.dumps(getattr(section, entry.name), ensure_ascii=False).replace("\x7f", "\\u007f")
            text = f"{entry.name} = {value}"
            lines.append(f"{text:<32} # {entry.metadata['help']}")
        lines.append("")
    write_whole(path, "\n".join(lines))


def _from_file(path: Path | None, problems: list[Problem]) -> Tables:
    if path is None:
        return {}
    if not path.is_file():
        raise on_all_ranks("there is no such configuration file", got=path, fix="check the path")
    wrong = lambda error: on_all_ranks(f"{path} is not TOML", got=error, allowed="[table] and key = value lines")
    with blaming(wrong, tomllib.TOMLDecodeError, UnicodeDecodeError):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    tables: Tables = {}
    for table, entries in data.items():
        if isinstance(entries, dict):
            tables[table] = {key: (value, str(path)) for key, value in entries.items()}
        else:
            known = get_type_hints(Config)
            homes = [f"[{name}]" for name, one in known.items() if table in get_type_hints(one) or (name == table and isinstance(entries, list))]
            fix = f"put it under {' or '.join(homes)}" if homes else "put it under its table"
            problems.append(Problem(f"{table} stands outside a table", f"{table} = {entries!r} in {path}", "", fix))
    return tables


def _build(tables: Tables, problems: list[Problem]) -> Config:
    known = get_type_hints(Config)
    sections: dict[str, Any] = {}
    for table, entries in tables.items():
        if table not in known:
            problems.append(_unknown(f"table [{table}]", table, list(known), ""))
            continue
        hints = get_type_hints(known[table])
        entry_of = {entry.name: entry for entry in fields(known[table])}
        good: dict[str, Any] = {}
        for key, (value, place) in entries.items():
            if key not in entry_of:
                problems.append(_unknown(f"setting {table}.{key}", key, list(entry_of), place))
                continue
            if problem := _check(f"{table}.{key}", value, hints[key], entry_of[key], place):
                problems.append(problem)
            else:
                good[key] = float(value) if hints[key] is float else value
        sections[table] = known[table](**good)
    config = replace(Config(), **sections)
    known_bad = [problem.what.split(" ")[0] for problem in problems]  # its default stands in its place
    problems += [one for one in _together(config) if not any(name in one.what for name in known_bad)]
    return config


def _unknown(what: str, name: str, known: list[str], place: str) -> Problem:
    fix = nearest(name, known, "remove it, or use one of these")
    return Problem(f"unknown {what}", f"{name} ({place})" if place else name, ", ".join(known), fix)


def _check(name: str, value: Any, kind: type, entry: Field[Any], place: str) -> Problem | None:
    low, high, choices = (entry.metadata[key] for key in ("low", "high", "choices"))
    default = f"the default is {entry.default!r}"
    got = f"{value!r} ({place})"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if type(value) is not kind and not (kind is float and number):
        return Problem(f"{name} has the wrong type", got, KIND_WORDS[kind], default)
    if kind is str and value != value.encode(errors="replace").decode():
        return Problem(f"{name} is no text that a file of settings can hold", ascii(value), "UTF-8")
    if choices and value not in choices:
        fix = nearest(str(value), choices, default, 0.5)
        return Problem(f"{name} is none of its choices", got, ", ".join(choices), fix)
    if number and not (math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high)):
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        return Problem(f"{name} is out of range", got, allowed, default)
    return None


def _together(config: Config) -> Iterator[Problem]:
    """What single settings allow but not their combination."""
    model, run = config.model, config.run
    folder = Path(run.folder)
    try:
        fits = all(place.is_dir() or not place.exists() for place in (folder, *folder.parents))
    except OSError:  # a name too long, or what is not ours
        fits = False
    if not fits:
        yield Problem("run.folder is no folder", run.folder, "", "name another")
    if run.plan not in ("auto", "auto=probe"):
        try:
            Plan.parse(run.plan)
        except SoliError as error:
            yield from error.problems
    if model.dim and model.heads and model.dim % model.heads:
        got = f"dim {model.dim}, heads {model.heads}"
        fix = f"dim = {max(1, round(model.dim / model.heads)) * model.heads}"
        yield Problem("model.dim does not divide into model.heads", got, "a multiple of the number of heads", fix)
    if run.steps == 0 and config.optim.warmup < MEASURED_TO:
        what, got = "optim.warmup is too short for run.steps = 0", f"{config.optim.warmup} steps"
        why = "the speed is measured during the warm-up, where the learning rate does not depend on the number of steps"
        yield Problem(what, got, f"{MEASURED_TO} or more: {why}", "say run.steps, or a longer warm-up")
    if run.steps == 0 and run.minutes == 0:
        what = "neither run.steps nor run.minutes says how long to train"
        yield Problem(what, "0 and 0", "one above 0", "minutes = 2")

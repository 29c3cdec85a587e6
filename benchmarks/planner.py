"""The planner against published measurements: fits its constants (--fit), and says how far it is off (--validate).

    python benchmarks/planner.py --fit          -> src/soli/planner/cost/constants.toml, src/soli/planner/layers.toml
    python benchmarks/planner.py --validate     -> benchmarks/results/planner.json, planner.md

Out of sample: a row's prediction comes from constants that were fitted without its source (all rows of its table),
and from some that were fitted without its model (every row, of any table, with its layers, hidden size and MLP).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import record
import unseen
from crossed import OTHER, fit_crossed
from scipy.stats import spearmanr

from soli.engine.taken import HEADROOM
from soli.planner.cost import constants
from soli.planner.cost.constants import DEFAULT, NAMES, SPREADS, Constants, chain, repeated, spread_of
from soli.planner.cost.step import step
from soli.planner.measured import factors_of, fit, learn, published, shapes_of
from soli.planner.predict import arrays, family_of, learn_family, predict
from soli.planner.rows import BY_EYE, TESTS, Row, read_measured
from soli.planner.search import chosen

HERE = Path(__file__).parent
NO_RUNS = {
    "hardware_calibration": "data sheets and products, no runs",
    "megatron_bridge_recipes_config": "plans without times",
    "planner_calculon_fig1_memory": "values of a formula",
}
TABLES = tuple(p.stem for p in sorted((HERE / "published").glob("*.csv")) if p.stem not in NO_RUNS)
RESULTS = HERE / "results"
CONSTANTS = HERE.parent / "src/soli/planner/cost/constants.toml"
LAYERS = HERE.parent / "src/soli/planner/layers.toml"
FOLDS = 10
EVEN, GUESSED, READ = 150, 0.3, 0.03
SEEDS, CALIBRATION = 5, 48
USUAL = ("zero=", "precision=", "heads=", "ffn=", "vocab=", "model=", "interconnect: ", "swiglu=", "attention=")
"""What a row may leave out and be complete: no ZeRO, 16 bits, an MLP four times as wide as the model, a usual network, ..."""
RUNS, DEPTHS, AGREE = 8, 3, 0.025
"""A shape's layers are told by so many runs or more, of models of so many depths, that are off by no more than this with what they tell
(the median; runs of small layers are noisy by 2%). With fewer depths what is a layer's and what the tables' cannot be told apart, and a shape would be one model's."""
Sets = dict[str, dict[str, float]]
Layers = dict[str, np.ndarray]
"""By framework and generation: a table [n, 7] as soli.planner.measured.factors_of has it."""


class Table:
    """One published table: its rows as they were read, beside what they say."""

    def __init__(self, name: str) -> None:
        self.name = name
        with (HERE / "published" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            self.raw = list(csv.DictReader(file))
        self.rows = [read_measured(raw) for raw in self.raw]


# --- fitting ----------------------------------------------------------------------------------------------


def fit_sets(rows: Sequence[Row], sources: Sequence[str]) -> Sets:
    """Every set of constants, all at once (crossed.py); those of tests then to their own times.

    A pair that nobody measured has a set too: its framework's and its generation's parts.
    """
    weights = weights_of(rows, sources)
    families = [family_of(row) for row in rows]
    # Of tests of toy sizes on shared machines memory says something of others, time does not.
    common = [replace(row, time=None) if row.framework == TESTS else row for row in rows]
    shared = fit_crossed(*arrays(common), families, sources, weights)
    sets = {DEFAULT: shared.of()}
    generations = sorted({generation for _, generation in families})
    for framework in sorted({name for name, _ in families} | {OTHER}):
        sets[framework] = shared.of(framework)
        for generation in generations:
            found = shared.of(framework, generation)
            at = [i for i, family in enumerate(families) if family == (framework, generation)]
            if framework == TESTS and at:
                found = fit(*arrays([rows[i] for i in at]), found)
            sets[f"{framework} {generation}"] = found
    return sets


def layers_of(rows: Sequence[Row], sets: Sets) -> Layers:
    """Shapes whose layers were measured under several models (RUNS), and by which factors the law is off there."""
    found: Layers = {}
    sure = [
        r for r in rows if r.time is not None and not any(w.startswith("layers=") or w == BY_EYE for w in r.inferred)
    ]
    for family in sorted({family_of(row) for row in sure}):
        own = [row for row in sure if family_of(row) == family]
        p, measured = arrays(own)
        shapes, place = np.unique(shapes_of(p).round(6), axis=0, return_inverse=True)
        depths = [np.unique(p.layers[place == i]).size for i in range(len(shapes))]
        told = np.flatnonzero((np.bincount(place) >= RUNS) & (np.array(depths) >= DEPTHS))
        at = np.flatnonzero(np.isin(place, told))
        if not len(at):
            continue
        p, measured = arrays([own[i] for i in at])
        constants_of = repeated(of(sets, own[0]), len(at))
        factors = learn(p, constants_of, measured.times)
        wrong = np.abs(np.log(step(p, constants_of, *factors.at(p)).time / measured.times))
        both = np.stack(factors.at(p), axis=1)
        firsts = [(np.flatnonzero(place[at] == i)[0], np.median(wrong[place[at] == i])) for i in told]
        kept = [first for first, median in firsts if median <= AGREE]
        if kept:
            found[" ".join(family)] = np.concatenate([np.exp(shapes_of(p)[kept]), both[kept]], axis=1)
    return found


def weights_of(rows: Sequence[Row], sources: Sequence[str]) -> np.ndarray:
    """[5, rows]: a source counts as no more than EVEN rows, with its times and with its memories; the time of a row whose
    model was guessed from its parameters as a part of one, and as less one that was read by eye."""
    names, sized = np.array(sources), np.array([row.memory is not None for row in rows])
    even = np.array([EVEN / max((names == source).sum(), EVEN) for source in sources])
    kept = np.array([EVEN / max((sized & (names == source)).sum(), EVEN) for source in sources])
    guessed = np.array([any(word.startswith("layers=") for word in row.inferred) for row in rows])
    read = np.array([BY_EYE in row.inferred for row in rows])
    sure = np.where(read, READ, np.where(guessed, GUESSED, 1.0))
    return np.stack([sure * even, kept, kept, even, even])


def of(sets: Sets, row: Row) -> dict[str, float]:
    framework, generation = family_of(row)
    names = (f"{framework} {generation}", f"{OTHER} {generation}", framework, DEFAULT)
    return next(sets[name] for name in names if name in sets)


def off(rows: Sequence[Row], sets: Sets, layers: Layers) -> tuple[np.ndarray, np.ndarray]:
    """Predicted by measured, of each row: time and memory."""
    p, measured = arrays(rows)
    parts = np.ones((2, len(rows)))
    families = np.array([" ".join(family_of(row)) for row in rows])
    for family, known in layers.items():
        at = np.flatnonzero(families == family)
        if len(at):
            parts[:, at] = factors_of(known).at(p.take(at))
    each = [of(sets, row) for row in rows]
    cost = step(p, Constants(**{name: np.array([one[name] for one in each]) for name in NAMES}), *parts)
    return cost.time / measured.times, cost.read / measured.memories


def held_out(rows: Sequence[Row], sources: Sequence[str], groups: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """`off`, each row by constants that were fitted without its group."""
    times, memories = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    each = sorted(set(groups))
    outs = [[i for i, g in enumerate(groups) if g == group] for group in each]
    rests = [[i for i, g in enumerate(groups) if g != group] for group in each]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        fits = pool.map(fit_sets, [[rows[i] for i in rest] for rest in rests], [[sources[i] for i in rest] for rest in rests])  # fmt: skip
        for number, (out, sets) in enumerate(zip(outs, fits, strict=True), 1):
            layers = layers_of([rows[i] for i in rests[number - 1]], sets)
            times[out], memories[out] = off([rows[i] for i in out], sets, layers)
            print(f"  without group {number} of {len(each)}: {len(out)} rows", file=sys.stderr, flush=True)
    return times, memories


def model_of(row: Row) -> tuple[float, ...]:
    return tuple(round(row.point[name]) for name in ("layers", "hidden", "ffn", "experts"))


def folds_of(rows: Sequence[Row]) -> list[int]:
    """Folds that no model is in two of; the largest models (by rows) are spread first."""
    models = [model_of(row) for row in rows]
    order = sorted(set(models), key=lambda m: (-models.count(m), m))
    sizes, fold = [0] * FOLDS, {}
    for model in order:
        fold[model] = int(np.argmin(sizes))
        sizes[fold[model]] += models.count(model)
    return [fold[model] for model in models]


Ratios = tuple[np.ndarray, np.ndarray]


def spreads(rows: Sequence[Row], sources: Sequence[str], by_model: Ratios, by_source: Ratios) -> Sets:
    """SPREADS, of what was measured by what was predicted: of all rows without their source; of Megatron's tests, which no other source
    is like, without the row's model. And of the times of sources that nobody had looked at when they were predicted (unseen.py): these are further
    off than any whose table was in sight when formulas were made. Not of their memories, whose programs keep what no row says: what is offered to a
    program that is known must fit by its upper bound.

    It is 90% of these times that an interval holds. Of memories, which few sources tell, n rows of a source count as its 1 / sqrt(n) each: runs of one
    are off alike, and the next table's may be a new source's. So counted a time's interval would be 0.68 to 2.46, which holds nearly all that is
    published (docs/log.md). One more than there are, as wide as the widest: the next row is as likely to be it (weighted conformal prediction,
    Tibshirani et al. 2019, arXiv 1904.06019, lemma 3).
    """
    names, tests = np.array(sources), np.array([row.framework == TESTS for row in rows])
    found: Sets = {}
    for name, at, ratios in ((DEFAULT, ~tests, by_source), (TESTS, tests, by_model)):
        found[name] = {}
        for kind, one in zip(("time", "memory"), ratios, strict=True):
            told = at & np.isfinite(one)
            if told.sum() < 16:
                continue
            _, place, times = np.unique(names[told], return_inverse=True, return_counts=True)
            logs, weights = -np.log(one[told]), times[place] ** (-0.5 if kind == "memory" else 0.0)
            if name == DEFAULT and kind == "time":
                logs = np.concatenate([logs, -np.log(unseen.ratios(kind)[1])])
                weights = np.ones(len(logs))
            level = max(0.05 - 0.95 * (weights**2).sum() / weights.sum() ** 2, 0.0)
            for word, share in (("low", level), ("high", 1 - level)):
                found[name][f"{kind}_{word}"] = float(f"{np.exp(_quantile(logs, weights, share)):.4g}")
    return found


def of_soli() -> dict[str, float]:
    """SPREADS of soli's memory: of what was rehearsed, and what a GPU took, by what formulas say (memory-formulas.json, gpu.json); above it
    what the engine leaves to allocators."""
    plans = json.loads((RESULTS / "memory-formulas.json").read_text(encoding="utf-8"))["rows"]
    runs = json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))["rows"]
    ratios = [row["rehearsed"] / row["formula"] for row in plans] + [
        row["taken"] / row["said"] for row in runs if row["said"]
    ]
    low, high = np.quantile(ratios, (0.05, 0.95))
    return {"memory_low": float(f"{low:.4g}"), "memory_high": float(f"{HEADROOM * high:.4g}")}


def _quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """So much of the weight is below it."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(share * weights.sum(), below, values[order]))


def write_layers(layers: Layers) -> None:
    lines = [
        "# How far the law is off at shapes whose layers published runs measured, by framework and generation; `make fit-planner` writes it.",
        "# Tokens a microbatch, hidden size, width of attention, of the MLP (both halves of a gated one), tp; by what the law's time of",
        "# the layers is to be multiplied, and that of the tables: embeddings, head, loss.",
    ]
    for name, known in layers.items():
        rows = [f"    [{', '.join(f'{round(x)}' for x in one[:5])}, {one[5]:.4f}, {one[6]:.4f}]," for one in known]
        lines += ["", f'["{name}"]', "layers = [", *rows, "]"]
    LAYERS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_constants(sets: Sets, of_sets: Sets, counts: dict[str, int]) -> None:
    lines = [
        "# What is fitted: constants of the cost model by framework and generation; `make fit-planner` writes it.",
        "# Names: soli/planner/cost/meanings.toml. Of published measurements: benchmarks/published, `rows` of them.",
        "# time_low ... memory_high: 90% of rows whose model or source was not fitted were measured between low and high,",
        "# by what was predicted; near: by how much two plans of a sweep are off beside each other, the median. Sets of no rows are sums of",
        "# their framework's and their generation's parts. soli's memory is",
        "# between those by what was rehearsed and taken: benchmarks/results/memory-formulas.json, gpu.json.",
    ]
    for name, values in sets.items():
        parent = DEFAULT if " " not in name else name.rsplit(" ", 1)[0]
        said = {k: v for k, v in values.items() if name == DEFAULT or v != sets[parent][k]} | of_sets.get(name, {})
        lines += ["", f'["{name}"]', f"rows = {counts[name]}", *(f"{key} = {value!r}" for key, value in said.items())]
    lines += ["", '["soli"]', *(f"{key} = {value!r}" for key, value in of_soli().items())]
    CONSTANTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


# --- validating -------------------------------------------------------------------------------------------


def errors(ratio: np.ndarray) -> dict[str, float]:
    """Of predicted by measured."""
    ratio = ratio[np.isfinite(ratio)]
    if not len(ratio):
        return {"rows": 0}
    error = np.abs(ratio - 1)
    numbers = {
        "mean": error.mean(), "median": np.median(error), "p90": np.quantile(error, 0.9), "bias": (ratio - 1).mean(),
    }  # fmt: skip
    return {"rows": len(ratio), **{key: round(float(value), 4) for key, value in numbers.items()}}


def sweeps(rows: Sequence[Row], sources: Sequence[str], least: int) -> list[list[int]]:
    """Rows of one workload: the same model, batch, sequence, devices and program, under so many plans that differ."""
    names = ("layers", "hidden", "ffn", "experts", "seq", "global_batch", "peak", "low", "frozen")
    groups: dict[Any, dict[Any, int]] = {}
    for i, row in enumerate(rows):
        if row.time is not None:
            devices = row.point["tp"] * row.point["pp"] * row.point["cp"] * row.point["dp"]
            key = (sources[i], row.framework, devices, *(row.point[name] for name in names))
            groups.setdefault(key, {}).setdefault(tuple(row.point.values()), i)  # measured again: the first counts
    return [list(group.values()) for group in groups.values() if len(group) >= least]


def between(rows: Sequence[Row], sources: Sequence[str], ratio: np.ndarray) -> float:
    """By how much two plans of a sweep are off beside each other: the median of sweeps' medians. Tests' times say nothing of it."""
    found = []
    for group in sweeps(rows, sources, 3):
        logs = np.log(ratio[group])
        if rows[group[0]].framework != TESTS and np.isfinite(logs).all():
            found.append(np.median(np.abs(logs[:, None] - logs)[np.triu_indices(len(group), 1)]))
    return float(f"{np.exp(np.median(found)) - 1:.3g}")


def ranking(rows: Sequence[Row], ratio: np.ndarray, groups: Iterable[Sequence[int]]) -> dict[str, Any]:
    """Rank correlation within sweeps, and regret: the best measured of the first k by prediction, over the best; and of the
    simplest that is near to the first, which `soli plan` names."""
    correlations, regrets, simple = [], {1: [], 3: [], 5: []}, []
    near = 1 + spread_of(DEFAULT)["near"]
    for group in groups:
        measured = np.array([rows[i].time for i in group])
        predicted = measured * ratio[list(group)]
        if np.ptp(measured) and np.ptp(predicted):
            correlations.append(spearmanr(measured, predicted).statistic)
        order = np.argsort(predicted, kind="stable")
        for k, found in regrets.items():
            found.append(measured[order[:k]].min() / measured.min() - 1)
        close = order[predicted[order] <= predicted.min() * near]
        first = close[np.argmin(chosen(arrays([rows[group[i]] for i in close])[0]))]
        simple.append(measured[first] / measured.min() - 1)
    said: dict[str, Any] = {"sweeps": len(correlations)}
    if correlations:
        said["rank correlation"] = round(float(np.mean(correlations)), 3)
        for k, found in regrets.items():
            said[f"regret@{k}"] = [round(float(np.mean(found)), 4), round(float(np.max(found)), 4)]
        said["regret of the simplest"] = [round(float(np.mean(simple)), 4), round(float(np.max(simple)), 4)]
    return said


def calibrated(rows: Sequence[Row], sets: Sets) -> list[dict[str, Any]]:
    """48 rows are measured, the others predicted: law and factors. `sets`: fitted without any of these rows."""
    p, measured = arrays(rows)
    groups = sweeps(rows, ["one"] * len(rows), 10)
    found = []
    for seed in range(SEEDS):
        known = np.random.default_rng(seed).choice(len(rows), CALIBRATION, replace=False)
        learnt = learn_family([rows[i] for i in known], of(sets, rows[0]))
        ratio = step(p, repeated(learnt.constants, len(rows)), *learnt.factors.at(p)).time / measured.times
        rest = np.setdiff1d(np.arange(len(rows)), known)
        found.append({"seed": seed, **errors(ratio[rest]), **ranking(rows, ratio, groups)})
    return found


def covered(
    rows: Sequence[Row],
    sources: Sequence[str],
    by: tuple[Ratios, Ratios],
    judged: Ratios,
    groups: Sequence[Any],
    kind: int,
) -> dict[int, bool]:
    """Of each row whether its measured time (kind 0) or memory (1) lies in an interval that was made without its group.

    `by`: ratios without the row's model and without its source. `judged`: those that are looked at."""
    inside: dict[int, bool] = {}
    for group in sorted(set(groups)):
        rest = [i for i, g in enumerate(groups) if g != group]
        part = [tuple(one[rest] for one in ratios) for ratios in by]
        made = spreads([rows[i] for i in rest], [sources[i] for i in rest], *part)
        for i in (i for i, g in enumerate(groups) if g == group and np.isfinite(judged[kind][i])):
            word = ("time", "memory")[kind]
            spread = SPREADS | made[DEFAULT] | made.get(rows[i].framework, {})
            inside[i] = bool(spread[f"{word}_low"] <= 1 / judged[kind][i] <= spread[f"{word}_high"])
    return inside


def fitting(tables: Sequence[Table]) -> dict[str, list[int]]:
    """Of each table: runs that ran, and of these those that are called infeasible; that ran out of memory, and of these those called
    feasible. By the constants that are shipped."""
    found = {}
    for table in tables:
        said = [
            (one.feasible, row.fits)
            for one, row in zip(predict(table.raw), table.rows, strict=True)
            if one.refused is None and usable(row)
        ]
        ran, out = [f for f, fits in said if fits], [f for f, fits in said if not fits]
        found[table.name] = [len(ran), ran.count(False), len(out), out.count(True)]
    return found


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="write constants.toml")
    parser.add_argument("--validate", action="store_true", help="write results/planner.json and planner.md")
    args = parser.parse_args()
    if not (args.fit or args.validate):
        parser.error("say --fit, --validate or both")
    tables = [Table(name) for name in TABLES]
    kept = [(row, table.name) for table in tables for row in table.rows if not row.refused and usable(row)]
    rows, sources = [row for row, _ in kept], [source for _, source in kept]
    folds = folds_of(rows)
    print(f"{len(rows)} measured rows, without their models:", file=sys.stderr)
    by_model = held_out(rows, sources, folds)
    print("without their sources:", file=sys.stderr)
    by_source = held_out(rows, sources, [sorted(set(sources)).index(source) for source in sources])
    sets = fit_sets(rows, sources)
    layers = layers_of(rows, sets)
    if args.fit:
        counts = {name: sum(name in chain(*family_of(row)) for row in rows) for name in sets}
        wide = spreads(rows, sources, by_model, by_source)
        wide[DEFAULT]["near"] = between(rows, sources, off(rows, sets, layers)[0])
        write_constants(sets, wide, counts)
        write_layers(layers)
        constants.sets.cache_clear()
        published.cache_clear()
    if args.validate:
        both = by_model, by_source
        within = {}
        for kind, word in enumerate(("time", "memory")):
            for left, judged, groups in (("model", by_model, folds), ("source", by_source, sources)):
                inside = covered(rows, sources, both, judged, groups, kind)
                other = [held for i, held in inside.items() if rows[i].framework != TESTS]
                within[f"{word}, {left} left out"] = round(float(np.mean(list(inside.values()))), 3)
                within[f"{word}, {left} left out, but tests"] = round(float(np.mean(other)), 3)
        write(tables, rows, sources, off(rows, sets, layers), by_model, by_source, within)
    return 0


def usable(row: Row) -> bool:
    """Whether anything of it was measured."""
    return row.time is not None or row.memory is not None or not row.fits


def complete(row: Row) -> bool:
    """Whether its model, batch, devices and recomputation are said; what is nearly always so may be left out."""
    return all(word.startswith(USUAL) for word in row.inferred)


def write(
    tables: Sequence[Table],
    rows: Sequence[Row],
    sources: Sequence[str],
    inside: tuple[np.ndarray, np.ndarray],
    by_model: tuple[np.ndarray, np.ndarray],
    by_source: tuple[np.ndarray, np.ndarray],
    coverage: dict[str, float],
) -> None:
    kinds: dict[str, tuple[np.ndarray, np.ndarray]] = {
        "fitted": inside, "model left out": by_model, "source left out": by_source,
    }  # fmt: skip
    names = np.array(sources)
    result: dict[str, Any] = {**record.head(), "tables": {}, "coverage of 90%": coverage, "fits": fitting(tables)}
    result["unseen"] = {**unseen.told(spread_of(DEFAULT)), "fits": unseen.choices()}
    choices: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = [
        (table.name, lambda at, name=table.name: at == name) for table in tables
    ]
    whole = np.array([complete(row) for row in rows])
    choices.append(("all but tests", lambda at: at != "megatron_ci_golden_values"))
    choices.append(("all but tests, complete", lambda at: (at != "megatron_ci_golden_values") & whole))
    for name, taken in choices:
        at = taken(names)
        entry: dict[str, Any] = {
            kind: {"time": errors(found[0][at]), "memory": errors(found[1][at])} for kind, found in kinds.items()
        }
        index = np.flatnonzero(at)
        groups = [g for g in sweeps(rows, sources, 3) if set(g) <= set(index.tolist())]
        entry["sweeps"] = {kind: ranking(rows, found[0], groups) for kind, found in kinds.items()}
        table = next((t for t in tables if t.name == name), None)
        if table is not None:
            reasons = [reason for row in table.rows for reason in row.refused]
            entry["refused"] = {reason: reasons.count(reason) for reason in sorted(set(reasons))}
            entry["not measured"] = sum(not row.refused and not usable(row) for row in table.rows)
        result["tables"][name] = entry
    vtrain = [row for row, source in zip(rows, sources, strict=True) if source == "planner_vtrain_single"]
    others = [(row, s) for row, s in zip(rows, sources, strict=True) if s != "planner_vtrain_single"]
    without = fit_sets([row for row, _ in others], [s for _, s in others])
    result["vtrain, 48 rows measured"] = calibrated(vtrain, without)
    raw = next(table.raw for table in tables if table.name == "planner_vtrain_single")
    theirs = np.array([float(one["calculon_predicted_ms"]) / float(one["measured_ms"]) for one in raw])
    groups = sweeps(vtrain, ["one"] * len(vtrain), 10)
    result["vtrain, calculon"] = {**errors(theirs), **ranking(vtrain, theirs, groups)}
    record.write(result, page(result), HERE / "results" / "planner")
    print(page(result))


def page(result: dict[str, Any]) -> str:
    """The result for people."""
    head = "| table | rows | " + " | ".join(f"{kind}: mean, median, p90, bias" for kind in KINDS) + " |"
    lines = [
        "# The planner against published measurements", "",
        "Errors of predicted times and memories, in percent of what was measured. Made by `make validate-planner` from",
        "the tables in [published](../published); a row of a model, or of a source, that was left out is predicted by",
        "constants that were fitted without it. `megatron_ci_golden_values` are test runs of toy models on shared",
        "machines; `all but tests` leaves them out. `complete` rows say their layers, width, microbatch, devices and what they",
        "recompute, and their times were not read by eye. Where models of several depths were measured at a shape, layers.toml",
        "has what its layers took: without a model its other depths still tell it, without a source nobody does.", "",
    ]  # fmt: skip
    for what in ("time", "memory"):
        lines += [f"## {what.capitalize()}", "", head, "|---" * (2 + len(KINDS)) + "|"]
        for name, entry in result["tables"].items():
            found = [entry[kind][what] for kind in KINDS]
            if found[0]["rows"]:
                lines.append(f"| {name} | {found[0]['rows']} | " + " | ".join(map(_said, found)) + " |")
        lines.append("")
    inside = ", ".join(f"{name} {value:.1%}" for name, value in result["coverage of 90%"].items())
    lines += [f"Measured inside the 90% interval (made without the row's model, or source): {inside}.", ""]
    lines += of_unseen(result["unseen"])
    lines += [
        "## What fits",
        "",
        "By the shipped constants: runs that ran and are called infeasible, runs that ran out of memory and are called feasible.",
        "",
    ]
    lines += ["| table | ran | called infeasible | out of memory | called feasible |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(map(str, counts))} |" for name, counts in result["fits"].items()]
    lines.append("")
    lines += ["## Choosing: sweeps of one workload under three plans or more", ""]
    lines += ["Regret: how much longer than the best plan the best of the first k takes; mean and worst.", ""]
    lines += ["| table | constants | sweeps | rank correlation | regret@1 | @3 | @5 |", "|---" * 7 + "|"]
    for name, entry in result["tables"].items():
        for kind in KINDS:
            found = entry["sweeps"][kind]
            if found["sweeps"]:
                lines.append(f"| {name} | {kind} | {_ranked(found)} |")
    lines += ["", f"## vTrain's single servers, {CALIBRATION} rows measured", ""]
    lines += [
        "The law from the other tables, fitted to 48 rows, with factors of their shapes; the others predicted. And what calculon says of all rows, as the table has it.",
        "",
    ]
    lines += [
        "| seed | rows | mean, median, p90, bias | sweeps of 10 and more | rank correlation | regret@1 | @3 | @5 |",
        "|---" * 8 + "|",
    ]
    runs, theirs = result["vtrain, 48 rows measured"], result["vtrain, calculon"]
    lines += [f"| {run['seed']} | {run['rows']} | {_said(run)} | {_ranked(run)} |" for run in runs]
    lines.append(f"| calculon | {theirs['rows']} | {_said(theirs)} | {_ranked(theirs)} |")
    lines += [
        "",
        f"Mean of the seeds: {100 * np.mean([run['mean'] for run in runs]):.2f}%.",
        "",
        "## Rows that say too little",
        "",
        *(f"- {name}: no table of runs: {why}" for name, why in NO_RUNS.items()),
    ]
    for name, entry in result["tables"].items():
        lines += [f"- {name}: {count} x {reason}" for reason, count in entry.get("refused", {}).items()]
        if entry.get("not measured"):
            lines.append(f"- {name}: {entry['not measured']} rows have neither a time nor a memory")
    return "\n".join(lines) + "\n"


def of_unseen(found: dict[str, Any]) -> list[str]:
    """What is said of sources that nobody had looked at."""
    ran, infeasible, out, feasible = found["fits"]
    head = "| | rows | sources | mean, median, p90, bias | in today's interval | by source |"
    return [
        "## Sources that nobody had looked at", "",
        "What was predicted of their runs before anything was changed for them ([unseen.csv](../unseen.csv)); the tables above were in sight when formulas",
        "were made. Intervals of times are made of both.", "", head, "|---" * 6 + "|",
        *(
            f"| {kind} | {one['rows']} | {one['sources']} | {_said(one)} | {one['inside']:.0%} | {one['inside by source']:.0%} |"
            for kind, one in ((kind, found[kind]) for kind in ("time", "memory"))
        ), "",
        f"Of {ran} that ran {infeasible} were called infeasible, of {out} that ran out of memory {feasible} feasible.", "",
    ]  # fmt: skip


KINDS = ("fitted", "model left out", "source left out")


def _said(found: dict[str, float]) -> str:
    return ", ".join(f"{100 * found[key]:+.1f}" if key == "bias" else f"{100 * found[key]:.1f}" for key in ("mean", "median", "p90", "bias"))  # fmt: skip


def _ranked(found: dict[str, Any]) -> str:
    regrets = (f"{100 * mean:.2f}%, {100 * worst:.1f}%" for mean, worst in (found[f"regret@{k}"] for k in (1, 3, 5)))
    return " | ".join((str(found["sweeps"]), f"{found['rank correlation']:.3f}", *regrets))


if __name__ == "__main__":
    sys.exit(main())

"""From the rounds' records to rows, and from rows to a Markdown table. No measuring here."""

import statistics

from entries import BASELINES, ENTRIES

LOSS_TOLERANCE = 1e-4
MIB = 2**20
HEAD = (
    "| entry | stage | step ms | CPU ms | RSS imported | RSS peak | ratio | against | loss diff | verdict |",
    "|---|---|---:|---:|---:|---:|---:|---|---:|---|",
)


def digest(records: list[dict]) -> dict:
    """One run of one entry: the slowest rank of every step, the mean loss, the CPU time of all ranks."""
    steps = [max(times) for times in zip(*(r["step_s"] for r in records), strict=True)]
    cpu = [sum(times) for times in zip(*(r["cpu_s"] for r in records), strict=True)]
    losses = [statistics.fmean(values) for values in zip(*(r["losses"] for r in records), strict=True)]
    return {
        "step_ms": 1e3 * statistics.median(steps),
        "fastest_step_ms": 1e3 * min(steps),
        "cpu_ms": 1e3 * statistics.median(cpu),
        "losses": losses,
        "rss_imported_mib": [round(r["rss_imported"] / MIB) for r in records],
        "rss_built_mib": [round(r["rss_built"] / MIB) for r in records],
        "rss_peak_mib": [round(r["rss_peak"] / MIB) for r in records],
    }


def loss_difference(losses: list[float], reference: list[float]) -> float:
    """The largest difference of a step's loss from the one-process program's."""
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))


def rows(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """One row an entry from its rounds. A round that failed is in the row as an error, never left out."""
    losses = {name: next((r["losses"] for r in rounds if "losses" in r), None) for name, rounds in runs.items()}
    table = {name: row(name, rounds, losses[ENTRIES[name].reference]) for name, rounds in runs.items()}
    for name, entry in table.items():
        stage = ENTRIES[name].stage
        against = [b for b in BASELINES[stage] if table.get(b, {}).get("step_ms")]
        if "step_ms" not in entry or not against:
            continue
        best = min(against, key=lambda b: table[b]["step_ms"]["median"])
        # paired by round, so that the machine's slow drift cancels
        ratios = [
            a["step_ms"] / b["step_ms"]
            for a, b in zip(runs[name], runs[best], strict=True)
            if "step_ms" in a and "step_ms" in b
        ]
        if ratios:
            entry["against"], entry["ratio"] = best, spread(ratios)
    return table


def row(name: str, rounds: list[dict], reference: list[float] | None) -> dict:
    """The medians over the rounds of one entry and what is to be said about it."""
    entry = ENTRIES[name]
    base = {"system": entry.system, "stage": entry.stage, "ranks": entry.world, "by_hand": entry.by_hand}
    good = [r for r in rounds if "step_ms" in r]
    failures = [r["error"] for r in rounds if "error" in r]
    if not good:
        skipped = all(r.get("skipped") for r in rounds)
        return {**base, "verdict": f"{'not run' if skipped else 'FAILED'}: {failures[0]}"}
    verdict = "ok"
    difference = None
    if reference is None:
        verdict = "losses not checked: the one-process reference did not run"
    else:
        difference = max(loss_difference(r["losses"], reference) for r in good)
        # written so that a NaN is WRONG too
        verdict = "ok" if difference <= LOSS_TOLERANCE else "WRONG"
    if failures:
        verdict += f"; {len(failures)} of {len(rounds)} rounds failed: {failures[0]}"
    return {
        **base,
        "verdict": verdict,
        "loss_difference": difference,
        "step_ms": spread([r["step_ms"] for r in good]),
        "cpu_ms": spread([r["cpu_ms"] for r in good]),
        **{f"rss_{k}_mib": max(max(r[f"rss_{k}_mib"]) for r in good) for k in ("imported", "built", "peak")},
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}


def markdown(result: dict) -> str:
    """The page: how it was measured, then one table a size."""
    about, noise = result["machine"], result["noise"]
    lines = [
        "# Step time: soli, PyTorch by hand, and the peers, on CPU",
        "",
        f"{result['date']}, `{result['command']}`",
        "",
        f"{about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}; "
        + ", ".join(f"{k} {v}" for k, v in result["versions"].items()) + ".",
        f"Fresh launch a run, one thread a rank, {result['warmup']} warm-up and {result['steps']} timed "
        f"steps, {result['rounds']} alternating rounds. Noise during the runs: the host stole "
        f"{noise['steal']:.1%} of the cores' time, other programs took {noise['others']:.1%}; rounds "
        f"of one entry differed by {noise['round_spread']:.1%} (median of (max - min) / median).",
        "",
        "step: milliseconds, median over the rounds of each round's median step (slowest rank), [min, max] "
        "of the rounds. CPU: milliseconds of all ranks. RSS: MiB of the largest rank after importing "
        "and its peak during the steps. ratio: against the fastest hand-written layout of the stage, paired "
        "by round.",
    ]  # fmt: skip
    for size, table in result["sizes"].items():
        lines += ["", f"## {size}", "", *HEAD]
        lines += [line(name, entry) for name, entry in table.items()]
    return "\n".join(lines) + "\n"


def line(name: str, row: dict) -> str:
    """One row of the table."""
    verdict = row["verdict"].replace("|", "/")
    if "step_ms" not in row:
        return f"| {name} | {row['stage']} | | | | | | | | {verdict} |"
    step, ratio, difference = row["step_ms"], row.get("ratio"), row["loss_difference"]
    shown = f"{ratio['median']:.3f} [{ratio['min']:.2f}, {ratio['max']:.2f}]" if ratio else ""
    return (
        f"| {name} | {row['stage']} | {step['median']:.0f} [{step['min']:.0f}, {step['max']:.0f}] "
        f"| {row['cpu_ms']['median']:.0f} | {row['rss_imported_mib']} | {row['rss_peak_mib']} | {shown} "
        f"| {row.get('against', '')} | {'' if difference is None else f'{difference:.1e}'} | {verdict} |"
    )

"""From the ranks' records to rows, and from rows to a page. No measuring here."""

import os
import statistics

import paper

LOSS_TOLERANCE = 1e-4
HEAD = (
    "| plan | step ms | wire ms | over unshaped | CPU ms | busy | MB sent a link, a step | loss diff | |",
    "|---|---:|---:|---:|---:|---:|---|---:|---|",
)


def rows(ranks: list[dict[str, dict]]) -> dict[str, dict]:
    """One row a plan from every rank's record of it."""
    found: dict[str, dict] = {}
    for plan, first in ranks[0].items():
        found[plan] = first if "error" in first else row([rank[plan] for rank in ranks])
    return found


def row(ranks: list[dict]) -> dict:
    """Milliseconds of the slowest rank, CPU of all, and the bytes of each rank's host, over the rounds."""
    rounds = [slowest_and_cpu(turns) for turns in zip(*(r["turns"] for r in ranks), strict=True)]
    return {
        "step_ms": paper.spread([step for step, _ in rounds]),
        "cpu_ms": paper.spread([cpu for _, cpu in rounds]),
        "sent": [round(statistics.median(turn["tx"] for turn in r["turns"])) for r in ranks],
        "received": [round(statistics.median(turn["rx"] for turn in r["turns"])) for r in ranks],
        "losses": [statistics.fmean(values) for values in zip(*(r["losses"] for r in ranks), strict=True)],
        "raw_step_ms": [round(step, 4) for step, _ in rounds],
    }


def slowest_and_cpu(turns: tuple[dict, ...]) -> tuple[float, float]:
    """The medians over one turn's steps, in ms: the slowest rank's time, and the CPU time of all ranks."""
    walls = [max(times) for times in zip(*(t["step_s"] for t in turns), strict=True)]
    cpus = [sum(times) for times in zip(*(t["cpu_s"] for t in turns), strict=True)]
    return 1e3 * statistics.median(walls), 1e3 * statistics.median(cpus)


def compare(labs: list[dict]) -> None:
    """Complete the rows of all labs in place by what they are beside each other.

    wire_ms: what the bytes of the busiest link take at its rate, the least that a step can be. over_unshaped:
    how much longer the step is than on links as fast as the kernel, without latency. busy: the ranks' CPU time over that of
    all cores. loss_difference: from the first plan that ran, at the same step.
    """
    cores = len(os.sched_getaffinity(0))
    for one in labs:
        free = next((o for o in labs if o["mbit"] is None and o["latency_ms"] == 0), None)
        good = {plan: row for plan, row in one["plans"].items() if "step_ms" in row}
        reference: list[float] = next((row["losses"] for row in good.values()), [])
        for plan, row in good.items():
            step = row["step_ms"]["median"]
            row["busy"] = round(row["cpu_ms"]["median"] / cores / step, 3)
            pairs = zip(row["losses"], reference, strict=True)
            row["loss_difference"] = max(abs(a - b) for a, b in pairs)
            row["verdict"] = "ok" if row["loss_difference"] <= LOSS_TOLERANCE else "WRONG"  # NaN is wrong too
            if one["mbit"] is not None:
                row["wire_ms"] = round(max(*row["sent"], *row["received"]) * 8 / 1e3 / one["mbit"], 2)
            base = None if free is None or free is one else free["plans"].get(plan, {}).get("step_ms")
            if base is not None:
                row["over_unshaped_ms"] = round(step - base["median"], 2)


def markdown(result: dict) -> str:
    """The page: how it was measured, all labs beside each other, then one table a lab."""
    size = result["size"]
    lines = [
        "# Step time of soli's plans over slow links",
        "",
        *paper.origin(result),
        f"A GPT of {size['layers']} layers, width {size['width']}, {size['heads']} heads, vocabulary "
        f"{size['vocabulary']}; {size['batch']} rows of {size['tokens']} tokens a step. Backend {result['backend']}, "
        f"one thread a rank, {result['rounds']} alternating rounds of {result['warmup']} warm-up and "
        f"{result['steps']} timed steps.",
        "",
        "step: milliseconds, the median over the rounds of each round's median step (slowest rank), [min, max] of "
        "the rounds. wire: what the bytes of the busiest link take at its rate. over unshaped: how much longer the "
        "step is than on links without shapers. CPU: of all ranks. busy: that, as a part of all cores' time; near 100% the "
        "step is a matter of this machine's cores and not of the network.",
        "",
        "## Step ms",
        "",
        *overview(result["labs"]),
    ]
    for one in result["labs"]:
        each = f"{one['hosts']} hosts of {one['per_host']} ranks, {one['rate']}, {one['latency_ms']:g} ms one way"
        lines += ["", f"## {each}", ""]
        if "error" in one:
            lines.append(one["error"])
            continue
        lines += [*HEAD, *(line(plan, row) for plan, row in one["plans"].items())]
        if one["network"]["dropped"]:
            lines += [
                "",
                f"The shapers dropped {one['network']['dropped']} frames: times are those of a network with loss.",
            ]
    return "\n".join(lines) + "\n"


def overview(labs: list[dict]) -> list[str]:
    """Plans down, labs across, median steps."""
    labels = [f"{one['rate']}, {one['latency_ms']:g} ms" for one in labs]
    plans = dict.fromkeys(plan for one in labs for plan in one["plans"])
    lines = ["| plan | " + " | ".join(labels) + " |", "|---|" + "---:|" * len(labs)]
    for plan in plans:
        cells = [one["plans"].get(plan, {}).get("step_ms", {}).get("median") for one in labs]
        lines.append(f"| {plan} | " + " | ".join("" if c is None else f"{c:.0f}" for c in cells) + " |")
    return lines


def line(plan: str, row: dict) -> str:
    """One row of a lab's table."""
    if "error" in row:
        return f"| {plan} | | | | | | | | {row['error'].replace('|', '/')} |"
    wire = f"{row['wire_ms']:.0f}" if "wire_ms" in row else ""
    over = f"{row['over_unshaped_ms']:.0f}" if "over_unshaped_ms" in row else ""
    sent = ", ".join(f"{count / 1e6:.2f}" for count in row["sent"])
    return (
        f"| {plan} | {paper.between(row['step_ms'])} | {wire} | {over} | {row['cpu_ms']['median']:.0f} "
        f"| {row['busy']:.0%} | {sent} "
        f"| {row['loss_difference']:.1e} | {row['verdict']} |"
    )

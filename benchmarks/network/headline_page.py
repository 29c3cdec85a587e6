"""headline.py's page, and the forms alone for more ranks than can be measured."""

import statistics
from dataclasses import dataclass

import forms
from network import spell
from paper import record

from soli.core.plan import Plan
from soli.planner.legality import resolve

BEYOND = (64, 512, 1024, 4096)
TOKENS_TO_WIDTH = (16, 4, 1)
KINDS = {"1d": "1D", "2d": "2D", "2.5d": "2.5D", "3d": "3D", "dp": "data parallel"}


@dataclass(frozen=True)
class Machine:
    """An accelerator and its link, for the forms alone."""

    flops: float = 150e12  # that products reach, of 312 in bfloat16 (A100's data sheet)
    rate: float = 12.5e9  # bytes a second, 100 Gbit/s, of each accelerator, in each direction
    latency: float = 10e-6  # seconds a message
    element: int = 2  # bytes


LARGE = {"layers": 32, "width": 8192, "vocabulary": 32768}


def beyond() -> list[dict]:
    """For each number of ranks and of tokens: the fastest plan of each kind, by the forms. Nothing here is measured."""
    machine, found = Machine(), []
    for ranks in BEYOND:
        for ratio in TOKENS_TO_WIDTH:
            size = forms.Size(**LARGE, tokens=128, batch=ratio * LARGE["width"] // 128)
            best: dict[str, dict] = {}
            for text in shapes(ranks):
                plan = resolve(Plan.parse(text), ranks)
                sent = machine.element * forms.sent(plan, size) / machine.rate
                waits = machine.latency * forms.rounds(plan, size)
                step = size.flops / ranks / machine.flops + sent + waits
                row = {"plan": text, "step_ms": 1e3 * step, "sent_ms": 1e3 * sent, "latency_ms": 1e3 * waits}
                kind = "dp" if text.startswith("dp") else plan.tensor
                if kind not in best or step < best[kind]["step_ms"] / 1e3:
                    best[kind] = {name: v if isinstance(v, str) else round(v, 3) for name, v in row.items()}
            found.append({"ranks": ranks, "tokens_to_width": ratio, "kinds": best})
    return found


def shapes(ranks: int) -> list[str]:
    """The plans that are compared: each kind in all its shapes."""
    powers = [2**i for i in range(1, ranks.bit_length()) if ranks % 2**i == 0]
    found = [f"tp={ranks}", f"tp={ranks},sp=on", f"dp={ranks}"]
    found += [f"tp={ranks},tensor=2d,rows={rows}" for rows in powers if rows < ranks]
    squares = [depth for depth in powers if round((ranks / depth) ** 0.5) ** 2 * depth == ranks and depth < ranks]
    found += [f"tp={ranks},tensor=2.5d,depth={depth}" for depth in squares]
    if round(ranks ** (1 / 3)) ** 3 == ranks:
        found.append(f"tp={ranks},tensor=3d")
    return found


def markdown(result: dict) -> str:
    """What was measured beside the prediction, then what is predicted alone."""
    size, labs = result["size"], result["labs"]
    noise = [one["noise"] for one in labs]
    lines = [
        "# 2D, 2.5D and 3D tensor parallelism against 1D over slow links",
        "",
        record.line(result),
        "",
        f"A GPT of {size['layers']} layers, width {size['width']}, {size['heads']} heads, vocabulary "
        f"{size['vocabulary']}, float32, the same weights and batches under every plan; one rank a host, each with a link "
        "of its own of this rate in each direction, gloo, one thread a rank.",
        "",
        "All ranks share the machine's cores. *computing* is the step on links that are not shaped: computing, and the "
        "kernel's work of sending. It is more than on as many machines, the more so the more is sent. *busy* is the ranks' "
        "CPU time as a part of all cores' time in the step: where it is low, the step is the network's.",
        "",
        "step: seconds, the slowest rank, the median over alternating rounds of one step of each plan [least, most]. forms: *computing* and the bytes that "
        "docs/communication.md derives at the link's rate, nothing overlapping. over 1D: the step of the better of 1D's two "
        "(without and with sp) over this one's, measured, and by the forms. MB: what a rank sends in a step, counted at its "
        "link, and by the forms. "
        + (f"Other programs took {max(n['others'] for n in noise):.1%} of the cores at most." if noise else ""),
        "",
        *errors(labs),
        "",
        "## Measured",
    ]  # fmt: skip
    for ranks, tokens in dict.fromkeys((one["ranks"], one["tokens"]) for one in labs):
        here = [one for one in labs if (one["ranks"], one["tokens"]) == (ranks, tokens)]
        lines += ["", f"### {ranks} ranks, {tokens} tokens a step", "", *table(here)]
    lines += ["", "## Predicted only", "", *predicted(result["beyond"])]
    return "\n".join(lines) + "\n"


def errors(labs: list[dict]) -> list[str]:
    """How well the forms did."""
    rows = [row for one in labs if one["mbit"] is not None for row in one["plans"].values() if "predicted_ms" in row]
    if not rows:
        return []
    off = sorted(abs(row["predicted_ms"] / row["step_ms"]["median"] - 1) for row in rows)
    counted = sorted(abs(row["form_bytes"] / row["sent_bytes"] - 1) for row in rows)
    where = lambda values: (
        f"{statistics.median(values):.1%} in the median, {values[int(0.9 * (len(values) - 1))]:.1%} at the 90th percentile"
    )
    return [f"The forms against {len(rows)} measured rows: bytes off by {where(counted)}; steps by {where(off)}."]


def table(labs: list[dict]) -> list[str]:
    """A line for each plan and rate."""
    lines = [
        "| rate | plan | computing s | MB | forms | step s | forms | busy | over 1D | forms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    free = next((one["plans"] for one in labs if one["mbit"] is None), {})
    for one in labs:
        for plan, row in one["plans"].items() if one["mbit"] is not None else ():
            if "error" in row:
                lines.append(f"| {spell(one['mbit'])} | {plan} | {row['error'].replace('|', '/')} | | | | | | | |")
                continue
            base = f"{free[plan]['step_ms']['median'] / 1e3:.2f}" if "step_ms" in free.get(plan, {}) else ""
            said = f"{row['predicted_ms'] / 1e3:.2f}" if "predicted_ms" in row else ""
            over = f"{row['predicted_over_1d']:.2f}" if "predicted_over_1d" in row else ""
            lines.append(
                f"| {spell(one['mbit'])} | {plan} | {base} | {row['sent_bytes'] / 1e6:.1f} | {row['form_bytes'] / 1e6:.1f} "
                f"| {seconds(row['step_ms'])} | {said} | {row['busy']:.0%} | **{row['over_1d']:.2f}** | {over} |"
            )
    return lines


def seconds(step_ms: dict[str, float]) -> str:
    """A spread of more than one round with its ends."""
    median, least, most = (f"{step_ms[key] / 1e3:.2f}" for key in ("median", "min", "max"))
    return median if least == most else f"{median} [{least}, {most}]"


def predicted(rows: list[dict]) -> list[str]:
    """The forms alone, of accelerators."""
    machine = Machine()
    lines = [
        f"By the forms alone, of {LARGE['layers']} layers of width {LARGE['width']}: accelerators whose products reach "
        f"{machine.flops / 1e12:.0f} TFLOP/s, each with a link of {machine.rate * 8 / 1e9:.0f} Gbit/s, "
        f"{machine.latency * 1e6:.0f} microseconds a message, {machine.element} bytes an element, nothing overlapping. Of "
        "each kind the fastest shape; in brackets how many times faster than 1D. T/H: tokens of the global batch for each "
        "of the width.",
        "",
        "| ranks | T/H | " + " | ".join(f"{name}, ms" for name in KINDS.values()) + " |",
        "|---:|---:|" + "---|" * len(KINDS),
    ]
    for row in rows:
        base, cells = row["kinds"]["1d"]["step_ms"], []
        for kind in KINDS:
            found = row["kinds"].get(kind)
            if found is None:
                cells.append("no such shape")
                continue
            shape = ",".join(found["plan"].split(",")[2:])
            said = f" {shape}" if shape else ""
            cells.append(f"{found['step_ms']:.0f} ({base / found['step_ms']:.2f}){said}")
        lines.append(f"| {row['ranks']} | {row['tokens_to_width']} | " + " | ".join(cells) + " |")
    return lines

"""Bubbles of pipelines: `python benchmarks/pipeline.py`. Writes results/pipeline.json and .md.

Two ranks, the small model, eight microbatches of two rows. For each schedule the share of a step in which ranks wait:
by its own table (a backward costs two forwards, sending nothing), and as measured: one minus the time that the ranks
compute over twice the time from the first action's start to the last one's end, the median step of each round.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import record
from entries import SCHEDULES
from launch import launch

HERE = Path(__file__).resolve().parent
MICROBATCHES, STEPS, WARMUP = 8, 8, 3


def main() -> None:
    """Measure every schedule, alternating."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank-of", help="used by this program itself")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "pipeline")
    args = parser.parse_args()
    if args.rank_of:
        return rank(args.rank_of, args.out)
    runs: dict[str, list[list[dict]]] = {}
    for _ in range(args.rounds):
        for name in SCHEDULES:
            command = [sys.executable, str(HERE / "pipeline.py"), "--rank-of", name]
            outcome = launch(command, 2, 240.0, {"SOLI_BACKEND": "local"})
            if outcome.error:
                raise SystemExit(f"{name}: {outcome.error}")
            runs.setdefault(name, []).append(outcome.records)
            print(f"{name}: ok", flush=True)
    rows = [row(name, rounds) for name, rounds in runs.items()]
    result = {**record.head(), "microbatches": MICROBATCHES, "rows": rows}
    lines = [
        f"{result['date']}, `{result['command']}`, {result['machine']['cores']} cores. Medians of {args.rounds} rounds; "
        f"2 ranks, {MICROBATCHES} microbatches.",
        "",
        "| schedule | bubble, by its table | measured | step ms |",
        "|---|---:|---:|---:|",
        *(f"| {r['schedule']} | {r['table']:.1%} | {r['measured']:.1%} | {r['step_ms']:.0f} |" for r in rows),
    ]
    record.write(result, "\n".join(lines) + "\n", args.out)
    print("\n".join(lines))


def row(name: str, rounds: list[list[dict]]) -> dict:
    """The digest of a schedule: of each round the median step, of those the median."""
    shares, lengths = [], []
    for records in rounds:
        steps = list(zip(*(r["steps"] for r in records), strict=True))
        found = [digest(ranks) for ranks in steps]
        shares.append(statistics.median(share for share, _ in found))
        lengths.append(statistics.median(length for _, length in found))
    first = rounds[0][0]
    last = [r["steps"][-1] for r in rounds[-1]]
    start = min(action[3] for actions in last for action in actions)
    picture = [
        [[kind, stage, number, a - start, b - start] for kind, stage, number, a, b in actions] for actions in last
    ]
    return {
        "schedule": name,
        "plan": first["plan"],
        "table": first["bubble"],
        "measured": statistics.median(shares),
        "step_ms": statistics.median(lengths) * 1000,
        "timeline": picture,
    }


def digest(ranks: tuple[list, ...]) -> tuple[float, float]:
    """(bubble, seconds) of one step."""
    start = min(action[3] for actions in ranks for action in actions)
    stop = max(action[4] for actions in ranks for action in actions)
    busy = sum(action[4] - action[3] for actions in ranks for action in actions)
    return 1 - busy / (len(ranks) * (stop - start)), stop - start


def rank(name: str, out: Path) -> None:
    """One rank: trains some steps and tells what its stages did when."""
    import torch
    import workload
    from entries.soli_engine import loss_fn

    import soli
    from soli.parallel.pipeline import table

    plan = soli.Plan.parse(f"pp=2,microbatches={MICROBATCHES},{SCHEDULES[name]}")
    engine = soli.parallelize(
        workload.build_model("small"),
        loss_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=workload.LEARNING_RATE),
        plan=plan,
    )
    size = workload.SIZES["small"]
    tokens = torch.randint(size.vocabulary, (2 * MICROBATCHES, size.tokens + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}
    steps = []
    for step in range(WARMUP + STEPS):
        engine.step(batch)
        if step >= WARMUP:
            steps.append([[a.kind, a.stage, a.microbatch, a.start, a.stop] for a in engine.pipeline.actions])
    out.write_text(json.dumps({"plan": str(plan), "bubble": table.bubble(plan), "steps": steps}))


if __name__ == "__main__":
    main()

"""Peak memory of ZeRO against its closed form: `python benchmarks/memory.py [--ranks 2 4] [--only ROW ...]`.

fp32 AdamW keeps 16 bytes a parameter: 4 of parameter, 4 of gradient, 8 of Adam's states. With P parameters on
N ranks that is 16P at stage 0, 8P + 8P/N at 1, 4P + 12P/N at 2 and 16P/N at 3, beside transient buffers.
Measured: the peak in steps 2 to 4, over a rank that has imported, initialised and warmed up.
"""

import argparse
import statistics
import sys
from pathlib import Path

import record
from launch import launch

HERE = Path(__file__).resolve().parent
MIB = 2**20
LOSS_TOLERANCE = 1e-4  # relative; as in step-time, a row that computes something else is WRONG
ROWS = {  # name: (what memory_rank.py runs, stage)
    "reference": ("hand:reference", "z0"),
    "ddp": ("hand:ddp", "z0"),
    "zero1-hand": ("hand:zero1", "z1"),
    "fsdp2-noreshard": ("hand:fsdp2-noreshard", "z2"),
    "fsdp2": ("hand:fsdp2", "z3"),
    "soli-z0": ("soli:0", "z0"),
    "soli-z1": ("soli:1", "z1"),
    "soli-z2": ("soli:2", "z2"),
    "soli-z3": ("soli:3", "z3"),
}
# Transient buffers that a layer-by-layer implementation needs, in whole fp32 layers: at stage 2 the gradient
# being reduced and the one being computed; at stage 3 two gathered layers too (in use, prefetched).
TRANSIENT_LAYERS = {"z0": 0, "z1": 0, "z2": 2, "z3": 4}
# glibc keeps freed memory unless told otherwise: one arena, and every tensor a mapping of its own, unmapped
# when freed. With malloc_trim before each reading, what is measured is what is held.
GLOO = {"SOLI_BACKEND": "gloo"}  # in shared memory a rank's resident size counts the pages of the others too
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def closed_form(stage: str, parameters: int, ranks: int) -> float:
    """Bytes a rank, without transient buffers."""
    whole, split = {"z0": (16, 0), "z1": (8, 8), "z2": (4, 12), "z3": (0, 16)}[stage]
    return parameters * (whole + split / ranks)


def main() -> None:
    """Measure every row at every number of ranks and write both files after each."""
    args = arguments()
    parameters = args.layers * args.width**2
    result = {
        **record.head(),
        "malloc": MALLOC,
        "parameters": parameters,
        "layers": args.layers,
        "width": args.width,
        "transient_layers": TRANSIENT_LAYERS,
        "rows": [],
    }
    expected = None
    names = ["reference", *(n for n in ROWS if n != "reference" and (not args.only or n in args.only))]
    for ranks in [1, *args.ranks]:
        for name in names:
            if (name == "reference") != (ranks == 1):
                continue
            row, losses = measure(name, ranks, args, expected)
            if name == "reference":
                expected = losses
            result["rows"].append(row)
            said = row["verdict"] if "growth_mib" not in row else f"{row['growth_mib']:.0f} MiB, {row['verdict']}"
            print(f"{ranks} ranks {name}: {said}", flush=True)
            record.write(result, markdown(result), args.out)
    print(markdown(result))
    print(f"written: {args.out}.json and {args.out}.md")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds after which a run is killed")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "zero-memory", help="without a suffix")
    return parser.parse_args()


def measure(
    name: str, ranks: int, args: argparse.Namespace, expected: list[float] | None
) -> tuple[dict, list[float] | None]:
    """One launch: its row and its losses. The largest rank counts."""
    spec, stage = ROWS[name]
    parameters = args.layers * args.width**2
    formula = closed_form(stage, parameters, ranks)
    transient = 0 if ranks == 1 else TRANSIENT_LAYERS[stage] * 4 * args.width**2
    row = {"row": name, "ranks": ranks, "stage": stage}
    row |= {"formula_mib": formula / MIB, "transient_mib": transient / MIB}
    command = [
        sys.executable, str(HERE / "memory_rank.py"), "--row", spec,
        "--layers", str(args.layers), "--width", str(args.width),
    ]  # fmt: skip
    outcome = launch(command, ranks, args.deadline, MALLOC | GLOO)
    if outcome.error:
        return {**row, "verdict": f"FAILED: {outcome.error}"}, None
    losses = [statistics.fmean(v) for v in zip(*(r["losses"] for r in outcome.records), strict=True)]
    verdict, difference = "losses not checked: the one-process reference did not run", None
    if expected or name == "reference":
        difference = max(abs(a - b) / abs(b) for a, b in zip(losses, expected or losses, strict=True))
        verdict = "ok" if difference <= LOSS_TOLERANCE else "WRONG"
    growth = max(r["growth"] for r in outcome.records)
    row |= {
        "growth_mib": growth / MIB,
        "resident_mib": max(r["resident"] for r in outcome.records) / MIB,
        "base_mib": max(r["base"] for r in outcome.records) / MIB,
        "shared_mib": max(r["shared"] for r in outcome.records) / MIB,
        "over_formula": growth / formula,
        "over_formula_and_transient": growth / (formula + transient),
        "loss_difference": difference,
        "verdict": verdict,
    }
    return row, losses


def markdown(result: dict) -> str:
    """The page."""
    about = result["machine"]
    lines = [
        "# Memory of ZeRO against its closed form",
        "",
        f"{result['date']}, `{result['command']}`",
        "",
        f"{about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}; "
        + ", ".join(f"{k} {v}" for k, v in result["versions"].items()) + ".",
        f"{result['layers']} linear layers of {result['width']} x {result['width']}, "
        f"P = {result['parameters'] / 1e6:.1f} M parameters, fp32, AdamW, 4 rows a step.",
        "",
        "peak: growth of the largest rank's resident memory (VmHWM, reset after step 1) in steps 2 to 4 over "
        "the imported, initialised and warmed-up process; held: what stays after. formula: 16P, 8P + 8P/N, "
        "4P + 12P/N, 16P/N for the stages 0 to 3. transient: whole layers in flight, "
        + ", ".join(f"{k} {v}" for k, v in result["transient_layers"].items())
        + ". Shared memory that a rank has mapped is counted in each rank that maps it, and also shown.",
        "fsdp2-noreshard keeps its shards beside the gathered parameters, 4P/N more than stage 2's formula.",
        "",
        "malloc gives freed memory back at once: "
        + ", ".join(f"{k}={v}" for k, v in result["malloc"].items())
        + ", and malloc_trim before every reading.",
        "",
        "| row | ranks | stage | peak MiB | held MiB | shared MiB | formula MiB | transient MiB "
        "| peak / formula | peak / (formula + transient) | verdict |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]  # fmt: skip
    for r in result["rows"]:
        head = f"| {r['row']} | {r['ranks']} | {r['stage']}"
        forms = f"{r['formula_mib']:.0f} | {r['transient_mib']:.0f}"
        verdict = r["verdict"].replace("|", "/")
        if "growth_mib" not in r:
            lines.append(f"{head} | | | | {forms} | | | {verdict} |")
            continue
        lines.append(
            f"{head} | {r['growth_mib']:.0f} | {r['resident_mib']:.0f} | {r['shared_mib']:.0f} | {forms} "
            f"| {r['over_formula']:.3f} | {r['over_formula_and_transient']:.3f} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

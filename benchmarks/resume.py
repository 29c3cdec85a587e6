"""The figure of law 6: 100 steps straight, and 50, a stop, and 50 in new processes, under the same plan and others.

`python benchmarks/resume.py` -> benchmarks/results/resume.json and .md. A GPT with dropout, a scheduler,
clipping and a ragged last batch, trained by real ranks. Under the same plan the halves must equal the
straight run bitwise: every loss, parameter and optimizer tensor. Under another plan they must be within law 1:
in float64 below parity's bound, in float32 below machine epsilon times depth (verify/tolerance.py).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from pages import write_page, write_rows
from torch import Tensor

from soli import losses
from soli.engine.engine import Engine, parallelize
from soli.models.gpt import GPT, GPTConfig
from soli.verify import tolerance
from soli.verify.parity import BOUND

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from pool import Pool

STEPS, BATCH, ROWS, CONTEXT, VOCAB = 100, 8, 62, 16, 61
RANKS = 4
DEADLINE = 120.0
SAME = ("dp=1", "dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=4,replicate=2,zero=3")
OTHER = (("dp=2,zero=3", "dp=1"), ("dp=1", "dp=2,zero=2"), ("dp=4,replicate=2,zero=2", "dp=3,zero=3"))
Result = tuple[list[float], dict[str, Tensor]]


def model(dtype: torch.dtype) -> GPT:
    """The model of the figure, the same on every call."""
    torch.manual_seed(1)
    config = GPTConfig(vocab=VOCAB, context=CONTEXT, dim=24, layers=2, heads=3, dropout=0.1)
    return GPT(config).to(dtype)


def run(plan: str, dtype: str, until: int, load: str | None, save: str | None) -> Result:
    """Train on every rank up to step `until`, from a checkpoint or from the start; the losses and the state."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(VOCAB, (ROWS, CONTEXT + 1), generator=generator)
    data = [{"tokens": row[:-1], "targets": row[1:]} for row in rows]
    engine: Engine = parallelize(
        model(getattr(torch, dtype)),
        losses.cross_entropy("targets"),
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
        clip=1.0,
        plan=plan,
    )
    if load is not None:
        engine.load(load)
    found = []
    for batch in engine.batches(data, BATCH, epochs=STEPS):
        found.append(float(engine.step(batch)))
        if engine.step_count == until:
            break
    if save is not None:
        engine.save(save)
    return found, engine.global_state_dict(optimizer=True)


def ranks_of(plan: str) -> int:
    """The ranks that a plan of this figure takes."""
    return int(plan.removeprefix("dp=").split(",")[0])


def once(plan: str, *args: Any) -> Result:
    """`run` in processes of its own, which end with it."""
    pool = Pool(ranks_of(plan))
    try:
        result: Result = pool.run(run, plan, *args, ranks=ranks_of(plan), deadline=DEADLINE)[0]
    finally:
        pool.close()
    return result


def worst(got: Result, expected: Result) -> tuple[float, str]:
    """The worst relative error of a loss or a tensor (0.0 if and only if all are equal bitwise), and of which.

    A gradient that is zero in exact arithmetic (of a key's bias under softmax) is rounding noise, and what
    Adam makes of it too: such parameters are compared absolutely, their moments with the largest moments.
    """
    pairs = enumerate(zip(got[0], expected[0], strict=True))
    found = [(abs(a - b) / abs(b), f"loss of step {i + 1}") for i, (a, b) in pairs]
    noise = noise_of(expected[1])
    for name in got[1].keys() | expected[1].keys():
        a, b = got[1].get(name), expected[1].get(name)
        if a is None or b is None:
            found.append((float("inf"), name))
        elif not torch.equal(a, b):
            scale = max(float(b.double().abs().max()), _floor(name, noise, expected[1]))
            found.append((max(float((a.double() - b.double()).abs().max()) / scale, sys.float_info.min), name))
    return max(found)


def noise_of(state: dict[str, Tensor]) -> set[str]:
    """The parameters whose gradients stayed below machine epsilon times depth of the largest."""
    seen = {n.split(".", 1)[1].rsplit(".", 1)[0]: s for n, s in state.items() if n.endswith(".exp_avg_sq")}
    sizes = {name: float(square.double().max().sqrt()) for name, square in seen.items()}
    dtype = next(iter(seen.values())).dtype
    floor = tolerance.bound(model(dtype), BATCH * CONTEXT, 1, dtype) * max(sizes.values())
    return {name for name, size in sizes.items() if size <= floor}


def _floor(name: str, noise: set[str], state: dict[str, Tensor]) -> float:
    if name in noise:
        return 1.0
    param, _, key = name.removeprefix("optimizer.").rpartition(".")
    if name.startswith("optimizer.") and param in noise:
        return max(float(t.double().abs().max()) for n, t in state.items() if n.endswith(f".{key}"))
    return 0.0


def rows() -> list[dict[str, Any]]:
    """Every case of the figure."""
    found = []
    pairs = [(plan, plan, "float32") for plan in SAME]
    pairs += [(a, b, dtype) for a, b in OTHER for dtype in ("float64", "float32")]
    with tempfile.TemporaryDirectory() as folder:
        straight: dict[tuple[str, str], Result] = {}
        for number, (first, second, dtype) in enumerate(pairs):
            if (first, dtype) not in straight:
                straight[first, dtype] = once(first, dtype, STEPS, None, None)
            path = str(Path(folder) / str(number))
            begun, _ = once(first, dtype, STEPS // 2, None, path)
            ended, state = once(second, dtype, STEPS, path, None)
            error, of = worst((begun + ended, state), straight[first, dtype])
            kind = getattr(torch, dtype)
            limit = 0.0 if first == second else BOUND
            if first != second and dtype == "float32":
                limit = tolerance.bound(model(kind), BATCH * CONTEXT, STEPS, kind)
            found.append({"first": first, "second": second, "dtype": dtype, "worst": error, "of": of, "allowed": limit})
            print(f"{first:26} then {second:26} {dtype}: {error:.1e} (allowed {limit:.1e})", flush=True)
    return found


def main() -> int:
    """Run the figure in the repository that is the working directory; 1 if a row is over its bound."""
    found = rows()
    out, command = Path("benchmarks/results"), "python benchmarks/resume.py"
    write_rows(out / "resume.json", command, found, steps=STEPS)
    words = [
        f"# {STEPS} steps straight, and {STEPS // 2} + stop + {STEPS // 2}",
        "",
        "The first half runs under one plan and saves; new processes load and go on under the second. Worst",
        "relative difference of any loss, parameter or optimizer tensor from the straight run under the first plan.",
        f"0 is bitwise equality. `{command}`, torch {torch.__version__}.",
    ]
    cells = (
        f"`{r['first']}` | `{r['second']}` | {r['dtype']} | {r['worst']:.1e} | {r['of']} | {r['allowed']:.1e}"
        for r in found
    )
    write_page(out / "resume.md", words, "first half | second half | dtype | worst | of | allowed", cells)
    bad = [r for r in found if not r["worst"] <= r["allowed"]]
    print(f"{len(found)} rows, {len(bad)} over their bound")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

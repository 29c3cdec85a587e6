"""One rank of regret.py: every plan of a model measured, and what plan="auto" and "auto=probe" choose.

Rank 0 writes to LAB_RECORD: {"plans": {plan: [seconds of a step, ...]}, "auto": {...}, "probe": {...}}.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

from soli import losses
from soli.core.errors import SoliError
from soli.core.plan import Plan
from soli.engine import auto
from soli.engine.rehearse import Program
from soli.mesh.collectives import barrier, gather_json
from soli.mesh.mesh import Mesh, build_mesh
from soli.mesh.world import World, join
from soli.models.bert import Bert, BertConfig
from soli.models.gpt import GPT, GPTConfig
from soli.models.llama import Llama, LlamaConfig
from soli.models.vit import ViT, ViTConfig
from soli.planner.candidates import bases, variants

ROWS, TOKENS, VOCAB = 16, 64, 512
BEST, ROUNDS, STEPS = 8, 5, 8


def models() -> dict:
    """Name -> (model, batch): deep, wide and narrow, with and without causal attention, with and without a sequence."""
    tokens = torch.randint(VOCAB, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    text = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone()}
    masked = {**text, "mask": torch.ones(ROWS, TOKENS, dtype=torch.bool)}
    pixels = torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    images = {"images": pixels, "targets": torch.arange(ROWS) % 10}
    return {
        "gpt": (lambda: GPT(GPTConfig(vocab=VOCAB, context=TOKENS, dim=128, layers=6, heads=4)), text),
        "llama": (lambda: Llama(LlamaConfig(vocab=VOCAB, dim=256, layers=3, heads=8, groups=4, hidden=704)), text),
        "bert": (lambda: Bert(BertConfig(vocab=VOCAB, dim=96, layers=8, heads=4, context=TOKENS)), masked),
        "vit": (lambda: ViT(ViTConfig(classes=10, dim=192, layers=4, heads=4)), images),
    }


def measure_all(program: Program, world: World, mesh: Mesh, found: dict, within: float, kept: Path) -> None:
    """Every layout, and the variants of those that are not `within` times slower than the best; those in `kept` are known."""
    first = bases(world.size, ROWS)
    try_all(first, program, world, found, kept)
    seconds = gather_json({plan: times[0] for plan, times in found["plans"].items()}, mesh.all)[0]
    for base in first:
        if seconds.get(str(base), 0.0) <= within * min(seconds.values()):
            try_all(variants(base, world.size, ROWS), program, world, found, kept)
        else:
            found["slow"].append(str(base))


def try_all(plans: list[Plan], program: Program, world: World, found: dict, kept: Path) -> None:
    """Two steps of each plan; or why it cannot be. What is found is kept after each."""
    for plan in plans:
        if str(plan) in found["plans"] or str(plan) in found["refused"]:
            continue
        try:
            found["plans"][str(plan)] = [auto.trial(program, plan, world, 2)[0]]
        except SoliError as error:
            found["refused"][str(plan)] = str(error.problems[0].what)
        if world.is_first:  # one that is killed meanwhile leaves a whole file
            new = kept.with_suffix(".new")
            new.write_text(json.dumps({name: found[name] for name in ("plans", "refused")}), encoding="utf-8")
            new.replace(kept)


def main() -> None:
    """Measure, choose, measure the best again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--within", type=float, default=float("inf"), help="no variants of layouts slower than this")
    parser.add_argument("--known", type=Path, help="what was measured before, as regret.py writes it")
    parser.add_argument("--kept", type=Path, help="where what is measured is kept, and read by the next run")
    args = parser.parse_args()
    name = args.model
    torch.set_num_threads(1)
    world = join()
    make, batch = models()[name]
    torch.manual_seed(0)
    model = make()
    program = Program(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        losses.cross_entropy("targets"),
        batch,
        1.0,
        backend=world.backend,
    )
    mesh = build_mesh(Plan(dp=world.size), world)
    found: dict = {"plans": {}, "refused": {}, "slow": []}
    if args.known:
        known = json.loads(args.known.read_text(encoding="utf-8"))
        found |= {"plans": {plan: times[:1] for plan, times in known["plans"].items()}, "slow": known["slow"]}
    else:
        if args.kept.exists():
            found |= json.loads(args.kept.read_text(encoding="utf-8"))
        barrier(mesh.all)  # before the first one writes
        measure_all(program, world, mesh, found, args.within, args.kept)
    for word, probes in (("auto", 1), ("probe", 3)):
        start = time.perf_counter()
        choice = auto.choose(program, world, ROWS, probes=probes)
        found[word] = {
            "plan": str(choice.plan), "seconds": round(time.perf_counter() - start, 2), "lines": choice.lines,
            "predicted": {o.plan: o.seconds for o in choice.options if not o.refused},
            "ran": {o.plan: o.measured for o in choice.options if o.measured},
        }  # fmt: skip
    order = gather_json(sorted(found["plans"], key=lambda plan: found["plans"][plan][0]), mesh.all)[0]
    again = list(dict.fromkeys([*order[:BEST], found["auto"]["plan"], found["probe"]["plan"]]))
    for _ in range(ROUNDS):
        for plan in again:
            seconds = auto.trial(program, Plan.parse(plan), world, STEPS)[0]
            found["plans"].setdefault(plan, []).append(seconds)
    if world.is_first:
        Path(os.environ["LAB_RECORD"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""Golden plans: the layout of every tensor of every parity model under some plans, as JSON in tests/golden.

`make golden` writes them; a test compares. A change of layout is then a change of a file, seen in review.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cases import CASES, refused
from pool import Pool
from soli.engine.engine import Engine, parallelize
from soli.mesh.collectives import gather_json
from soli.parallel.units import named_once
from soli.verify.parity import adamw

PLANS = {
    "dp=2,zero=3": 2,
    "tp=2": 2,
    "pp=2,microbatches=2,schedule=zbv": 2,
    "pp=4,microbatches=4": 4,
    "dp=2,tp=2,sp=on,zero=1": 4,
    "dp=2,pp=2,zero=2,microbatches=2": 4,
}


MODELS = [name for name in CASES if not name.startswith("gpt-")]  # those are the model of "gpt"


def layout(engine: Engine) -> dict[str, Any]:
    """By parameter: `tied` names, `pp` ranks that have it, cut over `tp`, and by rank [unit, start, stop].

    Elements [start, stop) are of the rank's part over tp, flat. Collective.
    """
    mine: dict[str, Any] = {}
    for unit in engine.laid.units:
        for slot in unit.slots:
            start, stop = unit.owned(slot) if unit.zero else (slot.start, slot.stop)
            if start < stop:
                mine[slot.name] = [unit.name, start - slot.start, stop - slot.start]
    for names, param in engine.laid.plain:
        mine[names[0]] = ["frozen", 0, param.numel()]
    everyone = gather_json(mine, engine.mesh.all, label="layout")
    tensor = engine.parallel.tensor if engine.parallel is not None else None
    owners = engine.pipeline.cutting.owners if engine.pipeline is not None else {}
    found: dict[str, Any] = {}
    for names, _ in named_once(engine.model):
        name = names[0]
        holders = {str(rank): has[name] for rank, has in enumerate(everyone) if name in has}
        role = tensor.roles[name] if tensor is not None else None
        said: dict[str, Any] = {}
        if names[1:]:
            said["tied"] = list(names[1:])
        if name in owners:
            said["pp"] = owners[name]
        if role is not None and role.split is not None:
            said["tp"] = [role.kind, role.split.dim, list(role.split.parts), role.split.atoms]
        found[name] = said | {"ranks": holders}
    return found


def _one(name: str, plan: str) -> dict[str, Any]:
    model, loss_fn, batches = CASES[name].make()
    engine = parallelize(model.double(), loss_fn, optimizer=adamw, plan=plan, example=batches[0])
    return layout(engine)


def of_case(pool: Pool, name: str, most: int = max(PLANS.values())) -> dict[str, Any]:
    """The layouts of one model under each plan of so many ranks at most."""
    plans = {plan: ranks for plan, ranks in PLANS.items() if ranks <= most and not refused(name, plan)}
    return {plan: pool.run(_one, name, plan, ranks=ranks)[0] for plan, ranks in plans.items()}


def text(found: dict[str, Any]) -> str:
    """As the files hold it: a line a tensor."""
    plans = []
    for plan, tensors in found.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in tensors.items()]
        plans.append(f" {json.dumps(plan)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(plans) + "\n}\n"


def main() -> int:
    """Write the layouts of all models to tests/golden in the repository that is the working directory."""
    folder = Path("tests/golden")
    folder.mkdir(exist_ok=True)
    pool = Pool(max(PLANS.values()))
    for name in MODELS:
        (folder / f"{name}.json").write_text(text(of_case(pool, name)), encoding="utf-8")
        print(folder / f"{name}.json", flush=True)
    pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

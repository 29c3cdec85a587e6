"""`make parity`: every case under every plan, as a table and as JSON."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from pathlib import Path

from pages import write_page, write_rows

from soli.core.errors import SoliError
from soli.verify.parity import BOUND, Row, check

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import cases
from cases import CASES, PLANS
from pool import Pool


def _one(name: str, plan: str, ranks: int) -> Row:
    return check(CASES[name], plan, ranks)


def main() -> int:
    """Run the matrix in the repository that is the working directory; 1 if a row is over the bound or did not run.

    A table is written of rows that all ran. What a row said that did not is printed, and the others go on.
    """
    pool, rows, failed = Pool(max(PLANS)), [], []
    for name, plan, ranks in cases.rows():
        try:
            row = max(pool.run(_one, name, plan, ranks, ranks=ranks, deadline=120), key=lambda r: r.worst)
        except SoliError as error:
            failed.append(f"{name} {plan} on {ranks} ranks")
            print(f"{failed[-1]} did not run:\n{error}", flush=True)
            continue
        rows.append(row)
        print(f"{name:12} {plan:32} {ranks} ranks  {row.worst:.1e}  {row.tensor}", flush=True)
    pool.close()
    if failed:
        print(f"{len(failed)} of {len(failed) + len(rows)} rows did not run, so no table is written:")
        print("\n".join(failed))
        return 1
    _write(rows)
    bad = [row for row in rows if row.worst > BOUND]
    print(f"{len(rows)} rows, {len(bad)} over {BOUND:g}, worst {max(row.worst for row in rows):.1e}")
    return 1 if bad else 0


def _write(rows: list[Row]) -> None:
    results, about = Path("benchmarks/results/parity.json"), {"machine": platform.machine(), "bound": BOUND}
    write_rows(results, "make parity", [asdict(row) for row in rows], **about)
    words = [
        "# Parity",
        "",
        "Each row trains one model for three steps of AdamW with clipping, in float64, under a plan on real ranks,",
        "and compares the loss and every gradient of each step and every parameter at the end with the sequential",
        f"program in plain PyTorch. The worst relative error must stay below {BOUND:g}. Made by `make parity`.",
        "The rows of `skipping` choose among its blocks, those of `odd` whether a layer is used: ranks of a grid with",
        "other rows would call other products, and `skipping` has no pipeline; neither has a sequence for cp to cut.",
    ]
    cells = (f"{r.model} | `{r.plan}` | {r.ranks} | {r.worst:.1e} | {r.tensor}" for r in rows)
    write_page(Path("docs/parity.md"), words, "model | plan | ranks | worst relative error | of", cells)


if __name__ == "__main__":
    sys.exit(main())

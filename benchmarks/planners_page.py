"""The page of planners.py."""

from typing import Any

import record

OWN = ("soli", "soli, table left out")
AGAIN = "llm-analysis, 0.5"
"""Says the same of memory and refuses the same rows as at efficiency 1."""
ABOUT = """\
Every planner is told the same rows of [published](../published), as soli reads them (`rivals/common.py`): what a table does
not say and soli infers (microbatch, recomputation, the size of a vocabulary) is inferred for all, and rows that soli refuses
([planner](planner.md)) are put to none. Each runs unchanged with its own files and defaults; how a row is put to it is in
`rivals/of_*.py`, and in short:

- **calculon**: its `a100_80g` and `h100_80g_nvl8`; of the A100 with 40 GB memory's size and rate are the data sheet's.
  Overlap where a row says so, activations fused; ranks of tp, then pp, then dp are neighbours, as in its own list of peers. So that plans which
  it thinks too large have a time too, its check of memory is lifted; how many these are is said.
- **llm-analysis**: its files of V100, A100 and H100; GB200 and B300 by their data sheets, which is all that such a file has.
  Its default efficiency is 1 (a lower bound of time); *0.5* is the second run, what its source says that Megatron-LM
  reaches. ZeRO and FSDP are its sharded data parallelism, which gathers a layer's parameters at every stage of ZeRO; all
  else is its replicated one. FP8 and FP4 are its types of 8 and 4 bits, of which only times count. It has no bubble of
  pipelines.
- **SimuMax**: its A100 was measured with PCIe; products and attention are that file's, networks of the template for NVLink
  in its documentation. Shapes that were not measured there have its default of 75%.
- **Galvatron**: profiles that its package ships, of one layer (GPT, 4096 wide) on servers with 4 or 8 devices or two with 8.
  Version 2.4.0 does not read them as shipped: they are given the level of lengths that it reads, no number is changed. Its
  runtime is not imported.

soli is shown twice on exactly the rows that the other could say: *soli* by its shipped constants, which were fitted to these
rows, and *table left out* by constants that were fitted without any row of the table. The others were not fitted to these
rows; this is the fairer comparison. Errors are percents of what was measured: mean, median, p90, bias. vTrain's own
predictor needs profiles of kernels taken on the GPU (CUPTI) and was not run.
"""


def page(result: dict[str, Any]) -> str:
    """The result for people."""
    ran = {name: tool for name, tool in result["tools"].items() if "tables" in tool}
    lines = ["# Other planners on the same rows", "", record.line(result), "", ABOUT, *versions(result), ""]
    for what in ("time", "memory"):
        lines += [f"## {what.capitalize()}", "", *errors_table(ran, what), ""]
    lines += [
        "## Choosing", "",
        "Sweeps of one workload under three plans or more, of the rows that a planner could say. Regret: how much longer than",
        "the best plan the best of the first k takes; mean, worst.", "",
        *choices_table(ran), "", "## Search", "", *search_table(result), "",
        "## Rows that it could not say", "", *refusals(ran),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def versions(result: dict[str, Any]) -> list[str]:
    """What was run, and what was not."""
    lines = ["| planner | what was run |", "|---|---|"]
    return lines + [
        f"| {name} | {tool.get('version') or 'not run: ' + tool['not run']} |" for name, tool in result["tools"].items()
    ]


def errors_table(ran: dict[str, Any], what: str) -> list[str]:
    """Of times or memories."""
    lines = [f"| planner | table | rows | it | {' | '.join(OWN)} |", "|---" * 6 + "|"]
    for name, tool in ran.items():
        for table, entry in tool["tables"].items():
            if not entry["expressed"] or not entry["it"][what]["rows"] or (name, what) == (AGAIN, "memory"):
                continue
            counted = f"{entry['it'][what]['rows']} of {entry['rows']}"
            cells = (_errors(entry[kind][what]) for kind in ("it", *OWN))
            lines.append(f"| {name} | {table} | {counted} | {' | '.join(cells)} |")
    return lines


def choices_table(ran: dict[str, Any]) -> list[str]:
    """Rank correlation and regret."""
    lines = ["| planner | table | who | sweeps | rank correlation | regret@1 | @3 |", "|---" * 7 + "|"]
    for name, tool in ran.items():
        for table, entry in tool["tables"].items():
            if not entry["expressed"] or not entry["it"]["choice"]["sweeps"]:
                continue
            for kind in ("it", *OWN):
                found = entry[kind]["choice"]
                regrets = (
                    f"{100 * mean:.2f}%, {100 * worst:.1f}%" for mean, worst in (found["regret@1"], found["regret@3"])
                )
                who = name if kind == "it" else kind
                lines.append(
                    f"| {name} | {table} | {who} | {found['sweeps']} | {found['rank correlation']:.3f} | {' | '.join(regrets)} |"
                )
    return lines


def search_table(result: dict[str, Any]) -> list[str]:
    """Seconds and plans of each task."""
    found = result["searches"]
    if not found:
        return ["Not run."]
    lines = [
        "One process, one thread. GPT without gates or groups, 2048 tokens; A100 with 80 GB. Each looks for the quickest plan in",
        "its own space: SimuMax has one sequence a microbatch, Galvatron a strategy of its own for each layer. Seconds of CPU",
        "(plans looked at; SimuMax: those it kept, Galvatron: strategies of a layer). Where calculon was not run: all its plans, at the rate of a search",
        "that ended; it skips some of them. llm-analysis searches none.",
        *([f"Of an earlier run: {result['searched']}."] if "searched" in result else []), "",
        f"| model | devices | sequences | {' | '.join(found)} |", "|---" * (3 + len(found)) + "|",
    ]  # fmt: skip
    for place, task in enumerate(result["tasks"]):
        cells = " | ".join(_search(one[place]) for one in found.values())
        lines.append(f"| {task['model']} | {task['devices']} | {task['batch']} | {cells} |")
    return lines


def refusals(ran: dict[str, Any]) -> list[str]:
    """Counted reasons."""
    lines = []
    for name, tool in ran.items():
        for table, entry in tool["tables"].items():
            if table == "all but tests" or name == AGAIN:
                continue
            lines += [
                f"- {name}, {table}: {count} of {entry['rows']}: {reason}" for reason, count in entry["refused"].items()
            ]
            if entry["does not fit, it says"]:
                lines.append(
                    f"- {name}, {table}: of {entry['does not fit, it says']} that ran it says that they do not fit (they count)"
                )
    return lines


def _errors(found: dict[str, float]) -> str:
    return ", ".join(
        f"{100 * found[key]:{'+.1f' if key == 'bias' else '.1f'}}" for key in ("mean", "median", "p90", "bias")
    )


def _search(one: dict[str, Any]) -> str:
    if "projected" in one:
        return f"not run: {one['plans']} plans, up to {one['projected'] / 3600:.1f} h"
    if "seconds" not in one or "refused" in one:
        return one.get("why") or one["refused"]
    return f"{one['seconds']:.3g} ({one['plans']})"

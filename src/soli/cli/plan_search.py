"""`soli plan MODEL --cluster ...`: the best plans of a model, why, and what if."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from typer import Argument, Option

from soli.cli import plan_rehearsed, programs
from soli.cli.options import AsJson
from soli.cli.tables import show
from soli.core.errors import SoliError, blaming

if TYPE_CHECKING:
    from soli.planner.explain import Answer, Choice
    from soli.planner.models import Model
    from soli.planner.task import Task

MODELS = (
    "A published model (llama-3-70b), a Hugging Face config.json, or the directory that has one; one of soli's by its sizes (gpt:vocab=51200,dim=4096,layers=32,heads=32); or FILE.py:NAME, a function that returns (model, batch) or "
    "(model, batch, loss_fn), on the meta device if it is large (examples/plan_model.py:llama_8b)."
)
Words = list[str] | None
"""Of an option that is given any number of times."""
LONGEST = 8192
"""Tokens of a sequence, at most, where nobody says how many."""
FRAMEWORKS = ("soli", "megatron", "megatron-deepspeed", "deepspeed", "fsdp")


def search(
    model: Annotated[str, Argument(help=MODELS)],
    cluster: Annotated[str, Option(help="Such as h100:8x64, or a file (soli hardware --help).")],
    batch: Annotated[int, Option("--global-batch", min=1, help="Sequences a step.")],
    seq: Annotated[int, Option(min=0, help="Tokens of a sequence; 0: the model's own, 8192 at most; of a program, its batch's.")] = 0,
    precision: Annotated[str, Option(help="bf16, fp16, fp8, or several: bf16,fp8; else bf16 where the device has it.")] = "",
    memory: Annotated[str, Option(help="Of a device, such as 70GB; else all that it has.")] = "",
    fix: Annotated[Words, Option(help="What every plan must have: tp=8,recompute=full. Any number of times.")] = None,
    why_not: Annotated[Words, Option(help="Ask why the best plan is not such a one: tp=8. Any number of times.")] = None,
    framework: Annotated[str, Option(help="Whose program runs it: soli, megatron, megatron-deepspeed, deepspeed, fsdp (torchtitan).")] = "soli",
    count: Annotated[int, Option(min=1, help="Plans that are shown.")] = 10,
    whatif: Annotated[Words, Option(help="seq: the longest sequence; model: the largest model; tokens=15e12,days=10: how many devices.")] = None,
    html: Annotated[Path | None, Option(help="Write the answer with pictures to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """The best plans of a model on a cluster: time, memory, and why. "search" may be left out.

    The best of all plans; one is offered if the upper bound of its memory is there. No GPU, weights or network.
    """
    from soli.planner import explain
    from soli.planner.dimensions import UnknownError
    from soli.planner.hardware.clusters import read_cluster
    from soli.planner.task import Task

    if whatif and (html is not None or why_not):
        raise SoliError("--whatif answers its own questions", fix="ask --html and --why-not in a run without it")
    made = read_cluster(cluster)
    names = (name.strip() for name in (precision or ("bf16" if "bf16" in made.device.tflops else "fp16")).split(","))
    asked = ",".join(_one_of("precision", name, tuple(explain.WORDS["precision"])) for name in names)
    program = program_of(model)
    try:
        known, inferred = read(model, program)
    except UnknownError as error:
        words = {"--seq": seq, "--whatif": whatif, "--why-not": why_not, "--html": html, "--framework": framework.removeprefix("soli")}
        return plan_rehearsed.search(error, program, made, batch, asked, _bytes(memory), fix, count, as_json, [w for w, said in words.items() if said])
    tokens = seq or (known.seq if program else min(known.seq or LONGEST, LONGEST))
    if not seq and not known.seq:
        inferred = (*inferred, f"it says no length: sequences are of {tokens} tokens, if --seq does not say otherwise")
    elif 0 < known.seq < tokens:
        inferred = (*inferred, f"it was made for sequences of {known.seq} tokens, and these have {tokens}")
    task = Task(known, made, batch, tokens, asked, _bytes(memory), framework=_one_of("framework", framework.replace("torchtitan", "fsdp"), FRAMEWORKS))
    fixed = explain.fixed_of(",".join(fix)) if fix else {}
    task = replace(task, fixed=fixed) if precision else task.with_fixed(fixed)  # which asks for a precision too
    said: dict[str, Any] = {
        "model": known.name, "parameters": round(known.parameters), "active_parameters": round(known.used), "cluster": str(made), "devices": made.size, "global_batch": batch, "seq": tokens,
        "assumed": explain.assumed(task), "inferred": list(inferred),
    }  # fmt: skip
    if whatif:
        said["whatif"] = [_whatif(task, question) for question in whatif]
    else:
        found = explain.answer(task, count)
        found = replace(found, why=". ".join(filter(None, (found.why, explain.beyond(task, found.best[0])))))
        reasons = [explain.why_not(task, explain.fixed_of(one)) for one in why_not or []]
        said |= {**asdict(found), "why_not": reasons}
        if html is not None:
            _write(html, task, found, reasons, inferred)
    if as_json:
        print(json.dumps(said, indent=1, allow_nan=False))
        return
    if whatif:
        short = "{plan}: {step_time_s:.4g} s a step, up to {memory_high_gb:.1f} GB".format_map
        print("\n".join(f"{one['answer']}\n  {short(one['choice'])}" for one in said["whatif"]))
        print(f"{said['assumed']}.")
    else:
        _shown(task, found, reasons)
    if inferred:
        print(f"Read from the model: {'; '.join(inferred)}.")
    if html is not None:
        print(f"With pictures: {html}")


def _shown(task: Task, found: Answer, reasons: list[str]) -> None:
    from soli.planner import explain

    made, first = task.cluster, found.best[0]
    print(f"{explain.sized(task.model)}, {task.batch} sequences of {task.seq} tokens a step, on {made} ({made.size} devices)")
    _best(found.best)
    low, high = (n / first.step_time_s - 1 for n in (first.time_low_s, first.time_high_s))
    print(f"{found.seen} {found.why}.")
    print(f"90% intervals, of times {low:+.0%} to {high:+.0%}: {found.assumed}.")
    for reason in reasons:
        print(f"Why not {reason}.")


def program_of(text: str) -> programs.Program | None:
    """The model, the batch and the loss of FILE.py:NAME, or of one of soli's models; None: it names no program."""
    named = programs.named(text)
    return programs.from_file(*named) if named else programs.own(text)


def read(text: str, program: programs.Program | None) -> tuple[Model, tuple[str, ...]]:
    """The dimensions of a model, and what of them was inferred: said by a configuration, or seen in a program's trace."""
    if program is None:
        from soli.planner.models import named, near, read_model

        path = Path(text)
        if not os.path.exists(path) and (known := named(text)):
            return known, (f"its dimensions are those of the published {known.name}",)
        return read_model(path, near(text))
    from soli.engine.batch import Caller, rows_of, take
    from soli.planner.dimensions import UnknownError, read_program

    model, batch, loss_fn = program
    rows_of(batch)

    def run(traced: Any, one: Any) -> None:
        output = Caller(traced)(one)
        if loss_fn is not None:
            loss_fn(output, one)

    name = text.rpartition(".py:")[2]
    try:
        return read_program(name, model, take(batch, 0, 1), run)
    except SoliError as error:  # a norm of the batch may not have one row
        if isinstance(error, UnknownError) or rows_of(batch) < 2:
            raise
        return read_program(name, model, take(batch, 0, 2), run)


def _write(path: Path, task: Task, found: Answer, reasons: list[str], inferred: tuple[str, ...]) -> None:
    from soli.planner.page import page

    with blaming(lambda error: SoliError("the page cannot be written", got=f"{path}: {error.strerror}"), OSError):
        path.write_text(page(task, found, reasons, inferred), encoding="utf-8")


def _whatif(task: Task, question: str) -> dict[str, Any]:
    """One question, its answer in words, and the best plan for it."""
    from soli.planner import whatif

    told = lambda text, choice, **more: {"question": question, **more, "answer": text, "choice": asdict(choice)}
    if question == "seq":
        length, choice = whatif.longest(task)
        return told(f"The longest sequence: {length} tokens.", choice, seq=length)
    if question == "model":
        model, parameters, choice = whatif.largest(task)
        size = f"{parameters / 1e9:.4g} billion parameters ({model.layers} layers of {model.hidden})"
        return told(f"The largest model of these proportions: {size}.", choice, parameters=parameters)
    number = r"(\d+(?:\.\d+)?(?:e\d+)?)"
    found = re.fullmatch(rf"tokens={number}\s*,\s*days={number}", question.strip(), re.I)
    if found is None or not all(0 < float(one) < 1e30 for one in found.groups()):
        raise SoliError("there is no such question", got=question, allowed="seq, model, tokens=15e12,days=10")
    tokens, days = (float(number) for number in found.groups())
    nodes, choice = whatif.devices(task, tokens, days)
    taken = tokens / choice.tokens_per_s / 86400
    text = f"{tokens:.3g} tokens in {days:g} days: {nodes * task.cluster.device.node} devices ({nodes} servers), {taken:.3g} days; of fewer, not all were tried."
    return told(text, choice, nodes=nodes, days=taken)


def _one_of(what: str, said: str, known: tuple[str, ...]) -> str:
    if said not in known:
        raise SoliError(f"the planner knows no such {what}", got=said, allowed=", ".join(known))
    return said


def _bytes(text: str) -> float:
    """70GB, 64GiB."""
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text.strip(), re.I)
    if found is None or not float(found.group(1)):
        raise SoliError("a memory is a number and its unit", got=text, allowed="70GB, 64GiB: GB or GiB of a device")
    return float(found.group(1)) * (2**30 if "i" in found.group(2).lower() else 1e9)


TIMES = "GB of a device, and up to its upper bound. bubble: waiting in the pipeline. exposed: communication that nothing hides."
KINDS = "GB by kind, at the fullest moment of the fullest stage. gathered: parameters of other ranks, and casts."


def _best(choices: list[Choice]) -> None:
    titles = [title for title in choices[0].cells if title not in ("from", "to")]
    _table(titles, [[one.cells[title] for title in titles] for one in choices], TIMES)
    kinds = [[f"{part:.1f}" for part in one.memory_parts_gb.values()] for one in choices]
    _table([*choices[0].memory_parts_gb], kinds, KINDS)
    for number, one in enumerate(choices, 1):
        print(f"  {number:<3} {one.plan}" + (f"  ({one.note})" if one.note else ""))


def _table(titles: list[str], rows: list[list[str]], caption: str) -> None:
    numbered = ([str(number), *row] for number, row in enumerate(rows, 1))
    show([" " * 2], titles, numbered, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    print(caption)

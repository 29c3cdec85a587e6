"""The main job: train a GPT on text, on soli's public interface, as anyone would write it.

`main` is called in each rank. The ranks meet first to agree on what rank 0 does for all: the run directory
and the token files. Everything that is printed and written is rank 0's.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import default_collate

import soli
from soli.core.errors import on_all_ranks
from soli.core.progress import busy
from soli.mesh.world import World, join
from soli.models.gpt import GPT, GPTConfig, generate
from soli.train import measure, picture, rundir, settings, tokens
from soli.train.agree import from_rank_0
from soli.train.config import Config
from soli.train.corpus import kind_of
from soli.train.log import Log, clock
from soli.train.schedule import MEASURED_TO, Schedule, due, steps_that_fit
from soli.train.size import machine, sized
from soli.train.windows import Spread, Windows

LOOKS = 10  # at validation, over the run, where run.evaluate_every says nothing
SAVES = 2  # checkpoints, likewise
EXAMPLE = 8  # windows from which a layout is learnt
MANY_EPOCHS = 1_000_000  # the number of steps ends the run, not the data


def main(config_path: Path | None = None, *, resume: Path | None = None, **named: object) -> dict[str, Any]:
    """Run `soli train` in this rank; returns what summary.json holds, the same on every rank.

    config_path: a TOML of settings (`train/config.py`). `named` (settings of [run] by name, and data: data.path;
    None: not said) go before it. resume: a run directory; its own configuration is the start then.
    """
    job = _set_up(rundir.configuration(config_path, resume, named), resume)
    try:
        return _finish(job, _steps(job))
    finally:
        job.log.close()


@dataclass
class _Job:
    """What the parts of a run share."""

    config: Config
    world: World
    folder: Path
    tokens: tokens.Tokens
    model: GPTConfig
    log: Log
    engine: Any
    schedule: Schedule
    train: Windows
    validation: Windows
    unigram: float  # nats per token of the validation targets

    def bits(self, nats: float) -> float | None:
        """Mean nats per validation target -> bits per byte; None where the bytes are not known."""
        span = self.tokens.validation
        return None if span.bytes is None else measure.bits_per_byte(nats * (len(span) - 1), span.bytes)


def _set_up(config: Config, resume: Path | None) -> _Job:
    world = join()

    def say(text: str) -> None:
        if world.is_first:
            print(text, flush=True)

    config, reason = sized(config, *machine())
    say(reason)
    cache = Path(config.data.cache or Path(config.run.folder) / "tokens")
    prepare = lambda: tokens.to_json(tokens.prepare(config, cache, say))
    found = tokens.from_json(from_rank_0(world, prepare, "the token files"))
    unigram = measure.unigram(found.train, found.validation)
    folder = resume or Path(from_rank_0(world, lambda: str(rundir.create(config)), "the run directory"))
    from_rank_0(world, lambda: rundir.begin(folder, config, found), "the records of the run")
    size = GPTConfig(vocab=found.train.vocab, **asdict(config.model))
    torch.manual_seed(config.run.seed)
    model = GPT(size)
    count, optim = sum(parameter.numel() for parameter in model.parameters()), config.optim
    schedule = Schedule(optim.warmup, config.run.steps, optim.floor)
    windows = (Windows(found.train, size.context), Windows(found.validation, size.context))
    engine = soli.parallelize(
        model,
        soli.losses.cross_entropy("targets"),
        optimizer=lambda parameters: torch.optim.AdamW(
            parameters, lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedule),
        clip=optim.clip or None,
        plan=config.run.plan,
        seed=config.run.seed,
        example=default_collate([windows[0][i] for i in range(min(EXAMPLE, len(windows[0])))]),
        rows=min(optim.batch, len(windows[0])),
    )
    if resume is not None:
        newest = soli.checkpoint.latest(folder / "checkpoints")
        if newest is None:
            raise on_all_ranks("the run has no checkpoint to resume from", got=folder / "checkpoints", fix="start it anew with its config.toml")
        engine.load(newest)
        schedule.steps = config.run.steps  # the checkpoint brought its own, and the rate of its next step
        for group in engine.optimizer.param_groups:
            group["lr"] = optim.lr * schedule(engine.scheduler.last_epoch)  # a skipped step moves no rate
        if world.is_first:
            rundir.forget_after(folder, engine.step_count)
    log = Log(folder, world.rank, world.size, config.run.steps, engine.step_count)
    laid = f"{world.size} ranks, plan {engine.plan} | {count:,} parameters"
    log.say(f"run directory {folder} | {laid} | unigram entropy {unigram:.4f} nats per token")
    if world.is_first:
        settings.write(config, folder / rundir.CONFIG)
        (folder / "plan.json").write_text(engine.plan.to_json() + "\n", encoding="utf-8")
        if engine.choice is not None:
            (folder / "planner.json").write_text(engine.choice.to_json() + "\n", encoding="utf-8")
    return _Job(config, world, folder, found, size, log, engine, schedule, *windows, unigram)


def _steps(job: _Job) -> float:
    """All optimizer steps, with looks at validation and checkpoints; returns the seconds they took."""
    engine, config, log = job.engine, job.config, job.log
    run, steps = config.run, config.run.steps
    took: list[float] = []
    start = last = time.perf_counter()
    if steps and engine.step_count >= steps:
        log.say(f"the run has {engine.step_count} steps already, and run.steps is {steps}; --steps asks for more")
        return 0.0
    log.skip()
    for batch in engine.batches(job.train, config.optim.batch, epochs=MANY_EPOCHS):
        rate = float(engine.optimizer.param_groups[0]["lr"])
        loss, step = float(engine.step(batch)), engine.step_count
        took.append(time.perf_counter() - last)
        norm = engine.last.grad_norm
        norm = None if norm is None or not math.isfinite(norm) else float(norm)  # a step of fp16 that was not taken
        log.step(step, loss, int(engine.last.count), rate, norm)
        if not steps and step >= MEASURED_TO:
            steps = _decide(job, step, took)
        if steps and due(step, steps, run.evaluate_every, LOOKS) and step < steps:
            look = Spread(job.validation, run.evaluate_windows)
            log.look(step, _evaluate(job, look), len(look), None)
            log.skip()
        if steps and due(step, steps, run.save_every, SAVES):
            engine.save(job.folder / "checkpoints" / f"{step:06d}", extra={"config": asdict(job.config)})
            log.skip()
        if steps and step >= steps:
            break
        last = time.perf_counter()
    return time.perf_counter() - start


def _decide(job: _Job, step: int, took: list[float]) -> int:
    """The number of steps that fit into the minutes of the configuration, by rank 0's clock."""
    run = job.config.run
    # The clock starts with the process, not with this file: the imports are the user's time too.
    spent = time.time() - psutil.Process().create_time()
    windows = len(job.validation) + LOOKS * min(run.evaluate_windows, len(job.validation))

    choose = lambda: step + steps_that_fit(took, run.minutes * 60 - spent, windows, job.config.optim.batch)
    steps = int(from_rank_0(job.world, choose, "the number of steps"))
    job.config = replace(job.config, run=replace(run, steps=steps))
    job.schedule.steps = steps
    job.log.plan_steps(steps)
    fit = f"{steps} steps fit into {run.minutes:g} minutes ({clock(spent)} spent)"
    job.log.say(f"{fit}; --steps {steps} repeats this run")
    if job.world.is_first:
        settings.write(job.config, job.folder / rundir.CONFIG)
    return steps


def _evaluate(job: _Job, windows: Spread | Windows) -> float:
    """Mean nats per counted target."""
    size = job.config.optim.batch
    batches = job.engine.batches(windows, size, shuffle=False, name=None)
    with busy("validation", -(-len(windows) // size), unit="batches", shown=job.world.is_first) as done:
        return float(job.engine.evaluate(_counting(batches, done)))


def _counting(batches: Iterable[Any], done: Callable[[int], None]) -> Iterator[Any]:
    for batch in batches:
        yield batch
        done(1)


def _finish(job: _Job, seconds: float) -> dict[str, Any]:
    """The whole validation loss, the sample, the picture and the summary."""
    loss = _evaluate(job, job.validation)
    steps, size, per_byte = job.engine.step_count, job.tokens.validation.bytes, job.bits(loss)
    known = [(row["step"], row["loss"], row["bits_per_byte"]) for row in rundir.read_metrics(job.folder) if row["kind"] == "validation"]
    if (steps, loss, per_byte) not in known:  # a run that was through is resumed
        job.log.look(steps, loss, len(job.validation), per_byte)
    weights = job.engine.global_state_dict()  # every rank calls it
    summary = {
        "steps": steps, "seconds_of_steps": round(seconds, 2), "ranks": job.world.size, "plan": str(job.engine.plan), "model": asdict(job.model),
        "seed": job.config.run.seed, "bytes_per_token": None if size is None else size / job.validation.targets,
        "validation": {"nats_per_token": loss, "bits_per_byte": per_byte},
        "unigram": {"nats_per_token": job.unigram, "bits_per_byte": job.bits(job.unigram)}, "tokens_of_validation": job.validation.targets,
    }  # fmt: skip
    if not job.world.is_first:
        return summary
    rows = rundir.read_metrics(job.folder)
    picture.draw(rows, job.unigram, f"{job.folder.name}: {job.engine.plan}", job.folder / "loss.png")
    sample = _sample(job, weights)
    rundir.write_json(job.folder / "summary.json", summary)
    if sample is not None:
        (job.folder / "sample.txt").write_text(sample, encoding="utf-8")
        job.log.say(f"a sample:\n{sample}\n")
    for what, nats in (("validation loss", loss), ("unigram entropy", job.unigram)):
        bits = "" if job.bits(nats) is None else f" = {job.bits(nats):.4f} bits per byte"
        job.log.say(f"{what}  {nats:.4f} nats per token{bits}")
    spent = time.time() - psutil.Process().create_time()
    job.log.say(f"{steps} steps, {clock(spent)} in all | {job.folder}/: loss.png, summary.json, sample.txt")
    return summary


def _sample(job: _Job, weights: dict[str, torch.Tensor]) -> str | None:
    """Text that the trained model writes; None if none is wanted or the tokens came without a tokenizer."""
    run = job.config.run
    if not run.sample_tokens:
        return None
    if job.tokens.tokenizer is None:
        job.log.say("no sample: the token files came without a tokenizer.json")
        return None
    tokenizer = tokens.load_tokenizer(job.tokens.tokenizer)
    model = GPT(job.model).to(job.world.device)
    model.load_state_dict(weights)
    begin = run.prompt or ("def " if kind_of(job.config.data) == "stdlib" else "")
    written = generate(model, [0, *tokens.encode(tokenizer, begin)], run.sample_tokens, run.temperature, run.seed)
    return begin + tokens.decode(tokenizer, written).replace(tokens.END, "\n" + "-" * 20 + "\n")

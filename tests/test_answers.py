"""The planner's page, its timeline, and questions the other way round."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from soli.core.errors import SoliError
from soli.core.pipelines import order, played
from soli.planner import explain, whatif
from soli.planner.cost import memory, pipeline
from soli.planner.cost.constants import MEANINGS, repeated
from soli.planner.cost.points import ZBV, points
from soli.planner.cost.ranks import ranks
from soli.planner.hardware.clusters import read_cluster
from soli.planner.models import named, of_entry
from soli.planner.page import _timeline, page
from soli.planner.search import Task, plan_of, search
from test_cost import BASE, ONE, point
from test_search import LLAMA, SMALL, config, task  # noqa: F401  (config is a fixture)
from typed import soli, soli_anew

# --- the timeline -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "chunks", "m"), [(1, 1, 3), (2, 1, 5), (4, 1, 8), (8, 1, 3), (4, 2, 8), (4, 3, 12), (2, 4, 6), (8, 4, 16)])  # fmt: skip
def test_a_timeline_takes_what_the_cost_says_and_keeps_what_the_memory_says(stages: int, chunks: int, m: int) -> None:
    work = played([order(rank, stages, chunks, m) for rank in range(stages)], {"F": 1 / chunks, "B": 2 / chunks})
    p = point(pp=stages, chunks=chunks, global_batch=m, layers=stages * chunks)
    busy, waiting = pipeline.spent(p, np.array([3.0]), np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1))
    assert max(end for *_, end in work) == pytest.approx(float((busy + waiting)[0]))
    assert len({(rank, step) for rank, step, _, _ in work}) == len(work) == 2 * stages * chunks * m
    for rank in range(stages):  # one thing at a time
        own = sorted((start, end) for of, _, start, end in work if of == rank)
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(own, own[1:], strict=False))
    for rank, said in ((rank, pipeline.in_flight(p, rank)) for rank in range(stages)):
        kept = most = 0
        for kind, _, _ in order(rank, stages, chunks, m):
            kept += 1 if kind == "F" else -1
            most = max(most, kept)
        assert most / chunks == pytest.approx(float(said[0]))


def test_groups_of_chunks_must_be_whole() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        order(0, 4, 2, 6)


# --- memory by kind ---------------------------------------------------------------------------------------


def test_kinds_of_memory_are_the_peak() -> None:
    """Of random plans of every zero, offload, recomputation and pipeline, whichever of the first and last stage is fullest."""
    dice = np.random.default_rng(0)
    one_of = {
        "zero": range(4), "offload": (0, 1), "recompute": (0, 1, 2), "pp": (1, 2, 4, 8), "dp": (2, 8), "tp": (1, 2, 8), "schedule": (0, 2, 3, 4), "microbatch": (1, 4),
        "casts": (0, 1), "whole": (0, 1), "logged": (0, 1), "vocab": (1000, 51200, 500000), "tied": (0, 1), "fewer": (0, 1), "experts": (0, 8), "seq": (512, 8192),
    }  # fmt: skip
    rows = [{name: float(dice.choice(of)) for name, of in one_of.items()} for _ in range(2000)]
    p = points([BASE | {"global_batch": 256, "weight": 4, "moments": 8} | row for row in rows])
    k = repeated(dict(zip(MEANINGS, (float(getattr(ONE, name)[0]) for name in MEANINGS), strict=True)), len(p))
    kinds = memory.kinds(p, k)
    assert [*kinds] == ["parameters", "gradients", "optimizer", "activations", "logits", "gathered", "workspace"]
    assert all((part >= 0).all() for part in kinds.values())
    each = []
    for rank in ranks(p):
        kept, again = memory.activations(p, k, rank)  # what is made again is of a backward, whose loss is over
        there = sum(memory.of_states(p, rank)) + kept + memory.gathered(p, rank) + memory.casts(p, rank)
        each.append(there + np.where(p.casts > 0, again, np.maximum(again, rank.ends * memory.logits(p, k))))
    first, _, last = each
    plain = (p.pp > 1) & (p.logged == 0)
    assert all((plain & (one == np.maximum.reduce(each))).sum() > 100 for one in (first, last))
    folded = (p.pp == 1) | (p.schedule == 4)
    fullest = np.where(p.logged > 0, np.where(folded, first, last), np.maximum.reduce(each)) + k.resident + k.workspace
    np.testing.assert_allclose(sum(kinds.values()), memory.peak(p, k), rtol=1e-12)
    np.testing.assert_allclose(memory.peak(p, k)[p.casts == 0], fullest[p.casts == 0], rtol=1e-12)
    assert (memory.peak(p, k) >= fullest * (1 - 1e-12)).all()  # soli's, at a loss or in a layer's backward beside
    assert not kinds["optimizer"][p.offload > 0].any()
    assert not kinds["gathered"][(p.zero < 3) & (p.casts == 0)].any()
    shared = (p.zero == 3) & (p.offload == 0) & (p.experts == 0)
    np.testing.assert_allclose(kinds["optimizer"][shared], 2 * kinds["parameters"][shared])


def test_kinds_are_shown_and_in_json() -> None:
    """In the table, within 80 columns, and in the answer for programs, where they are the memory that is said."""
    words = ["plan", "llama-3-70b", "--cluster", "h100:8x8", "--global-batch", "256", "--count", "3"]
    found = json.loads(soli(*words, "--json").stdout)["best"]
    assert all(sum(one["memory_parts_gb"].values()) == pytest.approx(one["memory_gb"], rel=1e-12) for one in found)
    shown = soli(*words).stdout
    table = shown[: shown.index("GB by kind")].splitlines()
    assert all(len(line) <= 80 for line in table if not line.startswith(("llama", "GB of a device")))
    for name in (*found[0]["memory_parts_gb"], "step s", "tokens/s", "MFU", "bubble", "exposed"):
        assert any(name in line for line in table), name
    assert f"{found[0]['exposed']:.1%}" in shown


# --- the page ---------------------------------------------------------------------------------------------


def test_the_page_has_the_plans_and_its_pictures_and_fetches_nothing() -> None:
    asked = task(batch=64)
    found = explain.answer(asked, 5)
    text = page(asked, found, ["tp=8: <it> costs & more"])
    assert all(one.plan in text.replace("<wbr>", "") for one in found.best)
    assert "tp=8: &lt;it&gt; costs &amp; more" in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(pictures) == 4
    for picture in pictures:
        assert len(list(ElementTree.fromstring(picture).iter())) > 50
    outside = set(re.findall(r"(?:href|src)=\"([^#\"][^\"]*)\"", text))
    assert not outside
    assert "<script" not in text
    told = page(asked, found, [], ("a < b",))
    assert told == page(asked, found, [], ("a < b",))
    assert "Read from the model: a &lt; b." in told


def test_a_step_is_drawn_to_its_end_or_it_is_said_that_it_is_not() -> None:
    """Of one rank: its layers and tables, the gradients' sums and the update. Of a schedule of other halves nothing."""
    asked = task(batch=64, fixed={"pp": 1.0}, cluster="h200:8x2")
    found = search(asked)
    cost = found.cost
    axes = Figure().add_subplot()
    _timeline(axes, asked, explain.answer(asked, 1), found)
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    spent = [cost.layers[0] + cost.tables[0], cost.gradients[0], cost.update[0]]
    assert ends[-3:] == pytest.approx(np.cumsum(spent))
    assert spent[1] > 0 < spent[2]
    other = task(cluster="h200:8x2", batch=64, fixed={"pp": 4.0, "schedule": ZBV})
    text = page(other, explain.answer(other, 1), [])
    assert text.count("<svg") == 3
    assert f"A step of the first plan is not drawn: {explain.answer(other, 1).best[0].plan}, whose order of passes is neither 1f1b nor interleaved." in text


# --- questions --------------------------------------------------------------------------------------------


def test_the_longest_sequence_fits_and_the_next_does_not() -> None:
    asked = task(cluster="h100:8x1", batch=8)
    length, choice = whatif.longest(asked)
    assert choice.memory_high_gb <= asked.limit / 1e9
    shorter, longer = (max(n for n in whatif.LENGTHS if n <= length), min(n for n in whatif.LENGTHS if n > length))
    assert whatif.holds(replace(asked, seq=length))
    assert not whatif.holds(replace(asked, seq=length + (longer - shorter) // whatif.FINER))
    assert whatif.longest(replace(asked, cluster=read_cluster("h200:8x1")))[0] > length


def test_no_fewer_servers_are_enough() -> None:
    """480 sequences are shared by 8, 16 and 24 devices alike."""
    asked = task(cluster="h100:8x1", batch=480)
    speeds = [
        whatif.explain.answer(replace(asked, cluster=read_cluster(f"h100:8x{n}")), 1).best[0].tokens_per_s
        for n in (1, 2, 3)
    ]
    assert speeds[2] > max(speeds[:2])
    nodes, choice = whatif.devices(asked, speeds[2] * 86400 * 0.999, 1.0)
    assert nodes == 3
    assert choice.tokens_per_s == speeds[2]


def test_the_nearest_plan_that_does_not_fit_says_what_it_lacks() -> None:
    asked = task(cluster="h100:8x1", batch=64)
    best = whatif.explain.answer(asked, 1).best[0]
    said = whatif.explain.beyond(asked, best)
    lacks, limit = float(said.split("lacks ")[1].split()[0]), asked.limit / 1e9
    assert float(said.split("up to ")[1].split()[0]) == pytest.approx(limit + lacks, abs=0.11)
    plan = said.split("does not fit, ")[1].split(", would")[0]
    fixed = whatif.explain.fixed_of(plan)
    assert "does not fit" in whatif.explain.why_not(asked, fixed)
    assert whatif.explain.beyond(replace(asked, cluster=read_cluster("b300:8x64")), best) == ""


@pytest.mark.parametrize("gigabytes", [66, 70, 72])
def test_no_plan_that_is_quicker_lacks_less_than_the_nearest(gigabytes: int) -> None:
    """The quickest with the least of some amounts of memory more was named, and at 70 GB another lacked less."""
    asked = replace(task(cluster="h100:8x1", batch=64), memory=gigabytes * 1e9)
    best = whatif.explain.answer(asked, 1).best[0]
    lacks = float(whatif.explain.beyond(asked, best).split("lacks ")[1].split()[0])
    for less in (0.2, 0.5, 0.8):
        between = replace(asked, memory=(gigabytes + less * lacks) * 1e9)
        assert whatif.explain.answer(between, 1).best[0].step_time_s >= best.step_time_s * (1 - 5e-4)


def test_the_largest_model_fits_and_the_next_does_not() -> None:
    asked = task(cluster="h100:8x1", batch=64)
    model, parameters, _ = whatif.largest(asked)
    assert whatif.holds(replace(asked, model=model))
    assert parameters == pytest.approx(memory.parameters(search(replace(asked, model=model)).points)[0])
    sizes = [whatif.scaled(LLAMA, whatif.STEP**k) for k in whatif.SIZES]
    following = sizes[[one.name for one in sizes].index(model.name) + 1]
    assert not whatif.holds(replace(asked, model=following))
    assert model.heads / model.kv_heads == LLAMA.heads / LLAMA.kv_heads
    inner = lambda one: one.layers * one.hidden * (one.hidden + one.ffn)
    for one, k in zip(sizes, whatif.SIZES, strict=True):
        if one.hidden >= LLAMA.hidden:
            assert inner(one) == pytest.approx(inner(LLAMA) * whatif.STEP ** (3 * k), rel=0.05)


def test_what_is_smaller_need_not_fit() -> None:
    """Of one sequence a step on twelve devices: no small model has layers for so many stages, and lengths between long ones do not divide."""
    asked = Task(named("llama-3-8b"), read_cluster("a100-40gb:4x3"), 1, 8192)
    assert not whatif.holds(replace(asked, model=whatif.scaled(asked.model, whatif.STEP**-40)))
    assert whatif.largest(asked)[1] > 2 * asked.model.parameters
    assert not whatif.holds(replace(asked, seq=90112))
    assert whatif.holds(replace(asked, seq=98304))
    assert whatif.longest(asked)[0] >= 98304


def test_enough_devices_are_the_fewest() -> None:
    asked = task(SMALL, batch=256, seq=2048)
    nodes, choice = whatif.devices(asked, 1e12, 5)
    assert 1e12 / choice.tokens_per_s <= 5 * 86400
    fewer = {1 << k for k in range(12)} | {3 << k for k in range(12)}
    before = max(n for n in fewer if n < nodes)
    best = explain.answer(replace(asked, cluster=replace(asked.cluster, nodes=before)), 1).best[0]
    assert 1e12 / best.tokens_per_s > 5 * 86400
    with pytest.raises(SoliError, match=r"in 0\.001 days"):
        whatif.devices(asked, 1e15, 0.001)


def test_a_fixed_cp_divides_the_longest_sequence() -> None:
    length, choice = whatif.longest(task(cluster="h100:6x1", batch=8, fixed={"cp": 3.0}))
    assert length % 3 == 0
    assert "cp=3" in choice.plan


def test_nothing_that_fits_is_said() -> None:
    with pytest.raises(SoliError, match="holds nothing"):
        whatif.longest(task(memory=1e9))
    with pytest.raises(SoliError, match="holds nothing"):
        whatif.largest(task(memory=1e8))


def test_solis_models_are_planned_by_their_sizes() -> None:
    """As the program that they are: traced, without weights; 12 l h^2 parameters and the tables of a GPT."""
    for name, sizes, parameters in (
        ("gpt", "vocab=51200,dim=1024,layers=24,heads=16", 12 * 24 * 1024**2 + (51200 + 2048) * 1024),
        ("llama", "vocab=32000,dim=512,layers=4,heads=8,groups=2,hidden=1408,seq=4096", 2 * 32000 * 512 + 4 * 512 * (2.5 * 512 + 3 * 1408)),
        ("vit", "classes=10,dim=256,layers=6,heads=4,size=64,patch=8", 12 * 6 * 256**2),
    ):  # fmt: skip
        done = soli("plan", f"{name}:{sizes}", "--cluster", "h100:8", "--global-batch", "64", "--json")
        assert done.returncode == 0, done.stderr
        assert abs(json.loads(done.stdout)["parameters"] / parameters - 1) < 0.03
    for text, said in (
        ("gpt", "the sizes of gpt are not said"),
        ("gpt:wide=3", "gpt has no such size"),
        ("gpt:vocab=x", "no such size"),
    ):
        done = soli("plan", text, "--cluster", "h100:8", "--global-batch", "64", "--json")
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
        error = json.loads(done.stdout)["error"]
        assert (error["exit_code"], error["problems"][0]["what"] in done.stderr) == (2, True)


def test_layers_without_experts_are_counted() -> None:
    """DeepSeek-V3's first three layers are no mixtures: 671 billion parameters, 37 of each token (arXiv 2412.19437)."""
    model = of_entry("deepseek-v3")
    assert (model.parameters, model.used) == (pytest.approx(671e9, rel=0.001), pytest.approx(37e9, rel=0.02))
    cut = named("deepseek-v3-l2")
    assert cut is not None
    assert (cut.layers, cut.plain) == (2, 0)  # as SimuMax cuts it: its four layers take 122 GB, which four with experts do
    cut = replace(cut, plain=2)
    dense = replace(cut, experts=0, active=1, shared=0, ffn=cut.plain_ffn, plain=0)
    found = [search(Task(one, read_cluster("h100:8"), 16, 4096), 3) for one in (cut, dense)]
    costs = lambda one, i: [getattr(one.cost, name)[i] for name in ("time", "memory", "states")]
    ours, theirs = ({str(plan_of(one.points, i)): costs(one, i) for i in range(len(one.points))} for one in found)
    alike = ours.keys() & theirs.keys()
    assert len(alike) > 3
    np.testing.assert_allclose([ours[plan] for plan in alike], [theirs[plan] for plan in alike], rtol=1e-3)
    none, half, both = (replace(cut, plain=n).parameters for n in (0, 1, 2))
    assert half == pytest.approx((none + both) / 2)
    assert "671 billion parameters, 37.55 of a token" in explain.sized(model)


def test_a_published_model_is_planned_by_its_name(tmp_path: Path) -> None:
    words = ["--cluster", "h100:8x8", "--global-batch", "256"]
    done = soli_anew("plan", "llama-3-70b", *words)
    assert done.returncode == 0, done.stderr
    assert "70.56 billion parameters, 256 sequences of 8192 tokens" in done.stdout
    assert "its dimensions are those of the published llama-3-70b." in done.stdout
    lost = soli("plan", "lama-3-70", *words)
    assert lost.returncode == 2
    assert "a published model's name (llama-3-70b," in lost.stderr


def test_the_command_answers_and_writes(config: Path) -> None:  # noqa: F811
    words = ["plan", str(config), "--cluster", "h100:8x1", "--global-batch", "16", "--seq", "2048"]
    asked = task(cluster="h100:8x1", batch=16, seq=2048)
    done = soli(*words, "--whatif", "seq", "--whatif", "model", "--whatif", "tokens=1e11,days=30", "--json")
    assert done.returncode == 0, done.stderr
    one, two, three = json.loads(done.stdout)["whatif"]
    assert one["seq"] == whatif.longest(asked)[0]
    assert two["parameters"] == whatif.largest(asked)[1]
    assert three["nodes"] == whatif.devices(asked, 1e11, 30)[0]
    assert f"{one['seq']} tokens" in soli(*words, "--whatif", "seq").stdout
    file = config / "answer.html"
    assert str(file) in soli(*words, "--html", str(file)).stdout
    assert file.read_text().count("<svg") == 4
    for wrong in (["--whatif", "gpus"], ["--whatif", "tokens=0,days=3"], ["--html", str(config / "no" / "x.html")]):
        done = soli(*words, *wrong)
        assert done.returncode == 2, wrong
        assert "Traceback" not in done.stderr

"""Rows of a table of configurations, as points: what each says, what is inferred where it is silent, what is refused.

A row is what a CSV file has of one run: its model by dimensions, its plan, and its devices, under the names that
columns.toml has. What a row leaves out is inferred where there is a usual answer, and said; where there is none, or where
what it says contradicts itself, the row is refused with every reason.
"""

import re
from collections.abc import Mapping
from math import ceil, gcd

from soli.planner import spellings
from soli.planner.cells import SILENT, number, text, true
from soli.planner.columns import COLUMNS, MEMORIES, STATES, TIMES, WORDS, spelt, told_by, unread
from soli.planner.combined import combined
from soli.planner.cost import borders, memory
from soli.planner.cost import points as cost
from soli.planner.cost.points import FULL, NONE, SELECTIVE, points
from soli.planner.cost.programs import MEGATRON, OLD, TESTS, WHOLE, blocks, first, of_program, tells
from soli.planner.cost.states import DEEPSPEED, FULLY, KEPT, LORA, of_states
from soli.planner.row import BY_EYE, DEVICES, RECOMPUTE, SIZE, Row, Said
from soli.planner.row_fit import fitted, narrowed
from soli.planner.row_machine import counted, device_of, machine_named, network_of, precision_of
from soli.planner.row_model import FLASH_SINCE, adapters_of, attention_of, called, model_of, unsaid

COMPARED = re.compile(r"\b(?:than|like|as|vs\.?|versus|equal to|unlike)\s+\S+")
"""What a note says of another program or stage."""
ROUNDED = 0.005
"""How far a number of three digits may be from what it stands for."""
LOOSE = 0.1
"""The same of one digit: "4M"."""
USUAL = 8.0
"""Sequences of a microbatch where nobody says it and no pipeline wants many."""


def read(row: Mapping[str, str]) -> Row:
    """A row of a table, by column."""
    beyond = next((cells for name, cells in row.items() if name is None), ())  # csv.DictReader's
    fewer = None in row.values()
    row, found = machine_named(spelt(row)), Row()
    if fewer:
        found.inferred.append("it has fewer cells than the table has columns")
    if any(cell.strip() for cell in beyond):
        found.refused.append('it has more cells than the table has columns (put cells that hold commas into "quotes")')
        return found
    said = {name: number(row, name, columns, found.refused) for name, columns in COLUMNS.items()}
    combined(row, said, found)
    shard, fsdp = spellings.sharding(text(row, "shard")), text(row, "fsdp")
    group = shard.group if shard and shard.group else int(fsdp) if fsdp.isdecimal() and fsdp != "1" else 0
    if group and said["shard_group"] is None:
        said["shard_group"] = float(group)
    device = device_of(row, found)
    if device is None:
        return found
    counted(row, said, found)
    found.device = device
    _program(row, said, found)
    told = told_by(row)
    spoken = spellings.affirmed(f"{called(row)}; {text(row, 'precision')}; {told}")
    if FULLY.search(spoken):  # programs are named by what they can as well
        spoken = spoken.replace(text(row, "framework").lower(), "")
    frozen = bool(LORA.search(spoken))
    precision = precision_of(row, device, found, frozen)
    point = cost.of_device(device, precision) if precision else {}
    point |= network_of(row, said, device, found)
    point |= {"logged": float(found.framework == TESTS), "frugal": float(found.framework != spellings.NANOTRON)}
    point |= of_program(found.framework, found.generation, f"{told}; {text(row, 'schedule')}; {text(row, 'precision')}")
    point["scored"] = first("scored", f"{called(row)}; {told}".lower(), 1.0)
    point |= model_of(row, said, found)
    point["frozen"] = float(frozen)
    point |= attention_of(row, point, found)
    sees_all = tells("encoders", called(row)) or tells("both_ways", f"{told}; {text(row, 'attn_backend')}")
    point["both_ways"] = max(point.get("both_ways", 0.0), float(sees_all))
    point |= _degrees(said, point, found)
    if point.get("experts") and not said["ep"] and tells("dispatched", spellings.affirmed(told)):
        point["ep"] = float(gcd(int(point["experts"]), int(point["tp"] * point["cp"] * point["dp"])))
        found.inferred.append(f"ep={point['ep']:g}")
    point["blocking"] = float(blocks(told, point["tp"] * point["pp"] * point["cp"] * point["dp"]))
    told = f"{told}; {text(row, 'shard')}; {text(row, 'precision')}"
    point |= _states(row, precision or "", point["pp"] > 1, told, found)
    point |= _ways(row, said, point, found)
    point |= _borders(point, found)
    point |= _choices(row, said, point, found)
    point |= _batch(row, said, point, found)
    found.inferred += unread(row)
    if not found.refused:
        found.refused += _impossible(said, point)
    if not found.refused:
        found.point = point
        if found.framework == "soli" and point["pp"] > 1:  # as a search of its plans has them
            placed = borders.placed(points([point]))
            point |= {"longest": float(placed.longest[0]), "fewer": float(placed.fewer[0])}
        if point["frozen"]:
            _adapted(row, f"{called(row)} {told}", point, found)
        found.inferred += _uncounted(said, point)
        fitted(found)
    return found


def _program(row: Mapping[str, str], said: Said, found: Row) -> None:
    """Settles whose program ran, as far as its row and its device tell."""
    found.framework = framework(row)
    states = (spellings.sharding(text(row, name)) for name in ("shard", "zero"))
    if found.framework == spellings.DEEPSPEED and (said["tp"] or 1) > 1 and not any(one and one.zero == 3 for one in states):
        found.framework = DEEPSPEED  # beside Megatron: it splits no products by itself
    named = spellings.program(text(row, "framework"), text(row, "source"))
    found.plain = named == spellings.PYTORCH
    if found.framework == OLD and found.generation in FLASH_SINCE:  # which it never ran on
        found.framework = MEGATRON
    if named == spellings.OTHER:
        found.inferred.append("framework=any" if found.framework == spellings.OTHER else f"framework={found.framework}, as its shard says")


def _states(row: Mapping[str, str], precision: str, piped: bool, told: str, found: Row) -> dict[str, float]:
    """What the optimizer keeps of a parameter, and whether its step is one kernel."""
    optimizer = text(row, "optimizer")
    kept = spellings.meant("moments", optimizer.lower())
    if not SILENT.fullmatch(optimizer) and kept is None:
        found.inferred.append(f"optimizer={optimizer} as Adam")
    found.refused += [f"optimizer: '{optimizer}' has no backward, of which nothing is known here"] if kept == -1 else []
    fused = "fused" in spellings.affirmed(optimizer) and "unfused" not in optimizer.lower()
    return {"fused": float(fused), **of_states(found.framework, precision, piped, told, optimizer)}


def _adapted(row: Mapping[str, str], told: str, point: dict[str, float], found: Row) -> None:
    """Beside frozen weights: the bits that these have, and the adapters."""
    spoken = spellings.affirmed(told).replace(text(row, "framework").lower(), "")  # a program's name may be of one way
    if bits := first("narrow", spoken, first("narrowed", text(row, "precision").lower(), 0.0)):
        found.inferred.append(f"frozen weights of {bits:g} bits")
        point["weight"] = narrowed(point, bits, first("beside_narrow", text(row, "framework").lower(), 2.0))
    point["spared"] = float(not point["experts"] and tells("attention_alone", spoken))
    point["adapters"] = adapters_of(row, point, found)
    if point["spared"] and point.get("parts"):
        point["parts"] = 0.0  # which keep less already
        found.inferred.append("recompute_modules beside adapters is not counted")


def read_measured(row: Mapping[str, str]) -> Row:
    """A row with what was measured of it."""
    found, row = read(row), spelt(row)
    found.time, found.memory, found.states = (
        next((value * unit for column, unit in units.items() if (value := number(row, name, (column,), found.refused))), None)
        for name, units in (("time", TIMES), ("memory", MEMORIES), ("states", STATES))
    )  # fmt: skip
    if DEVICES in " ".join(found.inferred) and (found.point.get("zero") or found.timeless):
        found.memory = found.states = None  # of states that are shared out among a number that nobody says
    found.time = None if found.timeless else found.time
    if any(word.startswith(SIZE) for word in found.inferred):
        found.memory = found.states = None  # of as many sequences as nobody says
    if "by eye" in text(row, "provenance"):
        found.inferred.append(BY_EYE)
    found.fits = "oom" not in text(row, "status").lower()
    return found


def framework(row: Mapping[str, str]) -> str:
    """Whose program ran: a family whose rows share constants."""
    if text(row, "test_case"):
        return TESTS  # of toy sizes, deterministic, on shared machines
    found = spellings.program(text(row, "framework"), text(row, "source"))
    if found not in (spellings.PYTORCH, spellings.OTHER):
        return found
    shard = spellings.affirmed(text(row, "shard"))
    if re.search(r"fsdp|(?:full|fully|hybrid|no)_shard|shard_grad_op", shard):
        return spellings.FSDP
    if found == spellings.OTHER:
        return found
    told = f"{shard} {COMPARED.sub('', spellings.affirmed(text(row, 'notes')))}"
    stage = re.search(r"deepspeed|\bzero[- _]?(?:stage[- _]?)?[123]\b", told) or text(row, "zero") in ("1", "2", "3")
    return spellings.DEEPSPEED if stage else spellings.FSDP


def _degrees(said: Said, point: dict[str, float], found: Row) -> dict[str, float]:
    tp, pp, cp, ep = (said[name] or 1.0 for name in ("tp", "pp", "cp", "ep"))
    cp = max(cp, said["ulysses"] or 1.0)
    chunks = max(said["chunks"] or 1.0, 1.0)
    if said["chunk_layers"] and "layers" in point:  # Megatron-LM's num-layers-per-virtual-pipeline-stage
        chunks = max(point["layers"] / pp / said["chunk_layers"], 1.0)
    gpus, dp, nodes, each = said["gpus"], said["dp"], said["nodes"], said["per_node"]
    shared = said["shard_group"] or 1.0
    if nodes and gpus is None:
        gpus = nodes * (each or point.get("node", 1.0))
        found.inferred += [] if each else [f"{DEVICES}{gpus:g}"]
    elif nodes and each and gpus != nodes * each:
        found.refused.append(f"{nodes:g} nodes of {each:g} are {nodes * each:g}, and it has {gpus:g} gpus")
    if gpus is None and dp is None and said["shard_group"]:
        dp = shared * (said["replicate"] or 1.0)
    if gpus is None and dp is None:
        model = pp * tp * cp
        gpus = model * max(ceil(max(point.get("node", 1.0), pp * ep) / model), 1)
        found.inferred.append(f"{DEVICES}{gpus:g}")
    if dp is None and gpus is not None:
        dp = gpus / (tp * pp * cp)
        if dp != int(dp) or dp < 1:
            found.refused.append(f"{gpus:g} gpus are no multiple of tp x pp x cp = {tp * pp * cp:g}")
    elif gpus is not None and dp is not None and ep > 1 and gpus == tp * pp * cp * dp * ep:
        dp = dp * ep
        found.inferred.append(f"dp={dp:g}, with the ranks of ep")
    elif gpus is not None and dp is not None and shared > 1 and gpus == tp * pp * cp * dp * shared:
        dp = dp * shared  # copies alone, as MaxText counts
        found.inferred.append(f"dp={dp:g}, with the ranks that share states")
    elif gpus is not None and dp is not None and gpus != tp * pp * cp * dp:
        found.refused.append(f"tp x pp x cp x dp = {tp * pp * cp * dp:g}, and it has {gpus:g} gpus")
    if ep > (stage := tp * cp * (dp or 1.0)) and not said["etp"]:
        found.inferred.append(f"ep={ep:g} as {stage:g}: a stage has no more ranks")
        ep = stage
    return {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp or 1.0, "chunks": chunks}


def _ways(row: Mapping[str, str], said: Said, point: dict[str, float], found: Row) -> dict[str, float]:
    """The order of a pipeline's passes, how attention crosses cp, how tp's ranks share a product, how many share an expert's."""
    order, kind, shape = (text(row, name) for name in ("schedule", "cp_kind", "tp_kind"))
    if SILENT.fullmatch(order) and point["chunks"] == 1:
        told = spellings.affirmed(f"{text(row, 'vp')}; {text(row, 'framework')}; {text(row, 'notes')}")
        order = spellings.meant("told_schedules", COMPARED.sub("", told)) or order
    if (stages := re.search(r"\bvp{0,2}\s*=\s*(\d+)", order, re.I)) and point["chunks"] == 1:
        point = point | {"chunks": float(stages[1])}
    tp, cp, chunks, heads = point["tp"], point["cp"], point["chunks"], point.get("heads", 1.0) / point["tp"]
    schedule = spellings.way("schedules", order) if point["pp"] > 1 else cost.ONE
    if schedule is None or (schedule > cost.INTERLEAVED and chunks > 1 + (schedule >= cost.ZBV)):
        found.refused.append(f"schedule: '{order}' of {chunks:g} stages a rank is not known")
    elif schedule == cost.DUALPIPEV and not re.search(r"dual\W*pipe\W*v", order, re.I):
        found.inferred.append(f"schedule={order} as dualpipev, of one copy of the weights")
    elif schedule == cost.INTERLEAVED and chunks == 1:
        layers, even = point.get("layers", 0.0), lambda stages: layers % stages in (0, stages - 2)  # the tables may be stages too
        chunks = next((float(n) for n in (2, 3, 4, 5) if even(point["pp"] * n)), 2.0)
        found.inferred.append(f"vp={chunks:g}")
    told = f"{text(row, 'framework')} {text(row, 'notes')}".lower()
    beside = "ulysses" if said["ulysses"] or "ulysses" in told else ""
    context = spellings.way("contexts", f"{text(row, 'cp')} {kind} {beside}") if cp > 1 else cost.RING
    if context is None:
        found.inferred.append(f"cp_comm_type={kind} as a ring")
    if context == cost.ULYSSES and heads % cp:
        found.refused.append(f"Ulysses over cp={cp:g} cuts the {heads:g} heads of a rank")
    power = {"2d": 2, "3d": 3}.get(shape.lower(), 1)
    edge = round(tp ** (1 / power))
    if edge**power != tp or (power == 1 and shape.lower() != "1d" and tp > 1 and not SILENT.fullmatch(shape)):
        found.refused.append(f"tp_mode: '{shape}' of {tp:g} ranks is not known (1d, 2d, 3d)")
    schedule = schedule or cost.ONE
    return {
        "schedule": schedule, "chunks": 1.0 if schedule > cost.INTERLEAVED else chunks, "context": context or cost.RING,
        "etp": said["etp"] or 0.0, "rows": float(edge) if power > 1 else 1.0, "tensor": (cost.LINE, cost.GRID, cost.CUBE)[power - 1],
    }  # fmt: skip


def _borders(q: Mapping[str, float], found: Row) -> dict[str, float]:
    """Layers of the longest stage, where it is not as short as can be, and how many less the last has, which has the last product.

    nanotron's first stage ends where its products are more than a stage's share of all, the last one among them.
    """
    layers, stages = q.get("layers", 0.0), q["pp"] * q["chunks"]
    if found.framework != spellings.NANOTRON or q["pp"] == 1 or not layers:
        return {"longest": 0.0, "fewer": float(q["pp"] > 1 and layers % stages > 0)}
    one = q["hidden"] * (4 * q["hidden"] + (2 + q["gated"]) * q["ffn"])
    return {"longest": min((layers + q["vocab"] * q["hidden"] / one) // q["pp"] + 1, layers), "fewer": 0.0}


def _choices(row: Mapping[str, str], said: Said, point: dict[str, float], found: Row) -> dict[str, float]:
    """What is sharded, recomputed, cut along the sequence and moved to the host."""
    shard, recompute, fsdp, modules = (text(row, name) for name in ("shard", "recompute", "fsdp", "recompute_modules"))
    if not SILENT.fullmatch(modules) and re.fullmatch(r"|\W*selective\W*", recompute.lower()):
        recompute = f"selective: {modules}"
    if not shard and spellings.switch(fsdp) is None and not fsdp.isdigit():
        shard = fsdp
    states, by_stage = _sharding(row, shard, found)
    zero = _zero(row, shard, states.zero if by_stage.zero is None else by_stage.zero, point, found)
    level, again = _recomputed(row, said, recompute, point, found)
    parted = _parted(row, recompute, point, found)
    parts = spellings.offloaded(text(row, "offload"))
    moved = _moved(row, parts, zero == 3 and level == FULL, found)
    ranks = point["dp"] * point["cp"]
    usual = max(point["node"] // point["tp"], 1.0) if states.copied else ranks  # HSDP: a server
    aside = " ".join(text(row, name) for name in ("framework", "shard", "zero", "optimizer")).lower()
    places = (*parts, f"; {aside}")
    hosted = zero == 3 and (found.framework == spellings.FSDP or any(spellings.meant("hosted", place) for place in places))
    offload = float(states.offload or by_stage.offload or any(spellings.meant("offloaded", place) for place in places))
    group = said["shard_group"]
    group = ranks if group == point["dp"] else group  # beside cp, whose ranks share them too
    copies = said["replicate"] or states.replicate
    found.grouped = states.copied and not group and not copies
    copies = copies or max(ranks / (group or usual), 1.0)
    apart = found.plain and not zero and tells("compiled", spellings.affirmed(told_by(row)))  # FSDP's units are compiled apart from the loss
    return {
        "zero": zero if ranks > 1 or (zero == 3 and found.framework == spellings.DEEPSPEED) else 0.0,
        "replicate": copies if ranks % copies == 0 else 1.0,
        "offload": offload * (2.0 if hosted else 1.0),
        # They go to the host as the backward makes them, in parts (ZeRO-Offload, arXiv 2101.06840, 4.1).
        "gradient": 0.0 if offload and zero >= 2 and found.framework == spellings.DEEPSPEED else point["gradient"],
        "moved": float(moved),
        "one_loss": min(point["one_loss"], WHOLE * max(point["low"] / 2, 1.0)) if apart else point["one_loss"],
        "recompute": level,
        "again": again,
        "sp": float(parted and point["tp"] > 1),
    }


def _sharding(row: Mapping[str, str], shard: str, found: Row) -> tuple[spellings.Sharding, spellings.Sharding]:
    """What the columns of how states are sharded say, and that of ZeRO's stage."""
    states, by_stage = spellings.sharding(shard), spellings.sharding(text(row, "zero"))
    if states is None or by_stage is None:
        unread = f"shard: '{shard}'" if states is None else f"zero: '{text(row, 'zero')}'"
        found.refused.append(f"{unread} is not understood (none, zero1, zero2, zero3, FULL_SHARD, ...)")
        return spellings.Sharding(), spellings.Sharding()
    if states.zero and by_stage.zero not in (None, states.zero):
        found.refused.append(f"two columns say how much is sharded: shard '{shard}', zero '{text(row, 'zero')}'")
    return states, by_stage


def _zero(row: Mapping[str, str], shard: str, zero: float | None, point: Mapping[str, float], found: Row) -> float:
    """ZeRO's stage. `zero`: as columns say it; None: by what else the row says, or its program usually has."""
    if found.framework in (MEGATRON, OLD) and zero == 2 and re.search(r"dist\w*[ _-]?opt", shard.lower()):
        zero = 1.0  # whose gradients stay whole, whatever it is called
    if zero is None:
        degrees = (text(row, name) for name in ("fsdp", "data_parallel_shard_degree", "dp_shard"))
        sharded = any(re.fullmatch(r"-1|[2-9]|\d\d+", degree) for degree in degrees)
        sharded = sharded or true(row, "fsdp") or true(row, "megatron_fsdp")
        program = spellings.sharding(text(row, "framework")) or spellings.Sharding()
        usual = 3.0 if found.framework == spellings.FSDP and not found.plain and point["dp"] * point["cp"] > 1 else 0.0
        # Megatron-Core's recipes of since then shard the optimizer; nanotron's bench runs of a model of 1.2B keep 7.6 GB of states at dp=16
        if found.framework == spellings.NANOTRON or (found.framework == MEGATRON and found.generation in FLASH_SINCE):
            usual = 1.0
        zero = 3.0 if sharded else (spellings.sharding(text(row, "dist_opt")) or spellings.Sharding()).zero or float(true(row, "dist_opt"))
        if not zero and unsaid(row, "dist_opt", found):
            zero = usual if program.zero is None else program.zero
            found.inferred.append(f"zero={zero:g}")
    # that optimizer of bf16 shares its states out whatever the stage (deepspeedai/DeepSpeed, runtime/bf16_optimizer.py)
    return 1.0 if not zero and point["gradient"] == KEPT["both"]["gradient"] else zero


def _parted(row: Mapping[str, str], recompute: str, point: Mapping[str, float], found: Row) -> bool:
    """Whether sp cuts the sequence, where there is tp."""
    sp = text(row, "sp") or "on" * recompute.lower().startswith("seq")  # Calculon's seqsel has both
    sp = "on" if sp == f"{point['tp']:g}" else sp
    silent = bool(SILENT.fullmatch(sp))
    parted = None if silent and sp.lower() != "none" else spellings.switch(sp)
    if parted is None and silent and point["tp"] > 1 and found.generation in FLASH_SINCE:
        titan = "titan" in text(row, "framework").lower()
        parted = titan or found.framework in (MEGATRON, spellings.NANOTRON)  # whose recipes cut the sequence wherever they have tp
        found.inferred.append(f"sp={'on' if parted else 'off'}")
    if parted is None and not silent:
        found.refused.append(f"sp: '{sp}' is not understood (on, off, =tp)")
    return bool(parted)


def _moved(row: Mapping[str, str], parts: list[str], whole: bool, found: Row) -> bool:
    """Whether activations go to the host. `parts`: what is said to go there. `whole`: all is sharded, and all of layers recomputed."""
    moved = any("activ" in part for part in parts)
    unread = (part for part in parts if not (moved or SILENT.fullmatch(part)) and spellings.meant("offloaded", part) is None)
    found.inferred += [f"offload: '{part}' is not counted" for part in unread if not spellings.meant("hosted", part)]
    example = whole and re.search(r"megatron[\w -]{0,6}[+&/ -]+deepspeed|deepspeed.*\(megatron", text(row, "framework").lower())
    if example and found.framework == spellings.DEEPSPEED and SILENT.fullmatch(text(row, "offload")):
        moved = True  # DeepSpeedExamples, Megatron-LM-v1.1.5-ZeRO3, examples/ds_pretrain_gpt2-zero3.sh: PA, PA_CPU
        found.inferred.append("offload=activations, as DeepSpeed's example of Megatron has it")
    return moved


def _recomputed(row: Mapping[str, str], said: Said, words: str, point: dict[str, float], found: Row) -> tuple[float, float]:
    """What is recomputed of each layer, and how many of a rank's are recomputed whole beside it."""
    silent = SILENT.fullmatch(words) and words.lower() != "none"
    point |= {"by_product": 0.0, "parts": 0.0}
    read = None if silent else spellings.recomputation(words)
    if read is None:
        if not silent:
            found.refused.append(f"recompute: '{words}' is not understood (none, selective, full, full 5 of 48)")
        if silent and "titan" in text(row, "framework").lower():
            found.inferred.append(f"{RECOMPUTE}selective")  # torchtitan/config/job_config.py, ActivationCheckpoint
            return NONE, _by_product(point)
        if silent and point["frozen"] and tells("litgpt", text(row, "framework").lower()):
            found.inferred.append("recompute: of FSDP's blocks, as LitGPT's finetuning has it")  # litgpt/finetune/lora.py, activation_checkpointing_policy
            return FULL if point["dp"] * point["cp"] > 1 else NONE, 0.0
        # transformers' models compute all of a layer again, or nothing; Megatron what attention makes between its products
        level = NONE if point.get("flash") or found.framework == TESTS or point["eager"] > 1 else SELECTIVE
        if found.framework != TESTS:
            found.inferred.append(f"{RECOMPUTE}{'none' if level == NONE else 'selective'}")
        return level, 0.0
    level, share, count = read
    # Of full and selective one column may say more than another.
    said_by = {bool(told[0]): one for one in WORDS["recompute"] if (told := spellings.recomputation(text(row, one)))}
    if len(said_by) > 1:
        found.refused.append(" and ".join(f"{one}={text(row, one)}" for one in said_by.values()) + " cannot both be")
    listed = spellings.modules(words) if level == SELECTIVE and found.framework != spellings.FSDP else None
    if listed is not None:
        parts = {name: spellings.TABLES["parts"].get(name) for name in listed}
        if other := [name for name, part in parts.items() if part is None]:
            found.inferred.append(f"recompute_modules: {', '.join(other)} is not counted")
        point["parts"] = float(sum({part for part in parts.values() if part}))
        return SELECTIVE if 0.0 in parts.values() else NONE, 0.0
    if nearly := spellings.meant("recomputed_nearly", words.lower()):
        found.inferred.append(f"recompute: '{words}' as {nearly}")
    own = ceil(point.get("layers", 1.0) / point["pp"])
    if level == FULL and text(row, "recompute_method").lower() == "block" and said["again"]:
        count = int(said["again"])
    if level == SELECTIVE and found.framework == spellings.FSDP:
        return NONE, own / 2 if re.search(r"layer|every|\d", words.lower()) else _by_product(point)
    if level == FULL and (share < 1 or 0 < count < own):
        return NONE, own * share if share < 1 else float(count)
    return level, 0.0


def _by_product(point: dict[str, float]) -> float:
    """Layers that every second product, and all that is none, takes as long to compute again as: half of them; of experts, whose
    products are grouped and so none of these (memory.py), all."""
    point["by_product"] = 1.0
    own = ceil(point.get("layers", 1.0) / point["pp"])
    return float(own) if point.get("experts") else own / 2


def _batch(row: Mapping[str, str], said: Said, point: dict[str, float], found: Row) -> dict[str, float]:
    whole = _whole_batch(row, said, point, found)
    size, times, dp = said["microbatch"], said["accumulate"], point["dp"]
    if whole is None and size is None:
        unsure = "batch_size: of a device, or of all? " if said["batch"] else ""
        found.refused.append(f"{unsure}it has no global_batch, nor microbatch and grad_accum")
        return {}
    if whole is None and times is None:
        times = point["pp"]  # enough for what a rank keeps; how long a step takes cannot be said
        found.timeless = True
        found.inferred.append(f"grad_accum={times:g}")
    if whole is None and size is not None and times is not None:
        whole = size * times * dp
    assert whole is not None
    if size is None:
        size = whole / dp / times if times else min(whole / dp, USUAL if point["pp"] == 1 else 1.0)
        size = float(max((n for n in range(1, int(size) + 1) if times or whole % dp or whole / dp % n == 0), default=1))
        found.inferred.append(f"{SIZE}{size:g}")
    if whole < dp * size:
        found.refused.append(f"global_batch={whole:g} is less than dp x microbatch = {dp * size:g}")
    elif whole % (dp * size):
        found.inferred.append(f"a last microbatch of less than {size:g}")
    if times and said["microbatch"] and whole != dp * size * times and not found.timeless:
        found.inferred.append(f"grad_accum={times:g} is not counted (global_batch={whole:g}, dp={dp:g})")
    return {"global_batch": whole, "microbatch": size}


def _whole_batch(row: Mapping[str, str], said: Said, point: dict[str, float], found: Row) -> float | None:
    """Sequences of a step, where a row says them: as such, as tokens, or as those of one replica."""
    tokens, seq, local, dp = said["batch_tokens"], point.get("seq", 1.0), said["local_batch"], point["dp"]
    # torchtitan's, of a microbatch
    pieces = any(text(row, column) for column in ("local_batch_size", "local_batch", "lbs"))
    if local and pieces and said["global_batch"] and point["pp"] == 1:
        said["microbatch"] = said["microbatch"] or local
    cells = (text(row, column) for column in COLUMNS["global_batch"] if said["global_batch"])
    found.inferred += [f"global_batch={said['global_batch']:g} of '{cell}'" for cell in cells if re.search("→|->|⇒", cell)]
    if said["global_batch"] or (said["batch"] and said["microbatch"]):
        return said["global_batch"] or said["batch"]
    if tokens:
        letter = re.search(r"(\d[\d.]*)\s*([kM])", " ".join(text(row, c) for c in COLUMNS["batch_tokens"]), re.I)
        binary = tokens * {"": 1.0, "k": 1.024, "m": 1.024**2}[letter[2].lower() if letter else ""]
        whole = binary / seq if binary % seq == 0 else max(round(tokens / seq), 1.0)
        even = round(whole / dp) * dp  # "62.9M" tokens are some 15,360 sequences, "2M" of 2,048 are 992
        near = max(ROUNDED, LOOSE / 10 ** (len(letter[1].replace(".", "")) - 1)) if letter else ROUNDED
        whole = even if whole % dp and abs(even / whole - 1) < near else whole
        found.inferred.append(f"global_batch={whole:g} of {tokens:g} tokens")
        return float(whole)
    times, batch = said["accumulate"], said["batch"]
    if batch and not tokens and not local:  # of a device, or of all; alike where there is one device and one microbatch
        each = dp * (times or 1.0)
        if batch % each or (times and found.plain):
            local = batch
            found.inferred.append(f"batch_size={batch:g} of a device")
        elif each == 1 or point["tp"] * point["pp"] > 1:  # tables of such plans say it of all
            found.inferred += [] if each == 1 else [f"batch_size={batch:g} of all"]
            return batch
    if local and (times or point["pp"] == 1):
        said["microbatch"] = said["microbatch"] or local
    return local * dp if local and not times else None


def _uncounted(said: Said, q: Mapping[str, float]) -> list[str]:
    """What a row says beside what is counted."""
    count = float(memory.parameters(points([q]))[0]) / 1e9
    stated, beside = said["params_b"] or count, []
    if abs(count / stated - 1) > 0.25:
        beside.append(f"params_b={stated:g} is not counted: its dimensions have {count:.3g}B")
    if q["ep"] > 1 and not q["experts"]:
        beside.append(f"ep={q['ep']:g} is not counted: it has no experts")
    return beside


def _impossible(said: Said, q: dict[str, float]) -> list[str]:
    """What no program could run."""
    rules = (
        (q["heads"] % q["kv_heads"] != 0, f"{q['kv_heads']:g} key heads do not divide {q['heads']:g} heads"),
        (q["heads"] > q["hidden"], f"{q['heads']:g} heads share a width of {q['hidden']:g}"),
        (q["pp"] * q["chunks"] > q["layers"] + 2,  # the tables may be stages too
             f"pp x vp = {q['pp'] * q['chunks']:g} stages share {q['layers']:g} layers"),
        (q["cp"] > q["seq"], f"cp={q['cp']:g} cuts a sequence of {q['seq']:g}"),
        (q["ep"] * q["etp"] > q["tp"] * q["cp"] * q["dp"],
             f"ep x etp = {q['ep'] * q['etp']:g} ranks are more than tp x cp x dp = {q['tp'] * q['cp'] * q['dp']:g}"),
        ((said["heads"] or 0) % q["tp"] != 0, f"tp={q['tp']:g} cuts {q['heads']:g} heads"),
        (q["experts"] % q["ep"] != 0, f"ep={q['ep']:g} shares {q['experts']:g} experts"),
        (0 < q["experts"] < (said["topk"] or 0), f"a token goes to {said['topk']} of {q['experts']:g} experts"),
    )  # fmt: skip
    return [what for wrong, what in rules if wrong]

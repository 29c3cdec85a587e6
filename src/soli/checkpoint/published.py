"""The names and forms that a published model has its weights in, and those of transformers' modules: experts one by one, and stacked.

Which becomes which is transformers' own table (its conversion_mapping.py), asked for the model that a config.json names, and worked through as
its loading and saving do; here one group of tensors at a time: those that become one another have their values made when one is written.
"""

import functools
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soli.checkpoint.tensorfile import Entry
from soli.core.errors import SoliError, blaming
from soli.core.events import events


def converted(entries: list[Entry], config: Path, back: bool) -> list[Entry]:
    """The same weights as modules of transformers' hold them; `back`: as they are published. As they are where no table is of them."""
    try:
        model = built(config)
    except SoliError as error:
        events.note(f"weights keep the names that they have: {error}", shown=True)
        return entries
    if getattr(model.config, "quantization_config", None) is not None:
        events.note("weights keep the names that they have: they are quantized", shown=True)
        return entries
    with blaming(lambda error: SoliError("published names of weights stand in a table of transformers, and this one has none, or another", got=error, fix="pip install 'soli[hf]'"), ImportError):
        import transformers.core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

    table = get_model_conversion_mapping(model, add_legacy=not back)
    if back:  # as transformers saves what it has not loaded
        table = [one.reverse_transform() for one in table[::-1] if not isinstance(one, PrefixChange)]
    names = [one for one in table if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in table if isinstance(one, loading.WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known: dict[str, Tensor] = {} if back else model.state_dict()
    groups: dict[str, tuple[Any, list[tuple[str, Entry]]]] = {}  # what is converted together, by the first name that it gets
    for entry in sorted(entries, key=lambda one: loading.dot_natural_key(one.key)):
        key, pattern = loading.rename_source_key(entry.key, [] if back else names, converters, model.base_model_prefix, known)
        key, pattern = (key, pattern) if back or key in known else (entry.key, None)
        groups.setdefault(key, (of_pattern.get(pattern) or loading.WeightRenaming(entry.key, key), []))[1].append((pattern or entry.key, entry))

    def made(key: str, whole: bool = True) -> dict[str, Tensor]:
        how = deepcopy(groups[key][0])
        for pattern, e in groups[key][1]:
            how.add_tensor(key, e.key, pattern, e.get() if whole else torch.empty(e.shape, dtype=e.dtype, device="meta"))
        return {name: x[0] if isinstance(x, list) else x for name, x in how.convert(key, model=model, config=model.config).items()}

    # of a tensor that becomes several the values are kept until another two are asked for: a file has them by turns
    values = functools.lru_cache(maxsize=2)(made)
    result: dict[str, Entry] = {}
    fix = f"copy the folder again, if part of it is missing; without {config.name} beside them weights keep the names that they have"
    for key, (how, sources) in groups.items():
        if len(sources) > 1 and isinstance(how, loading.WeightRenaming):
            raise SoliError(f"{key} is there more than once", got=", ".join(e.key for _, e in sources), fix="leave out what is old")
        got = f"{len(sources)} tensors, {sources[0][1].key} the first"
        with blaming(lambda error: SoliError(f"{key} cannot be made as transformers makes it", got=f"{got}: {error}", fix=fix)):  # noqa: B023 (it is called here)
            forms = made(key, False)
        for name, x in forms.items():
            to, wanted = loading.rename_source_key(name, names, [])[0] if back else name, known.get(name, x).shape
            if (len(sources) > 1 and wanted != x.shape) or to in result:
                raise SoliError(f"{to} would be of shape {tuple(x.shape)}", got=got, allowed=f"one of {tuple(wanted)}", fix=fix)
            result[to] = Entry(to, x.dtype, tuple(x.shape), lambda k=key, n=name: values(k)[n])  # type: ignore[misc]
    if result.keys() != {one.key for one in entries}:
        events.note(f"{len(entries)} tensors of {type(model).__name__} become {len(result)}, as {'they are published' if back else 'its modules have them'}", shown=True)
    return list(result.values())


def built(config: Path) -> Any:
    """The transformers model that a config.json names, without values."""
    try:
        import transformers

        given = transformers.AutoConfig.from_pretrained(config, trust_remote_code=False)
        names = given.architectures or []
        with torch.device("meta"):
            return getattr(transformers, names[0])(given) if names else transformers.AutoModelForCausalLM.from_config(given)
    except Exception as error:  # no transformers, or what a family makes of its numbers
        why = f"{config}: {type(error).__name__}: {error}".split("\n")[0]
        raise SoliError("transformers builds no model of this configuration", got=why, fix="pip install transformers, if that is missing") from error

"""What is seen of a model, before anything runs, that keeps it from a plan."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, jit, nn
from torch.nn.parameter import is_lazy

from soli.core.errors import Problem, SoliError, listed, listing, on_all_ranks
from soli.core.events import events
from soli.core.plan import Plan
from soli.parallel import hooks, kept, statistics

LAID = ("torch.nn.parallel", "torch.distributed.fsdp")
"""Whose modules send by themselves what soli sends."""


@listing
def problems(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    """All of it."""
    named = list(model.named_parameters())
    that = lambda wanted: [name or "the model" for name, module in model.named_modules() if wanted(module)]
    if not named:
        yield Problem("the model has no parameters", got=type(model).__name__, fix="there is nothing to train")
    if lazy := [name for name, param in named if is_lazy(param)]:
        yield Problem("parameters have no shape yet", got=listed(lazy), fix="run the model once before, on one batch")
    if compiled := that(lambda module: isinstance(module, jit.ScriptModule)):
        what = "TorchScript computes out of sight: random numbers, gathers and stages cannot be put into it"
        yield Problem(what, got=listed(compiled), fix="use the module that it was made from")
    if laid := that(lambda module: type(module).__module__.startswith(LAID)):
        yield Problem("the model is laid over ranks by something else", got=listed(laid), fix="give soli the plain module that was wrapped (.module)")
    if plan.tp * plan.cp > 1 and (sparse := that(lambda module: isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse)):
        yield Problem("the gradients of modules are sparse", got=listed(sparse), fix="build them with sparse=False")
    if plan.tp * plan.cp > 1 and (traced := that(_is_traced)):
        what = "torch.compile cannot look into tensors of which each rank has a part"
        yield Problem(what, got=listed(traced), fix="leave out torch.compile, or use plans with tp=1 and cp=1")
    hooked = that(lambda module: module._backward_hooks or module._backward_pre_hooks)
    if plan.pp * plan.tp * plan.cp > 1 and hooked:
        what = "hooks on the backward of modules are not put into a pipeline's stages, and see a rank's part of what tp and cp cut"
        fix = "hook tensors inside of a block's forward, or use plans with pp=1, tp=1 and cp=1"
        yield Problem(what, got=listed(hooked), fix=fix)
    norms = statistics.training_norms(model)
    if plan.pieces > 1 and norms and (not statistics.can(plan) or that(_is_traced)):
        what = "batch normalisation couples the rows of a batch, and they are added up over data-parallel ranks alone"
        allowed = "plans of dp and zero, without accumulate and recompute, and no torch.compile"
        fix = "use such a plan, GroupNorm or LayerNorm, or put these modules, and not the model, in eval()"
        yield Problem(what, got=f"{listed(norms)}, plan {plan}", allowed=allowed, fix=fix)
    if not lazy:
        yield from hooks.problems(model)
    if not lazy and max(plan.zero, plan.tp - 1, plan.pp - 1) > 0 and (shared := _shared(model)):
        what = "tensors lie in the memory of weights that train, which zero, tp and pp put elsewhere: they would keep the values of now"
        allowed = "one name for each memory; a weight itself may be in as many places as you like"
        fix = "read the weight where it is used (self.weight.detach() in the forward), clone() what is to stay as it is, or run with zero=0, tp=1, pp=1"
        yield Problem(what, got=listed(shared), allowed=allowed, fix=fix)


def _shared(model: nn.Module) -> list[str]:
    """Buffers, tensors in attributes and other weights in the memory of a weight that trains."""
    anew = {kept.name_in(path, getattr(hook, "name", "")) for path, m in model.named_modules() for hook in m._forward_pre_hooks.values()}
    weights = [(name, x) for name, x in model.named_parameters() if x.layout == torch.strided and not x.is_meta]
    # torch's older spectral_norm makes an attribute anew before each forward, which begins as the weight's memory
    others = [(name, x) for name, x in kept.tensors(model, tuples=True) if name not in anew]
    found: dict[int, list[tuple[tuple[int, int], str, Tensor]]] = {}
    for name, x in (*weights, *others):
        if x.numel():
            found.setdefault(x.untyped_storage()._cdata, []).append((kept.extent(x), name, x))
    shared = list[str]()
    for places in found.values():
        reach = list[tuple[tuple[int, int], str, Tensor]]()  # those before that end after this one begins
        for place, name, x in sorted(places, key=lambda one: one[:2]):
            reach = [one for one in reach if one[0][1] > place[0]]
            shared += [f"{name} in {other}" for _, other, y in reach if (x.requires_grad or y.requires_grad) and _in_common(x, y)]
            reach.append((place, name, x))
    return shared


def _in_common(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one memory have an element in common, and not just lie between each other's, as columns of a matrix do."""
    if x.dtype.itemsize != y.dtype.itemsize:
        return True
    marked = torch.zeros(max(kept.extent(x)[1], kept.extent(y)[1]) // x.element_size(), dtype=torch.bool)
    marked.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return bool(marked.as_strided(y.shape, y.stride(), y.storage_offset()).any())


def must_be_free(model: nn.Module) -> None:
    """SoliError where another engine has laid some of it: each would take the gradients of the other's loss for its own."""
    if taken := [name for name, param in model.named_parameters() if hasattr(param, "_laid")]:
        fix = "give one engine a module that has both models, with a loss of both; or build the model again for another engine"
        what, allowed = "another engine trains some of these parameters", "one engine for each parameter"
        raise on_all_ranks(what, got=listed(taken), allowed=allowed, fix=fix)


def without_caches(model: nn.Module, plan: Plan, shown: bool) -> bool:
    """Turn off, and say so, what transformers' models keep for generating, and in training for nothing: a block writes keys and values into an
    object, which is not made again with the block, nor handed to the next stage."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    found = [one for one in configs if getattr(one, "use_cache", None) is True]
    if not found or (plan.recompute == "none" and plan.pp == 1):
        return False
    for config in found:
        config.use_cache = False
    events.note("model.config.use_cache is off now: a key-value cache is for generating", shown=shown)
    return True


def need_one_document(batch: Any, plan: Plan) -> None:
    """Without caches transformers takes rows apart where position_ids restart (masking_utils.py), and so with them it does not."""
    positions = batch.get("position_ids") if isinstance(batch, dict) and batch.get("attention_mask") is None else None
    if positions is not None and bool((positions.diff() != 1).any()):
        what = "documents that position_ids tell apart in a row are so to transformers only where no cache is kept, which this plan turns off"
        got = f"plan {plan}, and model.config.use_cache=True: the model alone attends over all of a row"
        raise SoliError(what, got=got, fix="set model.config.use_cache = False before soli.parallelize, which your program alone needs as well")


def _is_traced(module: nn.Module) -> bool:
    """Whether torch.compile runs it, as a function of it or in place."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None

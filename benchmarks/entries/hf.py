"""A Llama of transformers: in one process, under the tp_plan that it brings along, and under soli's tp=2.

transformers: the class's own methods, those that from_pretrained calls, on a model that is built already; they run on
a CPU as they are (tried with 5.23). Its plan cuts the embedding over the vocabulary too and gathers
the head's logits. Every mode computes the loss from the logits, since the batches' targets are shifted already.
"""

import torch
import workload
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import soli
from entries import Step, soli_engine, start
from entries.tensor import trained


def build(mode: str, size: str) -> Step:
    """The training step of one mode."""
    model = build_model(size)
    if mode == "soli":
        return soli_step(model)
    if mode == "tp-plan":
        start()
        config, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_size=2, tp_plan="auto"))
        model = model.maybe_distribute_model(model, config, mesh)
    return trained(model, lambda batch: workload.mean_loss(model(input_ids=batch["tokens"]).logits, batch["targets"]))


def build_model(size: str) -> LlamaForCausalLM:
    """As wide and deep as the GPT of that size, with as many key-value heads as heads."""
    shape = workload.SIZES[size]
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=4 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.tokens,
        use_cache=False,
    )
    torch.manual_seed(workload.SEED)
    return LlamaForCausalLM(config)


def soli_step(model: LlamaForCausalLM) -> Step:
    """soli's step; the engine calls a model with those entries of the batch that its forward names."""
    engine = soli.parallelize(
        model,
        lambda output, batch: soli_engine.loss_fn(output.logits, batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=workload.LEARNING_RATE, fused=True),
        plan="tp=2",
    )
    return lambda batch: engine.step({"input_ids": batch["tokens"], "targets": batch["targets"]})

"""LitGPT's public classes, used in the order of its `pretrain` and `finetune_lora`.

Without their data modules, logger and evaluation, whose time is not measured here.
"""

from typing import Any

import lightning
import numpy as np
import torch
from litgpt.lora import GPT as AdaptedGPT
from litgpt.lora import Config as AdaptedConfig
from litgpt.lora import mark_only_lora_as_trainable
from litgpt.model import GPT, Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import chunked_cross_entropy, instantiate_torch_optimizer

from peers.clock import Clock
from peers.models import build, resolve_shape
from peers.sequences import read_batch
from peers.task import ADAPTER_ALPHA, ADAPTER_RANK, BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY, Task

OPTIMIZER = {
    "class_path": "torch.optim.AdamW",
    "init_args": {"lr": LEARNING_RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
}


def run(task: Task, clock: Clock) -> None:
    """Option: `adapter` (lora)."""
    if task.options.get("adapter"):
        finetune(task, clock)
    else:
        pretrain(task, clock)


def pretrain(task: Task, clock: Clock) -> None:
    """bf16-mixed, the whole model compiled, fused AdamW, clipped: `litgpt pretrain` on one device."""
    shape = resolve_shape(task.shape)
    fabric = make_fabric(clock, "bf16-mixed")
    with fabric.init_module(empty_init=True):
        model = GPT(Config(**sizes(task)))
    copy_weights(task, model, torch.float32)
    if shape.tied:
        model.transformer.wte.weight = model.lm_head.weight
    model.max_seq_length = task.length
    model = torch.compile(model, backend="inductor" if clock.cuda else "aot_eager")
    model = fabric.setup(model)
    optimizer = instantiate_torch_optimizer(OPTIMIZER, model.parameters(), fused=clock.cuda)
    optimizer = fabric.setup_optimizers(optimizer)
    sequences = np.load(task.sequences_file)
    clock.begin()
    for step in range(task.steps):
        batch = read_batch(sequences, step, task.micro_batch)
        inputs, labels = (part.to(fabric.device, non_blocking=True) for part in batch)
        logits = model(inputs)
        loss = chunked_cross_entropy(logits, labels)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done(loss)


def finetune(task: Task, clock: Clock) -> None:
    """bf16-true, not compiled, the head in chunks of 128 positions: `litgpt finetune_lora` on one device."""
    fabric = make_fabric(clock, "bf16-true")
    torch.manual_seed(SEED)
    adapter = {"lora_r": ADAPTER_RANK, "lora_alpha": ADAPTER_ALPHA, "lora_dropout": 0.0}
    with fabric.init_module(empty_init=False):
        model = AdaptedGPT(AdaptedConfig(**sizes(task), **adapter, lora_query=True, lora_value=True))
    mark_only_lora_as_trainable(model)
    copy_weights(task, model, torch.bfloat16)
    model.max_seq_length = task.length
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(instantiate_torch_optimizer(OPTIMIZER, model.parameters()))
    sequences = np.load(task.sequences_file)
    clock.begin()
    for step in range(task.steps):
        batch = read_batch(sequences, step, task.micro_batch)
        inputs, labels = (part.to(fabric.device, non_blocking=True) for part in batch)
        # Labels are already shifted, so the last position has one too.
        loss = chunked_cross_entropy(model(inputs, lm_head_chunk_size=128), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done(loss)


def make_fabric(clock: Clock, precision: Any) -> lightning.Fabric:
    torch.set_float32_matmul_precision("high")  # as its CLI does
    fabric = lightning.Fabric(
        accelerator="cuda" if clock.cuda else "cpu", devices=1, strategy="auto", precision=precision
    )
    fabric.launch()
    return fabric


def sizes(task: Task) -> dict[str, Any]:
    """The shape as LitGPT's config, as in its own list of models for Llama 3."""
    shape = resolve_shape(task.shape)
    scaling = shape.rope_scaling
    return {
        "name": "benchmark",
        "block_size": max(task.length, 8),
        "vocab_size": shape.vocab,
        "padded_vocab_size": shape.vocab,
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_query_groups": shape.kv_heads,
        "head_size": shape.head_size,
        "intermediate_size": shape.ffn,
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "norm_eps": shape.norm_eps,
        "mlp_class_name": "LLaMAMLP",
        "rope_base": int(shape.rope_theta),
        "rope_adjustments": scaling
        and {
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_seq_len": scaling.original_positions,
        },
    }


def copy_weights(task: Task, model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Load the same initial weights as all tools, with LitGPT's own conversion."""
    source = build(task, dtype)
    converted: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(model.config, {}, converted, dict(source.state_dict()))
    missing, unexpected = model.load_state_dict(converted, strict=False)
    assert not unexpected, unexpected
    assert all("lora_" in name for name in missing), missing

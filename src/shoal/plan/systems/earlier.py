"""Other systems as they were at a date: what of their traits came with a later version of their libraries.

`--like huggingface@2023-09` is Hugging Face's Trainer with the releases of September 2023. Each date is that of the
release which changed the trait.
"""

import re
from dataclasses import replace
from typing import Any

from shoal.catalogue.gpus import Gpu
from shoal.mistakes import UserMistake
from shoal.plan.systems.traits import SystemTraits

Month = tuple[int, int]  # year and month
HOPPER = (9, 0)

# PyTorch's wheels had the CUDA libraries of 2023 (12.1) until version 2.5, and those of 2024 (12.4 and 12.6) until
# version 2.8, which matters on Hopper.
NEW_WHEELS: Month = (2024, 10)
HOPPER_WHEELS: Month = (2025, 8)
# Usually run in NVIDIA's containers, whose libraries are of their day; torchtitan's results are of nightly builds.
CURRENT_LIBRARIES = {"megatron", "megatron-deepspeed", "nemo", "torchtitan"}
# Until PyTorch 2.11, its attention on Hopper was flash attention 2 rather than cuDNN's; and until the end of 2024
# that of Transformer Engine, by default (NeMo only from 24.01 to 24.07: NVTE_FUSED_ATTN in its launcher).
CUDNN_ATTENTION: Month = (2026, 3)
ENGINE_ATTENTION: Month = (2025, 1)
NEMO_ATTENTION: tuple[Month, Month] = ((2024, 1), (2024, 8))
# NeMo's overlaps of tensor-parallel collectives and of all-gathered weights came with version 1.20.
NEMO_OVERLAPS: Month = (2023, 6)
# From PyTorch 2.8 on, the Trainer's AdamW is fused (TrainingArguments.optim).
FUSED_ADAMW: Month = (2025, 8)
# torchtitan: its loss is compiled with its blocks; AdamW is fused by default (pull request 881); attention is cuDNN's,
# on Blackwell first (1196, 1776); keys are not repeated (2259).
TITAN_COMPILED_LOSS: Month = (2025, 1)
TITAN_FUSED_ADAMW: Month = (2025, 3)
TITAN_CUDNN_BLACKWELL: Month = (2025, 6)
TITAN_CUDNN: Month = (2025, 10)
TITAN_GROUPED: Month = (2026, 2)
# From July 2025 on PyTorch's nightly builds have nn.RMSNorm as one kernel.
FUSED_RMS_NORM: Month = (2025, 8)
# transformers 5 is the first version whose activation checkpointing is not reentrant by default. It computes experts by
# grouped matmuls; they were modules. From 5.5 on, and more from 5.17 on, until 5.18 it filled with zeros what it
# computes for experts that other ranks have (transformers/integrations/moe.py).
NOT_REENTRANT: Month = (2026, 2)
GROUPED_EXPERTS = NOT_REENTRANT
MASKED_EXPERTS: tuple[tuple[Month, int], ...] = (((2026, 10), 0), ((2026, 9), 3), ((2026, 4), 2))
# transformers 4.46: until then a model replaced its logits by an fp32 copy, and copied that without the last token;
# from then on until version 5 it held the 16-bit ones beside it.
HELD_LOGITS: Month = (2024, 11)
# transformers' own models had causal masks of all positions in their blocks (GPT-NeoX's until 4.50, GPT-2's until 5),
# and GPT-NeoX rotated in fp32 until 4.45.
MASK_BUFFERS: dict[str, Month] = {"gpt_neox": (2025, 3), "gpt2": NOT_REENTRANT}
WIDE_ROTARY: Month = (2024, 9)
# The first versions of transformers whose models of a type have SDPA (`_supports_sdpa` in its modeling files): 4.36,
# 4.37, 4.39, 4.41, 4.42, 4.45, 4.46 and 4.56.
SDPA: dict[str, Month] = {
    **dict.fromkeys(("llama", "falcon", "gpt_bigcode"), (2023, 12)),
    **dict.fromkeys(("mistral", "mixtral"), (2024, 1)),
    **dict.fromkeys(("phi", "stablelm"), (2024, 3)),
    "bert": (2024, 5),
    **dict.fromkeys(("gpt2", "gpt_neox"), (2024, 6)),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), (2024, 9)),
    **dict.fromkeys(("distilbert", "opt"), (2024, 10)),
    "esm": (2025, 8),
}
# transformers 4.48: attention may be given fewer heads of keys than of queries.
GROUPED_ATTENTION: Month = (2025, 1)
# From PEFT 0.12 on, adapters of 16-bit layers are in fp32 (autocast_adapter_dtype); before, in the layer's dtype.
FP32_ADAPTERS: Month = (2024, 8)
# Accelerate 0.28: trained 16-bit weights become fp32 shards.
FP32_SHARDS: Month = (2024, 3)
# bitsandbytes 0.43.2 no longer saves the input of a 4-bit matmul, and 0.43 dequantizes to bf16 at once.
FREED_INPUTS: Month = (2024, 7)
BF16_DEQUANTIZED: Month = (2024, 3)
# bitsandbytes 0.45: rows and columns of 8-bit matrices as they are.
INT8_IN_ROWS: Month = (2024, 12)
# From DeepSpeed 0.12.4 on, ZeRO-1 and 2 all-reduce gradients; before, each went to the rank that updates it.
BUCKET_ALL_REDUCE: Month = (2023, 12)
# DeepSpeed 0.17.2, 0.18.6 and 0.19.4. (In 0.18.6 each hook also counts all parameters, which is not modelled.)
LATE_BUCKET: Month = (2025, 7)
TRACKED_HOOKS: Month = (2026, 2)
CHECKED_GRADIENTS: Month = (2026, 8)
# axolotl's kernels for adapters, and with dropout (its pull requests 3528 and 3806), and its setting of the allocator
# (pull request 1755); the entropy that TRL logs, and its
# loss in parts; Unsloth's fused loss, and the larger parts of it, with which inputs of blocks come back from the host
# while other blocks are computed; and kernels of its own for it, whose parts are small (2026.10.6).
ADAPTER_KERNELS: Month = (2025, 4)
AXOLOTL_SEGMENTS: Month = (2024, 7)
DROPPED_INPUTS: Month = (2026, 8)
LOGGED_ENTROPY: Month = (2025, 8)
CHUNKED_LOSS: Month = (2026, 6)
FUSED_LOSS: Month = (2025, 8)
LARGE_PARTS: Month = (2026, 7)
FEW_ROWS: Month = (2026, 11)
# torchtune 0.7: LinearCrossEntropyLoss in place of CEWithChunkedOutputLoss.
PROJECTED_LOSS: Month = (2025, 5)
# LitGPT 0.4.6 scales norms in fp32; 0.5.1 has bitsandbytes' embedding, and 0.5.4 its version 0.44 in place of 0.42;
# bitsandbytes 0.50 dequantizes within the matmuls of forward passes.
LITGPT_WIDE_NORMS: Month = (2024, 8)
LITGPT_EMBEDDING: Month = (2024, 10)
LITGPT_FREED_INPUTS: Month = (2025, 1)
DEQUANTIZED_IN_MATMULS: Month = (2026, 9)
# nanotron's `tp_recompute_allgather`.
NANOTRON_GATHERS: Month = (2024, 8)
OTHER_STREAM: Month = (2025, 1)
# Megatron Core 0.14, with Transformer Engine 2.3.
DUMMY_GRADIENTS: Month = (2025, 10)

# Around Hugging Face's Trainer.
TRAINERS = {"huggingface", "trl", "axolotl", "llama-factory", "unsloth"}


def read_name(given: str) -> tuple[str, Month | None]:
    """`huggingface@2023-09`: the system, and the month of its libraries; None: today's."""
    name, at, date = given.partition("@")
    if not at:
        return name, None
    if not name:
        raise UserMistake(f"--like {given} names no system before its month, as in huggingface@{date or '2023-09'}.")
    if re.fullmatch(r"20[0-9]{2}(-(0[1-9]|1[0-2]))?", date) is None:
        raise UserMistake(
            f"--like {given}: {date or 'nothing'} is no month. Write the year and the month of its libraries, as in "
            f"{name}@2023-09."
        )
    year, _, month = date.partition("-")
    return name, (int(year), int(month or 7))


def as_of(system: str, traits: SystemTraits, date: Month, *, gpu: Gpu, model_type: str) -> SystemTraits:
    """The traits of a system with the libraries of a month."""
    changes: dict[str, Any] = {"software": libraries(date, gpu, current=system in CURRENT_LIBRARIES)}
    if system in TRAINERS:
        changes |= {"foreach_step": date < FUSED_ADAMW, "upcasts_shards": date >= FP32_SHARDS}
    if system in TRAINERS or system == "transformers":
        changes |= _with_transformers(traits, date)
    if system in TRAINERS or system in ("transformers", "deepspeed"):
        changes |= models_of(model_type, date)
        if traits.eager_attention == "never":  # the flash-attn package, or kernels of its own
            del changes["eager_attention"]
    if system in TRAINERS or system in ("transformers", "litgpt", "kempnerforge"):
        changes["flash2"] = traits.flash2 or date < CUDNN_ATTENTION
    changes["dummy_gradients"] = traits.dummy_gradients and date >= DUMMY_GRADIENTS
    changes |= _own(system, traits, date, gpu)
    return replace(traits, **changes)


def libraries(date: Month, gpu: Gpu, *, current: bool = False) -> int:
    """The year of the CUDA libraries that a PyTorch of this month comes with, as `SystemTraits.software` has it."""
    if current:
        return date[0]
    if date < NEW_WHEELS:
        return 2023 if date[0] == 2024 else date[0]
    return 2024 if gpu.compute_capability == HOPPER and date < HOPPER_WHEELS else date[0]


def models_of(model_type: str, date: Month) -> dict[str, Any]:
    """What transformers' models did at a date."""
    return {
        "mask_buffers": date < MASK_BUFFERS.get(model_type, (0, 0)),
        "wide_rotary": date < WIDE_ROTARY,
        "eager_attention": "always" if date < SDPA.get(model_type, (0, 0)) else "types",
        "experts": "grouped" if date >= GROUPED_EXPERTS else "modules",
        "masked_experts": next((fills for since, fills in MASKED_EXPERTS if date >= since), 0),
    }


def _with_transformers(traits: SystemTraits, date: Month) -> dict[str, Any]:
    """transformers itself, with PEFT and bitsandbytes."""
    changes: dict[str, Any] = {
        "reentrant": traits.reentrant or date < NOT_REENTRANT,
        "grouped_attention": traits.grouped_attention and date >= GROUPED_ATTENTION,
        "quantized_keep_inputs": date < FREED_INPUTS,
        "dequantizes_in_half": date < BF16_DEQUANTIZED,
        "int8_layouts": date < INT8_IN_ROWS,
    }
    if date < HELD_LOGITS:
        changes["shifts_logits"] = True
    elif date < NOT_REENTRANT:
        changes["logit_bytes"] = 14.0
    if date < FP32_ADAPTERS and not traits.narrow_adapters:
        changes["narrow_adapters"] = "unquantized"
    return changes


def _own(system: str, traits: SystemTraits, date: Month, gpu: Gpu) -> dict[str, Any]:
    """What a system itself has changed."""
    if system == "deepspeed":
        changes: dict[str, Any] = {"all_reduces": date >= BUCKET_ALL_REDUCE, "reentrant": date < NOT_REENTRANT}
        changes |= {"late_bucket": date >= LATE_BUCKET, "tracks_hooks": date >= TRACKED_HOOKS}
        changes["checks_gradients"] = date >= CHECKED_GRADIENTS
        if date < NOT_REENTRANT:
            changes["logit_bytes"] = 16.0 if date < HELD_LOGITS else 14.0
        return changes
    if system == "axolotl":
        with_dropout: Any = "dropout" if date >= DROPPED_INPUTS else True
        fused = date >= ADAPTER_KERNELS and with_dropout
        return {"fused_adapters": fused, "expandable_segments": date >= AXOLOTL_SEGMENTS}
    if system == "trl":
        return {"logs_entropy": date >= LOGGED_ENTROPY}
    if system == "unsloth":
        before = date < OTHER_STREAM
        exposes = "both" if before else "back" if date < LARGE_PARTS else ""
        rows: Any = 512 if date < LARGE_PARTS else "4 GiB" if date < FEW_ROWS else traits.fused_rows
        return {"exposes_offload": exposes, "fused_rows": rows, "expandable_segments": not before}
    if system == "torchtitan":
        return _torchtitan(date, blackwell=(gpu.compute_capability or HOPPER) > HOPPER)
    if system == "nemo":
        since = date >= NEMO_OVERLAPS
        attention = NEMO_ATTENTION[0] <= date < NEMO_ATTENTION[1]
        return {"overlaps_tensor": since, "overlaps_weight_gather": since, "flash2": attention}
    if system == "litgpt":
        return litgpt_of(date)
    if system == "torchtune":
        return {"chunks": "projected" if date >= PROJECTED_LOSS else "upcast"}
    if system == "nanotron":
        return {"gathers_inputs_again": date >= NANOTRON_GATHERS}
    if system == "megatron":
        return {"flash2": date < ENGINE_ATTENTION}
    return {}


def litgpt_of(date: Month) -> dict[str, Any]:
    return {
        "wide_norms": date >= LITGPT_WIDE_NORMS,
        "replaces_embedding": date >= LITGPT_EMBEDDING,
        "quantized_keep_inputs": date < LITGPT_FREED_INPUTS,
        "dequantizes_in_half": "backward" if date >= DEQUANTIZED_IN_MATMULS else True,
    }


def _torchtitan(date: Month, *, blackwell: bool) -> dict[str, Any]:
    return {
        "loss_kernel": "compiled" if date >= TITAN_COMPILED_LOSS else "never",
        "unfused_norms": date < FUSED_RMS_NORM,
        "foreach_step": date < TITAN_FUSED_ADAMW,
        "flash2": date < (TITAN_CUDNN_BLACKWELL if blackwell else TITAN_CUDNN),
        "repeats_keys": date < TITAN_GROUPED,
    }


def defaults_of(system: str, defaults: dict[str, Any], date: Month | None) -> dict[str, Any]:
    """The defaults of a system (`modelled.DEFAULTS`) at a date."""
    if date is None:
        return defaults
    if (system == "trl" and date < CHUNKED_LOSS) or (system == "unsloth" and date < FUSED_LOSS):
        return {**defaults, "train.loss_impl": "plain"}
    return defaults

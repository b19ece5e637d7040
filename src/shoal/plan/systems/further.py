"""Further systems that `--like` knows: loops by hand, and frameworks beside those of `modelled.py`."""

from dataclasses import replace
from typing import Any

from shoal.config.schema_train import RecomputeConfig
from shoal.plan.systems.modelled import COMPILED_LOSS, DEEPSPEED, FUSED_KERNELS, HUGGING_FACE, MEGATRON, TORCHTITAN_2024
from shoal.plan.systems.traits import SystemTraits

# A loop of one's own around transformers' models: the loss of their outputs, which it holds until the next ones,
# torch.optim.AdamW as it is, autocast only around fp32 weights, and neither `no_sync` nor Accelerate.
TRANSFORMERS = replace(
    HUGGING_FACE,
    autocasts="mixed",
    logit_bytes=14.0,
    holds_outputs="next",
    foreach_step=True,
    unsharded_accumulation=False,
    upcasts_shards=False,
    wide_embedding_state=False,
    widens_outputs=False,
    waits_for_loss=False,
)
# transformers' models with bf16 weights under FSDP2, tensor parallelism by DTensor, and adapters of its own in the
# dtype of the layer (nemo_automodel/components/_peft/lora.py).
NEMO_AUTOMODEL = replace(
    TRANSFORMERS,
    autocasts=False,
    casts_per_use=False,
    wide_residual_stream=False,
    narrow_adapters=True,
    logit_bytes=12.0,
    holds_outputs="",
    flat_parameters=False,
    dtensors=True,
)
# A loop around a model of its own in plain PyTorch, uncompiled: an activation function of torch.nn, F.cross_entropy of
# logits in 16 bits, which the loop holds until the next ones, torch.optim.AdamW and DDP as they are.
PYTORCH = SystemTraits(
    wide_residual_stream=True,
    casts_per_use=True,
    fused_activation=True,
    narrow_loss=True,
    foreach_step=True,
    copies_to_buckets=True,
    holds_outputs="next",
)
# nanoGPT: the model is compiled with its loss, and returns the logits too; a fused AdamW, DDP with PyTorch's defaults.
NANOGPT = SystemTraits(
    wide_residual_stream=True,
    casts_per_use=True,
    fused_activation=True,
    loss_kernel="compiled",
    compiles_loss=True,
    returns_logits=True,
    pads_vocabulary=True,
    copies_to_buckets=True,
)
# NVIDIA's BERT in DeepLearningExamples: Apex's norms and optimizer, PyTorch's DDP, scores with PyTorch's softmax, and a
# head that reads the masked positions, as TensorFlow's (gather_indexes in its run_pretraining.py).
NVIDIA_BERT = replace(
    FUSED_KERNELS,
    fused_softmax="compiled",
    accumulates_in_matmuls=False,
    overlaps_gradients=True,
    wide_gradients=False,
    gathers_masked=True,
    eager_attention="always",
)
# XLA lays memory out before the first step; norms, and the sums that they read, are in fp32: call in
# TensorFlow2/LanguageModeling/BERT/official/nlp/modeling/layers/transformer.py of NVIDIA/DeepLearningExamples.
TENSORFLOW = replace(
    FUSED_KERNELS,
    fused_softmax="never",
    planned_memory=True,
    wide_residual_stream=True,
    gathers_masked=True,
    eager_attention="always",
)
MAXTEXT = replace(FUSED_KERNELS, fused_softmax="never", planned_memory=True)
# Recipes of Megatron-Bridge 0.1.0rc4 as they are: both overlaps and fp32 gradients (recipes/qwen), no
# comm_overlap_config, and `bias_activation_fusion` false (models/gpt_provider.py).
MEGATRON_BRIDGE = replace(
    MEGATRON,
    fused_activation=False,
    kernel_logit_bytes=COMPILED_LOSS,
    overlaps_gradients=True,
    overlaps_weight_gather=True,
)
# flash-attn's norms and attention, an eager activation and loss (cast_to_fp32 in nanotron/models/llama.py), fp32
# gradients that FP32GradientAccumulator adds up, and stages that are balanced by get_block_compute_costs.
NANOTRON = replace(
    FUSED_KERNELS,
    fused_activation=False,
    loss_kernel="never",
    accumulates_in_matmuls=False,
    overlaps_gradients=True,
    even_stages=False,
    flash2=True,
)
# configs/20B.yml: its fused softmax and activation; ZeRO-1 with overlap_comm, and PyTorch's loss.
GPT_NEOX = replace(
    FUSED_KERNELS,
    loss_kernel="never",
    wide_gradients=False,
    accumulates_in_matmuls=False,
    overlaps_gradients=True,
    even_stages=False,
)
# `overlap_sync_grad` in its configs/7B_sft.py; gradients are reduced in the dtype of the weights, flattened and cast,
# and updated weights sent after the step, rank by rank (internlm/solver/optimizer; `overlap_sync_param` is off).
INTERNEVO = replace(
    FUSED_KERNELS,
    overlaps_gradients=True,
    wide_gradients=False,
    accumulates_in_matmuls=False,
    flattens_gradients=True,
    step_copies=2,
    broadcasts_weights=True,
    all_reduces=True,  # reduce_rank is None in _attach_reduction_hook of hybrid_zero_optim.py
)
# LowLevelZero: gradients stay on the device, are cast one by one, and reduced in buckets of 12 Mi elements during the
# backward pass (zero/low_level/low_level_optim.py).
COLOSSALAI = replace(
    DEEPSPEED,
    logit_bytes=14.0,
    hooks_gradients=False,
    tracks_hooks=False,
    late_bucket=False,
    checks_gradients=False,
    offloads_gradients=False,
    overlaps_gradients=True,
    bucket_elements=12 * 2**20,
    all_reduces=False,
)
# C and CUDA: bf16 weights and gradients, fp32 master weights with the optimizer, kernels fused by hand, gradients
# reduced block by block in the backward pass (multi_gpu_async_reduce_gradient), memory allocated once; sums of the
# residual stream are fused with norms (fused_residual_forward5), and cuDNN reads queries as a matmul wrote them.
# fused_classifier writes the gradient over the logits.
LLM_C = replace(
    FUSED_KERNELS,
    fused_by_hand=False,
    loss_in_place=True,
    wide_gradients=False,
    overlaps_gradients=True,
    planned_memory=True,
)
# FSDP2 with embedding and head in one unit (apply_fsdp in olmo_core/nn/transformer/model.py), and a compiled loss.
OLMO_CORE = replace(TORCHTITAN_2024, loss_kernel="compiled", flash2=False, separate_head_unit=False)

FURTHER: dict[str, SystemTraits] = {
    "transformers": TRANSFORMERS,
    "nemo-automodel": NEMO_AUTOMODEL,
    "pytorch": PYTORCH,
    "nanogpt": NANOGPT,
    "nvidia-bert": NVIDIA_BERT,
    "tensorflow": TENSORFLOW,
    "maxtext": MAXTEXT,
    "megatron-bridge": MEGATRON_BRIDGE,
    "nanotron": NANOTRON,
    "gpt-neox": GPT_NEOX,
    "internevo": INTERNEVO,
    "colossalai": COLOSSALAI,
    "llm.c": LLM_C,
    "olmo-core": OLMO_CORE,
}

_MEGATRON = {"parallel.strategy": "zero1", "train.recompute": "none", "train.loss_impl": "plain"}
_EAGER = {"train.compile": False, "train.loss_impl": "plain"}
FURTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "transformers": _EAGER,
    "nemo-automodel": {"train.precision": "bf16-true", **_EAGER},
    "pytorch": _EAGER,
    "nanogpt": {"train.loss_impl": "plain"},
    "nvidia-bert": {"parallel.strategy": "ddp", **_EAGER},
    "tensorflow": {"parallel.strategy": "ddp", "train.loss_impl": "plain"},
    "maxtext": {"parallel.strategy": "fsdp", "train.loss_impl": "plain"},
    "megatron-bridge": _MEGATRON,
    "nanotron": {**_MEGATRON, "train.compile": False},
    "gpt-neox": _MEGATRON,
    "internevo": {**_MEGATRON, "train.compile": False},
    "colossalai": {"parallel.strategy": "zero2", **_EAGER},
    # -r 1 in train_gpt2.cu: GELU is computed again.
    "llm.c": {**_MEGATRON, "train.recompute": RecomputeConfig(parts=("activation",))},
    "olmo-core": {"train.loss_impl": "plain"},
}

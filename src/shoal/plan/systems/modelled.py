"""Differences between training systems that show in memory or time: facts about their code, never fitted to a result.

`OURS` is this repository; the others are for comparing the forecast with published results.
"""

from dataclasses import replace
from typing import Any

from shoal.plan.systems.traits import SystemTraits

OURS = SystemTraits(
    wide_residual_stream=True,
    fused_step=True,
    recomputes_cheap=True,
    cuda_graphs=True,
    keeps="all but widening",
    saves_fp8_inputs=True,
    casts_once=True,
    expandable_segments=True,
    separate_head_unit=True,
    pads_vocabulary=True,
    packs_projections=True,
    copies_sequences="batched",  # parallel/collectives.py
    gathers_keys=True,  # models/attention_kernels.py
    gathers_masked=True,  # models/cross_entropy.py, as the next
    sharded_logit_bytes=10.0,  # the gradient of the logits, a copy in fp32, and that times the incoming one
)
TORCHTITAN_2024 = SystemTraits(
    repeats_keys=True,
    rotary="complex",
    flash2=True,
    ring_attention=True,
    copies_sequences="always",  # torchtitan's pull request 437
    dtensors=True,  # apply_tp in torchtitan/models/llama3/parallelize.py
    sharded_logit_bytes=18.0,
    gathers_in_fp8=True,
    separate_head_unit=True,
)
# From 2025 on its loss is compiled with its blocks, and from PyTorch 2.9 on nn.RMSNorm is one kernel, also of DTensors
# (pytorch's pull requests 153666 and 158716).
TORCHTITAN_2025 = replace(TORCHTITAN_2024, loss_kernel="compiled", unfused_norms=False)
# Since October 2025 its attention is cuDNN's where there is one, and since February 2026 keys are not repeated
# (torchtitan's pull requests 1776 and 2259).
TORCHTITAN = replace(TORCHTITAN_2025, flash2=False, repeats_keys=False)
# LinearCrossEntropyLoss in torchtune/modules/loss/cross_entropy_loss.py, of which apply_compile_strategy compiles a
# chunk; custom_sharded_layers in recipes/configs/llama3_1/*_full.yaml.
TORCHTUNE = SystemTraits(
    repeats_keys=True,
    rotary="pairs",
    chunks="projected",
    flash2=True,
    separate_head_unit="trained",
    dtensors=True,  # base_llama_tp_plan in torchtune/models/llama3/_parallelism.py
)
KEMPNERFORGE = SystemTraits(repeats_keys=True, logit_bytes=18.0)
# Lightning's plugin quantizes every linear layer, from fp16 (fabric/plugins/precision/bitsandbytes.py).
LITGPT = SystemTraits(
    fused_qkv=True,
    repeats_keys=True,  # CausalSelfAttention in litgpt/model.py
    rotary="fp32 halves",  # apply_rope in litgpt/model.py, with the cache that fine-tuning makes for its length
    wide_norms=True,  # RMSNorm in litgpt/model.py
    holds_last_logits=True,  # fit in litgpt/finetune/lora.py
    splits_logits=True,  # chunked_cross_entropy in litgpt/utils.py
    adapted_head_tokens=128,  # lm_head_chunk_size in litgpt/finetune/lora.py
    joined_adapters=True,  # LoRAQKVLinear in litgpt/lora.py
    replaces_embedding=True,  # main in litgpt/finetune/lora.py
    waits_for_loss=True,  # running_loss and token_counts of every micro-batch in litgpt/finetune/lora.py
    foreach_step="eager",  # only litgpt/pretrain.py asks for a fused one
    quantizes_head=True,
    unties_head=True,  # GPT.__init__ in litgpt/model.py
    experts="modules",  # LLaMAMoE in litgpt/model.py
    dequantizes_in_half="backward",
    pads_vocabulary=True,
    unsharded_accumulation=True,
    flat_parameters=True,  # FSDPStrategy in lightning/fabric/strategies/fsdp.py
    copies_to_buckets=True,  # DDPStrategy in lightning/fabric/strategies/ddp.py leaves PyTorch's default
)
# TrainingArguments.optim is adamw_torch_fused from PyTorch 2.8 on; before, it was a foreach AdamW.
HUGGING_FACE = SystemTraits(
    wide_residual_stream=True,
    liger_kernels=True,
    casts_per_use=True,
    fused_rows="liger",  # fused_linear_cross_entropy_forward in liger_kernel/ops
    peft=True,
    unsharded_accumulation=True,
    flat_parameters=True,  # fsdp_version is 1 in accelerate/utils/dataclasses.py
    wide_embedding_state=True,  # register_module_override in transformers/trainer.py
    replicates_scales=True,  # Params4bit.quant_state in bitsandbytes/nn/modules.py
    wide_experts=True,  # grouped_mm_experts_forward in transformers/integrations/moe.py
    checkpoints_units=True,  # gradient_checkpointing_enable in transformers/modeling_utils.py; its issue 30404
    upcasts_shards=True,  # where the model is in 16 bits, as from_pretrained loads it since transformers 5
    copies_to_buckets=True,  # DistributedDataParallelKwargs in accelerate/utils/dataclasses.py
    narrow_reduction=True,  # set_mixed_precision in accelerate/utils/dataclasses.py
    widens_outputs=True,  # prepare_model in accelerate/accelerator.py
    waits_for_loss=True,  # logging_nan_inf_filter in transformers/trainer.py
    upcasts_base=True,  # prepare_model_for_kbit_training in peft/utils/other.py
    eager_attention="types",
)
# The hand-written loop of benchmarks/gpu: PyTorch, compiled blocks and Liger's loss.
BY_HAND = SystemTraits(fused_rows="liger")
BY_HAND_AUTOCAST = replace(BY_HAND, wide_residual_stream=True, casts_per_use=True)
DEEPSPEED = SystemTraits(
    masters_with_optimizer=True,
    flattens_gradients=True,
    # deepspeed/runtime/zero/config.py: overlap_comm is false in stages 1 and 2 unless it is set, reduce_bucket_size is
    # 5e8, and use_multi_rank_bucket_allreduce true (from version 0.12.4 on).
    overlaps_gradients=False,
    bucket_elements=5e8,
    all_reduces=True,
    offloads_gradients=True,
    flash2=True,
    peft=True,
    autocasts=False,  # _prepare_deepspeed in accelerate/accelerator.py
    narrow_adapters=True,  # _configure_distributed_model in deepspeed/runtime/engine.py casts all parameters
    torch_pipeline=False,
    replicates_scales=True,
    even_stages=True,
    eager_attention="types",
    hooks_modules=True,  # _register_deepspeed_module in deepspeed/runtime/zero/parameter_offload.py
    hooks_gradients=True,  # create_gradient_handling_hooks in deepspeed/runtime/zero/stage_1_and_2.py
    tracks_hooks=True,  # update_hook_state_and_maybe_run_epilogue in deepspeed/runtime/base_optimizer.py
    late_bucket=True,  # setup_buckets, called by process_gradients in deepspeed/runtime/zero/stage_1_and_2.py
    checks_gradients=True,  # check_grad_overflow in deepspeed/runtime/precision_config.py
)
# Megatron. Files are in NVIDIA/Megatron-LM.
MEGATRON = SystemTraits(
    unfused_norms=False,  # megatron/core/fusions/fused_layer_norm.py, or Transformer Engine's
    fused_qkv=True,  # linear_qkv in megatron/core/transformer/attention.py
    fused_activation=True,  # megatron/core/fusions/fused_bias_swiglu.py
    loss_kernel="always",  # megatron/core/fusions/fused_cross_entropy.py; logits stay in the compute dtype
    fused_softmax="always",  # megatron/core/fusions/fused_softmax.py
    masters_with_optimizer=True,  # Float16OptimizerWithFloat16Params in megatron/core/optimizer/optimizer.py
    wide_gradients=True,  # --bf16 sets accumulate_allreduce_grads_in_fp32 in megatron/training/arguments.py
    accumulates_in_matmuls=True,  # gradient_accumulation_fusion in megatron/core/model_parallel_config.py
    dummy_gradients=True,  # megatron/core/tensor_parallel/layers.py, Transformer Engine's linear layers
    gathers_inputs_again=True,  # megatron/core/tensor_parallel/layers.py, Transformer Engine's linear layers
    saves_fp8_inputs=True,  # Transformer Engine's linear layers
    casts_once=True,  # the same: both layouts by one kernel
    keeps_fp8_weights=True,  # the same: is_first_microbatch in megatron/core/extensions/transformer_engine.py
    fused_by_hand=True,  # megatron/core/fusions; Transformer Engine's layers
    transformer_engine=True,  # --transformer-impl in megatron/training/arguments.py
    # --overlap-grad-reduce and --overlap-param-gather are off unless they are given: megatron/training/arguments.py.
    overlaps_gradients=False,
    even_stages=True,  # get_num_layers_to_build in megatron/core/transformer/transformer_block.py
    overlaps_context=True,  # AttnFuncWithCPAndKVP2P in Transformer Engine
    overlaps_pipeline=True,  # overlap_p2p_comm in megatron/training/arguments.py, on with virtual stages
    torch_pipeline=False,  # megatron/core/pipeline_parallel/schedules.py deallocates stage outputs
    variable_lengths=True,  # PackedSeqParams: Transformer Engine's thd layout
    reentrant=True,  # CheckpointFunction in megatron/core/tensor_parallel/random.py
)
# Others with fused kernels, bf16 weights and fp32 master weights as Megatron's, but not Transformer Engine.
FUSED_KERNELS = replace(MEGATRON, transformer_engine=False, dummy_gradients=False)
# Its own scripts: without --cross-entropy-loss-fusion, logits are copied to fp32, over which softmax and gradient are
# written (megatron/core/tensor_parallel/cross_entropy.py).
MEGATRON_LM = replace(MEGATRON, kernel_logit_bytes=6.0)
# With it (`native`), the backward pass has fp32 copies of softmax and gradient beside the gradient in 16 bits: what
# torch.compile makes of calculate_gradients in megatron/core/fusions/fused_cross_entropy.py.
COMPILED_LOSS = 10.0
# Its recipes, also as Megatron Bridge: bf16_mixed() with grad_reduce_in_fp32=False, tp_comm_overlap, and both overlaps
# of data parallelism.
NEMO = replace(
    MEGATRON,
    kernel_logit_bytes=COMPILED_LOSS,
    wide_gradients=False,
    overlaps_tensor=True,
    overlaps_gradients=True,
    overlaps_weight_gather=True,
)
# Megatron-DeepSpeed: Megatron's model with DeepSpeed's ZeRO-1, which flattens fp16 gradients in its step; bf16 ones are
# added up in fp32 by its BF16_Optimizer.
MEGATRON_DEEPSPEED = replace(
    FUSED_KERNELS,
    accumulates_in_matmuls=False,
    flattens_gradients=True,
    keeps_added_gradients=True,
    gathers_inputs_again=False,  # its layers are of Megatron-LM before
)
# The Hugging Face Trainer with TRL's defaults: an fp32 model under autocast (create_model_from_path in
# trl/trainer/utils.py), packing by position ids, a loss in parts whose logits are computed again in the backward pass
# (the default since June 2026; in version 1.15 tiles of 4,096 tokens and 32,768 columns, trl/kernels,
# which are counted as parts of 256 tokens, as before), and 16-bit
# adapters of quantized layers (trl/trainer/sft_trainer.py).
TRL = replace(
    HUGGING_FACE,
    variable_lengths=True,
    wide_base=True,
    chunks="recomputed",
    narrow_adapters="quantized",
    logs_entropy=True,
    upcasts_base=False,  # but with fp32 weights, which `wide_base` says
)
# The Trainer with a model in bf16 (torch_dtype in axolotl/utils/config), which leaves autocast nothing to cast, the
# flash-attn package (`flash_attention: true` in its examples), multipack by cumulative lengths, and kernels for
# adapters (check_auto_enable_lora_kernels in axolotl/utils/schemas/config.py, since April 2025). Checkpoints are
# reentrant (normalize_config in axolotl/utils/config), and segments expand (axolotl/utils/__init__.py).
AXOLOTL = replace(
    TRL,
    eager_attention="never",
    wide_residual_stream=False,
    casts_per_use=False,
    flash2=True,
    wide_base=False,
    chunks="chunked",
    narrow_adapters=False,
    fused_adapters="dropout",
    logs_entropy=False,
    reentrant=True,
    expandable_segments=True,
)
# The Trainer with a model in bf16, whose trained weights are cast to fp32 (_setup_full_tuning and _setup_lora_tuning in
# its model/adapter.py) unless `pure_bf16` is given, PyTorch's attention (`flash_attn: auto`) and reentrant checkpoints
# (`use_reentrant_gc: true`).
LLAMA_FACTORY = replace(
    AXOLOTL,
    eager_attention="types",
    wide_residual_stream=True,
    casts_per_use=True,
    flash2=False,
    variable_lengths=False,
    expandable_segments=False,
    fused_adapters=False,
)
# Kernels of its own (unsloth/kernels): RMSNorm, rotary embeddings, SwiGLU; a cross-entropy that overwrites the logits
# with their gradient, or, since August 2025, that holds those of a part (get_chunk_size in
# unsloth_zoo/fused_losses/cross_entropy_loss.py; 4 GiB from July 2026 on, and from November 2026 on those of 512 tokens
# or more, fused_linear_rows in fused_linear.py); adapters in fp32 (prepare_model_for_training) whose backward pass
# recomputes the MLP's product (fast_lora.py); and checkpoints that are like the reentrant ones
# (UnslothCheckpointFunction in unsloth_zoo/gradient_checkpointing.py).
UNSLOTH = replace(
    AXOLOTL,
    unfused_norms=False,
    loss_kernel="always",
    # convert_outputs_to_fp32 around the model's forward in accelerate/accelerator.py: an fp32 copy beside the logits
    kernel_logit_bytes=6.0,
    fused_rows="256 MiB",
    fused_activation="adapted",  # apply_lora_mlp_swiglu in unsloth/kernels/fast_lora.py
    reentrant=True,
    # xFormers' kernel where the flash-attn package has none: unsloth/utils/attention_dispatch.py
    grouped_attention=False,
    fused_adapters=True,
    expandable_segments=True,  # PYTORCH_CUDA_ALLOC_CONF in unsloth_zoo/__init__.py
)
# Its published results are of 2023.
COMPOSER = SystemTraits(
    unfused_norms=False,
    loss_kernel="always",
    unpads=True,  # flash_attn_fn in llmfoundry/models/layers/attention.py
    flat_parameters=True,  # prepare_fsdp_module in composer/trainer/dist_strategy.py
    narrow_reduction=True,  # --fsdp_config_mixed_precision PURE in scripts/train/benchmarking/submit_benchmarks.py
    software=2023,
)

ENGINES = {"native": "shoal", "deepspeed": "deepspeed"}  # the system that a value of `parallel.engine` runs on

SYSTEMS: dict[str, SystemTraits] = {
    "shoal": OURS,
    "torchtitan": TORCHTITAN,
    "torchtune": TORCHTUNE,
    "kempnerforge": KEMPNERFORGE,
    "litgpt": LITGPT,
    "huggingface": HUGGING_FACE,
    "by-hand": BY_HAND,
    "autocast": BY_HAND_AUTOCAST,
    "composer": COMPOSER,
    "deepspeed": DEEPSPEED,
    "megatron": MEGATRON_LM,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "nemo": NEMO,
    "unsloth": UNSLOTH,
    "trl": TRL,
    "axolotl": AXOLOTL,
    "llama-factory": LLAMA_FACTORY,
}

# What else these systems do unless they are told otherwise: values of our keys, for those that the config does not set.
# `train.compile` stands for kernels that are fused in another way (see `liger_kernels`).
DEFAULTS: dict[str, dict[str, Any]] = {
    # TrainingArguments: torch_compile=False and use_liger_kernel=False; the model computes its loss over all logits.
    "huggingface": {"train.compile": False, "train.loss_impl": "plain"},
    # Models are usually Hugging Face's, as they are.
    "deepspeed": {"train.compile": False, "train.loss_impl": "plain"},
    # --use-distributed-optimizer as in its examples; no --recompute-granularity; one kernel over all logits.
    "megatron": {"parallel.strategy": "zero1", "train.recompute": "none", "train.loss_impl": "plain"},
    "megatron-deepspeed": {"parallel.strategy": "zero1", "train.recompute": "none", "train.loss_impl": "plain"},
    "nemo": {"parallel.strategy": "zero1", "train.recompute": "none", "train.loss_impl": "plain"},
    # get_peft_model's use_gradient_checkpointing="unsloth" offloads the inputs of blocks to host memory; its notebooks
    # have optim="adamw_8bit"; weights are in bf16.
    "unsloth": {
        "parallel.strategy": "ddp",
        "train.precision": "bf16-true",
        "train.recompute": "offload",
        "train.optimizer.name": "adamw8bit",
        "train.loss_impl": "fused",  # UNSLOTH_RETURN_LOGITS=0 in unsloth/models/llama.py
    },
    # trl/trainer/sft_config.py: gradient_checkpointing=True, bf16=True, loss_type chunked_nll (version 1; nll before),
    # packing=False, and TrainingArguments' use_liger_kernel=False.
    "trl": {
        "parallel.strategy": "ddp",
        "train.precision": "bf16-mixed",
        "train.recompute": "full",
        "train.loss_impl": "chunked",
        "train.compile": False,
        "data.pack": False,
    },
    # Its examples: gradient_checkpointing: true, bf16: auto, sample_packing: true; without the plugins for Liger's
    # kernels and cut cross-entropy.
    "axolotl": {
        "parallel.strategy": "ddp",
        "train.precision": "bf16-true",
        "train.recompute": "full",
        "train.loss_impl": "plain",
        "train.compile": False,
        "data.pack": True,
    },
    # disable_gradient_checkpointing: false in its hparams/model_args.py, packing only in pretraining, bf16: true in its
    # examples, with which trained weights are in fp32.
    "llama-factory": {
        "parallel.strategy": "ddp",
        "train.precision": "bf16-mixed",
        "train.recompute": "full",
        "train.loss_impl": "plain",
        "train.compile": False,
        "data.pack": False,
    },
    # Of litgpt/finetune; litgpt/pretrain.py compiles the model.
    "litgpt": {"train.compile": False, "train.loss_impl": "plain", "data.pack": False},
    # recipes/configs: dtype bf16, compile False, packed False, enable_activation_checkpointing True but in *_lora.yaml.
    "torchtune": {
        "train.precision": "bf16-true",
        "train.recompute": "full",
        "train.compile": False,
        "data.pack": False,
    },
}

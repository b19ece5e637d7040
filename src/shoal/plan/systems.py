"""Differences between training systems that show in memory or time: facts about their code, never fitted to a result.

`OURS` is this repository; the others are for comparing the forecast with published results.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class SystemTraits:
    """Implementation traits of a training system that memory or time depend on."""

    # Eager RMSNorm saves an fp32 copy of its input; a fused kernel or a compiled block does not.
    unfused_norms: bool = True
    # The residual stream has the dtype of the master weights, as under autocast; else the compute dtype.
    wide_residual_stream: bool = False
    # `compiled` means Liger's kernels, each of which saves its own input and output.
    liger_kernels: bool = False
    # `compiled` means kernels that are fused by hand, as Transformer Engine's: residual adds are kernels of their own,
    # and queries are copied out of the output of the matmul.
    fused_by_hand: bool = False
    # Keys and values are repeated for every query head before attention, and saved like that.
    repeats_keys: bool = False
    # Queries, keys and values are one matmul even in families with three.
    fused_qkv: bool = False
    # Without sharded weights, layers that read the same tensor are one matmul in compiled blocks: see plan/packed.py.
    packs_projections: bool = False
    # Peak bytes per logit of a plain loss: log-softmax and two gradients, in fp32.
    logit_bytes: float = 12.0
    # The same with a vocabulary sharded over tensor-parallel ranks.
    sharded_logit_bytes: float = 12.0
    # `chunked`: logits and their gradients are computed chunk by chunk. `upcast`: all logits are kept in the compute
    # dtype, and only upcast to fp32 chunk by chunk, within one kernel if compiled. `recomputed`: each chunk is computed
    # again in the backward pass.
    chunks: Literal["chunked", "upcast", "recomputed"] = "chunked"
    # Whether a plain loss is one fused kernel, which holds logits and their gradient once each in the compute dtype:
    # never, if blocks are compiled, or always.
    loss_kernel: Literal["never", "compiled", "always"] = "never"
    # Peak bytes per logit of such a kernel, if it holds more than that: a system that upcasts logits before, or returns
    # them cast to fp32.
    kernel_logit_bytes: float = 0.0
    # With any activation checkpointing, compiled blocks recompute elementwise results (parallel/compile.py).
    recomputes_cheap: bool = False
    # Steps that wait for the host may be replayed as CUDA graphs (`train.cuda_graphs`).
    cuda_graphs: bool = False
    # Tokens whose logits a fused loss holds at a time; 0: it is a chunked loss. `liger`: as many as make logits as
    # large as the hidden states, rounded up to a power of two.
    fused_rows: int | Literal["liger"] = 0
    # The gradient of the head's weight is computed for each of these parts, cast to fp32 and then added to that of the
    # others: Liger from 0.6.3 to 0.7 (fused_linear_cross_entropy.py); else the matmul adds to it.
    sums_head_gradient: bool = False
    # Matmul outputs that selective checkpointing saves besides attention: every second; or all but every second of
    # those that are wider than their input.
    keeps: Literal["every second", "all but widening"] = "every second"
    # fp8 matmuls save their inputs in fp8; else in the compute dtype.
    saves_fp8_inputs: bool = False
    # Inputs of fp8 matmuls are all-gathered over tensor-parallel ranks in fp8.
    gathers_in_fp8: bool = False
    # Weights and gradients are in 16 bits, and fp32 master weights are part of the optimizer state (ZeRO).
    masters_with_optimizer: bool = False
    # With sharded optimizer state, the step copies a rank's gradients into one tensor, and casts that to fp32 (step in
    # deepspeed/runtime/zero/stage_1_and_2.py, _prepare_fp32_grad_for_sub_group in stage3.py). Weights and state are
    # such tensors too, between which there are no gaps.
    flattens_gradients: bool = False
    # DDP's buckets are not its gradients, which are copied there and back (`gradient_as_bucket_view` false, PyTorch's
    # default).
    copies_to_buckets: bool = False
    # With sharded gradients and offloaded optimizer state, gradients go to the host as they are reduced, and the device
    # keeps none (partition_grads in deepspeed/runtime/zero/stage3.py).
    offloads_gradients: bool = False
    # bf16 gradients of a micro-batch stay beside the fp32 ones that they were added to until the next backward pass
    # (update_hp_grads and clear_lp_grads in deepspeed/runtime/bf16_optimizer.py).
    keeps_added_gradients: bool = False
    # Embedding and head, unless tied, are separate FSDP units; else one unit that stays unsharded between them.
    # `trained`: separate unless they are frozen under adapters.
    separate_head_unit: bool | Literal["trained"] = False
    # Master weights are cast whenever they are used (autocast); else once per step.
    casts_per_use: bool = False
    # The forward pass runs under autocast even if the weights are in 16 bits, as in Hugging Face's Trainer. It matters
    # where something is in fp32 all the same: adapters, and what PEFT upcasts.
    autocasts: bool = True
    # A 4-bit matmul saves its input for the backward pass: bitsandbytes before 0.43.2 (MatMul4Bit in
    # bitsandbytes/autograd/_functions.py).
    quantized_keep_inputs: bool = False
    # The loop holds the logits until it has the next ones, and with their graph what bitsandbytes keeps in its autograd
    # functions (`ctx.tensors`); the backward pass frees only what is saved as PyTorch wants it.
    holds_last_logits: bool = False
    # The loop holds what the model returns, and so the logits: while the backward pass runs (`step`), or until the next
    # forward pass, with its loss, has returned (`next`). In Hugging Face's Trainer they are local to `compute_loss`.
    holds_outputs: Literal["", "step", "next"] = ""
    # 16-bit weights are in fp16, though `bf16-true` is what they are called here.
    half: bool = False
    # The head is quantized like the matrices of blocks; else it keeps the compute dtype.
    quantizes_head: bool = False
    # Quantized matrices are dequantized to fp16 and then cast to bf16: two copies at a time (bitsandbytes before 0.43,
    # Params4bit.cuda in bitsandbytes/nn/modules.py).
    dequantizes_in_half: bool = False
    # Each expert has linear layers of its own, which are quantized too; else all experts are one tensor, which is not.
    quantizes_experts: bool = False
    # The scales of 4-bit blocks are no parameters, so that every rank keeps all of them on its device (bitsandbytes'
    # quant_state); else they are sharded and offloaded with the weights.
    replicates_scales: bool = False
    # With an 8-bit optimizer, the embedding's state is in fp32.
    wide_embedding_state: bool = False
    # An input of several fp8 matmuls is cast once, into both layouts; else once per matmul, in forward and backward.
    casts_once: bool = False
    # Weights are cast to fp8 in the first micro-batch of a step, and the others use that; else in every micro-batch.
    keeps_fp8_weights: bool = False
    # The allocator uses expandable segments, which hardly fragment.
    expandable_segments: bool = False
    # Memory is laid out before the first step, without gaps, rather than taken from a caching allocator (XLA, OneFlow).
    planned_memory: bool = False
    # The head is computed at a vocabulary that tensor cores can read (models/head.py), or by the compiler.
    pads_vocabulary: bool = False
    # The year of its libraries, if these are not today's: those of 2023 and 2024 are slower on Hopper.
    software: int = 0
    # On Hopper and later, attention is flash attention 2: the flash-attn package, or torch before 2026, whose SDPA
    # preferred it to cuDNN's.
    flash2: bool = False
    # Adapters are PEFT's: in fp32, so that each adapted layer casts its input and saves it on its own; dropout too is
    # each layer's own; and DoRA computes `B A` and `W + B A` in full, and saves the outputs of both.
    peft: bool = False
    # With adapters in a gated MLP, the backward pass computes the product of its factors again, and overwrites them
    # with their gradients (Unsloth's LoRA_MLP).
    mlp_in_place: bool = False
    # The activation function of the MLP is one kernel, compiled or not, that saves only its inputs.
    fused_activation: bool = False
    # These adapters are in the dtype of the frozen weights after all: PEFT before 0.12, and where a script casts them.
    narrow_adapters: bool = False
    # Where attention is not one kernel, whether scaling, mask and softmax are one, in the compute dtype, rather than
    # several in fp32: never, if blocks are compiled, or always (Megatron's).
    fused_softmax: Literal["never", "compiled", "always"] = "compiled"
    # Softmax and SiLU are written out in elementwise operations, each of which saves what its own gradient needs: the
    # exponentials beside their quotient, and the sigmoid.
    written_out: bool = False
    # GELU is written out by its definition, with erf: five elementwise kernels, as in BERT's code before PyTorch 1.4.
    erf_gelu: bool = False
    # AdamW runs kernel by kernel over all parameters (torch's foreach), which needs a copy of their size; else fused.
    foreach_step: bool = False
    # Tensors of the size of all that is updated, in fp32, which another AdamW holds at a time: two of PyTorch's before
    # version 2.1 if that is one tensor (the root of the second moments, and its quotient or sum: torch/optim/adamw.py).
    step_copies: int = 0
    # Checkpointed blocks are FSDP units, rather than FSDP units having checkpointed blocks: the recomputed forward pass
    # gathers and frees a block's weights on its own, so that the backward pass gathers them once more.
    checkpoints_units: bool = False
    # Activation checkpointing is the reentrant one, as in transformers before version 5 unless `use_reentrant` is
    # false: the whole forward pass runs again, where the other stops once all saved tensors exist. If FSDP's units are
    # frozen, hooks on their recomputed inputs keep these inputs, and the gradients that have
    # come to them, until the end of the backward pass: _register_post_backward_reshard_only_hook in
    # torch/distributed/fsdp/_runtime_utils.py.
    reentrant: bool = False
    # The model returns keys and values of all blocks for generation (`use_cache`), which activation checkpointing from
    # outside the model does not switch off: they are held to the end of the forward pass.
    caches_keys: bool = False
    # With several micro-batches per step, FSDP reduces gradients only after the last one (`no_sync`), and holds them
    # unsharded until then.
    unsharded_accumulation: bool = False
    # Each rank orthogonalizes the matrices of its turn, and Muon's updates are all-reduced in 16 bits.
    shares_muon: bool = False
    # Whole matrices are assigned to ranks, each of which broadcasts those that it has updated; else all are gathered.
    broadcasts_weights: bool = False
    # Updated weights are all-gathered during the next forward pass (Megatron's overlap_param_gather); else before it.
    overlaps_weight_gather: bool = False
    # Gradients are reduced during the backward pass; else after it.
    overlaps_gradients: bool = True
    # Pipeline stages have equal numbers of blocks, and the last one also has the head; else stages are balanced.
    even_stages: bool = False
    # These numbers count the embedding, the last norm and the head as blocks too.
    stages_of_modules: bool = False
    # Pipelines are PyTorch's: receive buffers for every micro-batch, and stage outputs that are kept. Others free both.
    torch_pipeline: bool = True
    # Context parallelism is PyTorch's ring attention: blocks of keys and values go around, and each block's output and
    # gradients are merged with those before, eagerly and in fp32.
    ring_attention: bool = False
    # The same with keys and values sent around while attention is computed (Transformer Engine).
    overlaps_context: bool = False
    # Tensor-parallel collectives run chunk by chunk with the matmuls around them (Transformer Engine's user buffers).
    overlaps_tensor: bool = False
    # With several stages per pipeline rank, transfers between stages overlap with the compute of another stage.
    overlaps_pipeline: bool = False
    # ZeRO-3 fetches and releases the parameters of each module in hooks around it, in Python.
    hooks_modules: bool = False
    # ZeRO-3 gathers and reduces each matrix as a list of shards, one for every rank, while nothing else runs.
    lists_shards: bool = False
    # In mixed precision, the weights under adapters stay in fp32, unless they are quantized; else they are in 16 bits.
    wide_base: bool = False
    # Trained weights in 16 bits become fp32 shards under FSDP, because mixed precision is on: prepare_model in
    # accelerate/accelerator.py and fsdp2_prepare_model in accelerate/utils/fsdp_utils.py, since version 0.28.
    upcasts_shards: bool = False
    # FSDP reduces gradients in the compute dtype, and accumulates unsharded ones in it; else in `reduce_dtype`.
    narrow_reduction: bool = False
    # Matmuls add to the gradients of earlier micro-batches; else these are added up by kernels of their own.
    accumulates_in_matmuls: bool = False
    # Gradients are accumulated and reduced in fp32, though weights are in 16 bits.
    wide_gradients: bool = False
    # 16-bit gradients are cast to fp32 to be reduced, and back.
    widens_reduction: bool = False
    # Gradients are all-reduced, though each rank updates only a part of the weights.
    all_reduces: bool = False
    # Packed documents are kept apart by their lengths (flash attention's variable-length kernels), without a mask.
    variable_lengths: bool = False
    # Clipping, the update and the cast to compute copies are one fused kernel.
    fused_step: bool = False


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
)
TORCHTITAN = SystemTraits(
    repeats_keys=True,
    flash2=True,
    ring_attention=True,
    sharded_logit_bytes=18.0,
    gathers_in_fp8=True,
    separate_head_unit=True,
)
# From 2025 on its loss is compiled with its blocks.
TORCHTITAN_2025 = replace(TORCHTITAN, loss_kernel="compiled")
# compile_loss in torchtune/training/_compile.py; custom_sharded_layers in recipes/configs/llama3_1/*_full.yaml.
TORCHTUNE = SystemTraits(repeats_keys=True, chunks="upcast", flash2=True, separate_head_unit="trained")
KEMPNERFORGE = SystemTraits(repeats_keys=True, logit_bytes=18.0)
# Lightning's plugin quantizes every linear layer, from fp16 (fabric/plugins/precision/bitsandbytes.py).
LITGPT = SystemTraits(
    fused_qkv=True,
    quantized_keep_inputs=True,
    holds_last_logits=True,  # fit in litgpt/finetune/lora.py
    quantizes_head=True,
    quantizes_experts=True,
    dequantizes_in_half=True,
    pads_vocabulary=True,
    unsharded_accumulation=True,
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
    wide_embedding_state=True,  # register_module_override in transformers/trainer.py
    replicates_scales=True,  # Params4bit.quant_state in bitsandbytes/nn/modules.py
    quantizes_experts=True,  # modeling_mixtral.py until transformers 5
    checkpoints_units=True,  # gradient_checkpointing_enable in transformers/modeling_utils.py; its issue 30404
    upcasts_shards=True,  # where the model is in 16 bits, as from_pretrained loads it since transformers 5
    copies_to_buckets=True,  # DistributedDataParallelKwargs in accelerate/utils/dataclasses.py
    narrow_reduction=True,  # set_mixed_precision in accelerate/utils/dataclasses.py
)
# The hand-written loop of benchmarks/gpu: PyTorch, compiled blocks and Liger's loss.
BY_HAND = SystemTraits(fused_rows="liger")
BY_HAND_AUTOCAST = replace(BY_HAND, wide_residual_stream=True, casts_per_use=True)
DEEPSPEED = SystemTraits(
    logit_bytes=14.0,
    masters_with_optimizer=True,
    flattens_gradients=True,
    offloads_gradients=True,
    flash2=True,
    peft=True,
    autocasts=False,  # _prepare_deepspeed in accelerate/accelerator.py
    narrow_adapters=True,  # _configure_distributed_model in deepspeed/runtime/engine.py casts all parameters
    torch_pipeline=False,
    replicates_scales=True,
    quantizes_experts=True,
    even_stages=True,
    hooks_modules=True,  # _register_deepspeed_module in deepspeed/runtime/zero/parameter_offload.py
)
# Megatron-LM. Files are in NVIDIA/Megatron-LM.
MEGATRON = SystemTraits(
    unfused_norms=False,  # megatron/core/fusions/fused_layer_norm.py, or Transformer Engine's
    fused_qkv=True,  # linear_qkv in megatron/core/transformer/attention.py
    fused_activation=True,  # megatron/core/fusions/fused_bias_swiglu.py
    loss_kernel="always",  # megatron/core/fusions/fused_cross_entropy.py; logits stay in the compute dtype
    fused_softmax="always",  # megatron/core/fusions/fused_softmax.py
    masters_with_optimizer=True,  # Float16OptimizerWithFloat16Params in megatron/core/optimizer/optimizer.py
    wide_gradients=True,  # --bf16 sets accumulate_allreduce_grads_in_fp32 in megatron/training/arguments.py
    accumulates_in_matmuls=True,  # gradient_accumulation_fusion in megatron/core/model_parallel_config.py
    saves_fp8_inputs=True,  # Transformer Engine's linear layers
    casts_once=True,  # the same: both layouts by one kernel
    keeps_fp8_weights=True,  # the same: is_first_microbatch in megatron/core/extensions/transformer_engine.py
    fused_by_hand=True,  # megatron/core/fusions; Transformer Engine's layers
    # --overlap-grad-reduce and --overlap-param-gather are off unless they are given: megatron/training/arguments.py.
    overlaps_gradients=False,
    even_stages=True,  # get_num_layers_to_build in megatron/core/transformer/transformer_block.py
    overlaps_context=True,  # AttnFuncWithCPAndKVP2P in Transformer Engine
    overlaps_pipeline=True,  # overlap_p2p_comm in megatron/training/arguments.py, on with virtual stages
    torch_pipeline=False,  # megatron/core/pipeline_parallel/schedules.py deallocates stage outputs
    variable_lengths=True,  # PackedSeqParams: Transformer Engine's thd layout
    reentrant=True,  # CheckpointFunction in megatron/core/tensor_parallel/random.py
)
# Its recipes, also as Megatron Bridge: bf16_mixed() with grad_reduce_in_fp32=False, tp_comm_overlap, and both overlaps
# of data parallelism.
NEMO = replace(
    MEGATRON, wide_gradients=False, overlaps_tensor=True, overlaps_gradients=True, overlaps_weight_gather=True
)
# Megatron-DeepSpeed: Megatron's model with DeepSpeed's ZeRO-1, which flattens fp16 gradients in its step; bf16 ones are
# added up in fp32 by its BF16_Optimizer.
MEGATRON_DEEPSPEED = replace(
    MEGATRON, accumulates_in_matmuls=False, flattens_gradients=True, keeps_added_gradients=True
)
# The Hugging Face Trainer with TRL's defaults: an fp32 model under autocast (create_model_from_path in
# trl/trainer/utils.py), and packing by position ids.
TRL = replace(HUGGING_FACE, variable_lengths=True, wide_base=True)
# The Trainer with a model in bf16 (torch_dtype in axolotl/utils/config), which leaves autocast nothing to cast, the
# flash-attn package (`flash_attention: true` in its examples), and multipack by cumulative lengths.
AXOLOTL = replace(TRL, wide_residual_stream=False, casts_per_use=False, flash2=True, wide_base=False)
# The Trainer with a model in bf16 and adapters in fp32 (cast_trainable_params_to_fp32 in its model/adapter.py),
# PyTorch's attention (`flash_attn: auto`) and reentrant checkpoints (`use_reentrant_gc: true`).
LLAMA_FACTORY = replace(AXOLOTL, flash2=False, variable_lengths=False, reentrant=True)
# Kernels of its own (unsloth/kernels): RMSNorm, rotary embeddings, SwiGLU; a cross-entropy that overwrites the logits
# with their gradient, or, since the end of 2024, that never holds all logits (unsloth_fused_ce_loss); LoRA in the
# compute dtype whose backward pass recomputes the MLP's product (fast_lora.py).
UNSLOTH = replace(
    AXOLOTL,
    unfused_norms=False,
    loss_kernel="always",
    # convert_outputs_to_fp32 around the model's forward in accelerate/accelerator.py: an fp32 copy beside the logits
    kernel_logit_bytes=6.0,
    fused_rows=512,
    peft=False,
    mlp_in_place=True,
    fused_activation=True,
)
# Its published results are of 2023.
COMPOSER = SystemTraits(unfused_norms=False, loss_kernel="always", software=2023)

ENGINES = {"native": "shoal", "deepspeed": "deepspeed"}  # the system that a value of `parallel.engine` runs on

SYSTEMS: dict[str, SystemTraits] = {
    "shoal": OURS,
    "torchtitan": TORCHTITAN,
    "torchtitan-2025": TORCHTITAN_2025,
    "torchtune": TORCHTUNE,
    "kempnerforge": KEMPNERFORGE,
    "litgpt": LITGPT,
    "huggingface": HUGGING_FACE,
    "by-hand": BY_HAND,
    "autocast": BY_HAND_AUTOCAST,
    "composer": COMPOSER,
    "deepspeed": DEEPSPEED,
    "megatron": MEGATRON,
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
    # examples; trained weights too are in bf16, as with its pure_bf16.
    "llama-factory": {
        "parallel.strategy": "ddp",
        "train.precision": "bf16-true",
        "train.recompute": "full",
        "train.loss_impl": "plain",
        "train.compile": False,
        "data.pack": False,
    },
    # recipes/configs: dtype bf16, compile False, packed False, enable_activation_checkpointing True but in *_lora.yaml.
    "torchtune": {
        "train.precision": "bf16-true",
        "train.recompute": "full",
        "train.compile": False,
        "data.pack": False,
    },
}

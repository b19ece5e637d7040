"""Systems that train transformers' models: the Trainer and PEFT by date, DeepSpeed, and loops of one's own."""

from dataclasses import replace

from plan_accuracy import TRAITS

from shoal.plan.systems.further import FURTHER
from shoal.plan.systems.modelled import SYSTEMS, TRL
from shoal.plan.systems.traits import SystemTraits

# The Trainer with bf16 weights before transformers 5.
FOREACH = replace(TRAITS["huggingface-bf16"], foreach_step=True, logit_bytes=14.0)
EARLIER = replace(FOREACH, flash2=True, reentrant=True, upcasts_shards=False)
# A loop of its own around transformers' models before version 5, without autocast and `no_sync`.
OWN_LOOP = {"widens_outputs": False, "waits_for_loss": False}
LOOP = replace(FOREACH, autocasts=False, unsharded_accumulation=False, reentrant=True, upcasts_shards=False, **OWN_LOOP)
# One around those of version 5 that takes the loss from the outputs and holds nothing else; and under autocast.
LOOP_5 = replace(LOOP, logit_bytes=12.0, reentrant=False, wide_embedding_state=False)
LOOP_5_AUTOCAST = replace(
    TRAITS["huggingface"], foreach_step=True, logit_bytes=12.0, wide_embedding_state=False, **OWN_LOOP
)
# The same, compiled with the loss: logits are returned too.
WITH_LOSS = {"liger_kernels": False, "loss_kernel": "compiled", "compiles_loss": True, "returns_logits": True}
# DeepSpeed's ZeRO-1 and 2 with "overlap_comm": true and "reduce_bucket_size": 2e8, as in the configs of transformers'
# documentation, which others copy.
OVERLAPPED = replace(TRAITS["deepspeed"], overlaps_gradients=True, bucket_elements=2e8)
TRANSFORMERS: dict[str, SystemTraits] = {
    # Loops around PEFT with PyTorch's AdamW as it is, which read the loss after the step.
    "huggingface-foreach": replace(FOREACH, waits_for_loss=False),
    # PyTorch before 2.11, whose SDPA took flash attention 2, and Liger 0.7.
    "huggingface-5.1": replace(FOREACH, flash2=True, sums_head_gradient=True),
    # SFTTrainer's fp32 model under adapters, which it is before transformers 5 unless its dtype is given, with the
    # entropy that it logs; and with the flash-attn package.
    "huggingface-wide-base": replace(SYSTEMS["huggingface"], wide_base=True, logs_entropy=True),
    "huggingface-wide-base-flash": replace(SYSTEMS["huggingface"], wide_base=True, logs_entropy=True, flash2=True),
    # Until transformers 4.45 the logits that a model returned were the fp32 copy; attention was flash attention 2.
    "huggingface-2024": replace(EARLIER, logit_bytes=12.0, shifts_logits=True, upcasts_shards=True),
    # The same with a fused AdamW.
    "huggingface-2024-fused": replace(
        EARLIER, logit_bytes=12.0, shifts_logits=True, upcasts_shards=True, foreach_step=False
    ),
    # The same with `use_reentrant` false.
    "huggingface-2024-not-reentrant": replace(
        EARLIER, logit_bytes=12.0, shifts_logits=True, upcasts_shards=True, reentrant=False
    ),
    # The same with bitsandbytes 0.43.0 or 0.43.1 (March to July 2024), and with an earlier one.
    "huggingface-2024-03": replace(EARLIER, logit_bytes=12.0, shifts_logits=True, quantized_keep_inputs=True),
    "huggingface-2023": replace(
        EARLIER,
        logit_bytes=12.0,
        shifts_logits=True,
        quantized_keep_inputs=True,
        dequantizes_in_half=True,
        int8_layouts=True,
    ),
    # Of 2023 with fp16 weights, which were dequantized to fp16, and no autocast; PEFT then kept the adapters of weights
    # that are not quantized in their dtype.
    "optimum": replace(
        FOREACH, logit_bytes=12.0, shifts_logits=True, autocasts=False, quantized_keep_inputs=True, half=True
    ),
    "optimum-narrow": replace(
        FOREACH,
        logit_bytes=12.0,
        shifts_logits=True,
        autocasts=False,
        quantized_keep_inputs=True,
        narrow_adapters=True,
        half=True,
    ),
    # A loop of its own around transformers' models of 2024, which checkpoints blocks within FSDP's units.
    "huggingface-2024-loop": replace(
        EARLIER,
        logit_bytes=12.0,
        shifts_logits=True,
        upcasts_shards=True,
        checkpoints_units=False,
        **OWN_LOOP,
    ),
    # Of early 2024, with own loops that hold the outputs (fsdp_qlora's train.py); their scripts cast the adapters to
    # the dtype of the frozen weights, and checkpoint blocks within FSDP's units.
    "huggingface-narrow": replace(
        EARLIER,
        logit_bytes=16.0,
        shifts_logits=True,
        holds_outputs="step",
        narrow_adapters=True,
        quantized_keep_inputs=True,
        reentrant=False,
        checkpoints_units=False,
    ),
    # The same with cached keys: `use_cache` was switched off in September 2023.
    "llama-recipes-2023": replace(
        EARLIER,
        logit_bytes=12.0,
        shifts_logits=True,
        narrow_adapters=True,
        quantized_keep_inputs=True,
        reentrant=False,
        caches_keys=True,
        checkpoints_units=False,
    ),
    # Without mixed precision; and what is allocated, not reserved, of the loss: transformers 4.45 replaced the logits
    # by their fp32 copy, so that three fp32 tensors exist at a time; 4.48 held the logits too.
    "huggingface-4.45": replace(EARLIER, logit_bytes=12.0),
    "huggingface-4.48": EARLIER,
    # The same with the kernels of fms-acceleration, whose loss overwrites the fp32 logits without the last token.
    "fms-kernels-4.45": replace(EARLIER, loss_kernel="always", kernel_logit_bytes=8.0),
    "fms-kernels-4.48": replace(EARLIER, loss_kernel="always", kernel_logit_bytes=10.0),
    # GPT-BigCode's logits were not upcast: without autocast, all of that is in 16 bits.
    "gpt-bigcode-4.48": replace(EARLIER, logit_bytes=6.0, narrow_loss=True),
    "fms-kernels-gpt-bigcode": replace(EARLIER, loss_kernel="always", kernel_logit_bytes=4.0),
    # Qwen's own model code does not upcast its logits, and with DeepSpeed there is no autocast: logits, their copy
    # without the last token and the log-softmax are in 16 bits. Its 4-bit models are GPTQ's.
    "deepspeed-qwen": replace(OVERLAPPED, logit_bytes=6.0, narrow_loss=True, fused_qkv=True),
    # Stages as they are listed in gdGPT's configs/ds_config_pp.yml: the head of BLOOM is alone on its device.
    "deepspeed-balanced": replace(TRAITS["deepspeed"], even_stages=False),
    # As deepspeed-qwen, of models with three matmuls: OPT in transformers, and loops with a loss of logits in 16 bits.
    "deepspeed-narrow": replace(TRAITS["deepspeed"], logit_bytes=6.0, narrow_loss=True),
    "deepspeed-narrow-overlapped": replace(OVERLAPPED, logit_bytes=6.0, narrow_loss=True),
    "deepspeed-overlapped": OVERLAPPED,
    # Of 2023: transformers' Llama replaced the logits by their fp32 copy, and copied them without the last token.
    "deepspeed-2023": replace(OVERLAPPED, logit_bytes=16.0),
    # Qwen's LoRA without DeepSpeed: PEFT before 0.12, and one matmul for queries, keys and values.
    "qwen-2023": replace(
        EARLIER, logit_bytes=12.0, shifts_logits=True, upcasts_shards=True, narrow_adapters=True, fused_qkv=True
    ),
    # A loss of its own over 16-bit logits (benchmark/gpt/model.py); Lightning's plugin has no autocast with DeepSpeed.
    "deepspeed-lightning": replace(TRAITS["deepspeed"], logit_bytes=6.0, narrow_loss=True),
    "colossalai": FURTHER["colossalai"],
    # FSDP's own mixed precision of fp32 weights (atorch/auto/model_context.py), blocks that are checkpointed within its
    # units from outside of the model, and a loop that holds the outputs: fsdp_llama2.py.
    "atorch": replace(
        EARLIER,
        logit_bytes=16.0,
        caches_keys=True,
        holds_outputs="next",
        checkpoints_units=False,
        reentrant=False,
        wide_base=True,
    ),
    # The Trainer's own AdamW of 2022 updated one parameter at a time.
    "huggingface-2022": replace(TRAITS["huggingface"], foreach_step=False, wide_embedding_state=False),
    # A loop around transformers' models without autocast: logits, their copy without the last token and the
    # log-softmax are in the dtype of the head, which PEFT upcasts with quantized blocks.
    "transformers-loop": replace(LOOP, logit_bytes=6.0, narrow_loss=True),
    "transformers-loop-wide": replace(LOOP, logit_bytes=10.0, int8_layouts=True),
    # The same around the loss of transformers 5's own models.
    "transformers-5-loop": replace(LOOP, logit_bytes=14.0, reentrant=False, holds_outputs="step"),
    # transformers' models under FSDP2, adapters of its own in the dtype of the layer (components/_peft/lora.py).
    "automodel": replace(LOOP, narrow_adapters=True, logit_bytes=12.0, flat_parameters=False, dtensors=True),
    # GeminiPlugin: chunks of 16-bit weights that are gathered, fp32 masters in shards, Apex's norms.
    "colossal-gemini": replace(TRAITS["deepspeed"], unfused_norms=False, hooks_modules=False, hooks_gradients=False),
    # XTuner's own attention, which repeats keys and values (xtuner/model/modules/dispatch/llama.py), on DeepSpeed.
    "xtuner-deepspeed": replace(TRAITS["deepspeed"], logit_bytes=16.0, repeats_keys=True),
    # A loop without autocast whose loss is the sum of the logits, so that there are only they and their gradient, and
    # which holds what the model returned: also cached keys and values. In fp16.
    "transformers-no-loss": replace(
        LOOP, loss_kernel="always", kernel_logit_bytes=4.0, holds_outputs="next", caches_keys=True, half=True
    ),
    # Of 2024: inputs of blocks go to the host and back on the stream of the kernels, as in
    # Unsloth_Offloaded_Gradient_Checkpointer. Of 2025: on another stream, but to one buffer, so that they come back
    # while nothing runs (UnslothCheckpointFunction; two since May 2026), and a loss without logits (cut cross-entropy).
    "unsloth-2024": replace(TRAITS["unsloth"], exposes_offload="both", expandable_segments=False),
    "unsloth-2025": replace(TRAITS["unsloth"], exposes_offload="back", fused_rows=512),
    "axolotl-kernels": TRAITS["axolotl"],  # as it is by default since April 2025
    # Without its autograd functions for adapters, which until 2026 were not for those with dropout.
    "axolotl-dropout": replace(TRAITS["axolotl"], fused_adapters=False),
    # A loop around the loss of transformers' own models, before version 5.
    "transformers-4-loop": LOOP,
    # The Trainer with adamw_torch_fused; with torch_compile, which also has the loss; and under Accelerate's FSDP with
    # fsdp_activation_checkpointing, which checkpoints blocks within FSDP's units.
    "oumi": replace(EARLIER, logit_bytes=12.0, shifts_logits=True, upcasts_shards=True, foreach_step=False),
    "oumi-compiled": replace(
        EARLIER,
        logit_bytes=16.0,
        upcasts_shards=True,
        foreach_step=False,
        liger_kernels=False,
        loss_kernel="compiled",
    ),
    "oumi-fsdp": replace(
        EARLIER,
        logit_bytes=12.0,
        shifts_logits=True,
        upcasts_shards=True,
        foreach_step=False,
        checkpoints_units=False,
        reentrant=False,
    ),
    # flash-attn's RMSNorm, rotary embeddings and cross-entropy, xFormers' SwiGLU; transformers 4.35, which upcasts
    # the logits and copies them without the last token; and the same with DeepSpeed.
    "whynlp-kernels": replace(
        EARLIER,
        unfused_norms=False,
        fused_activation=True,
        multiplies_again=True,
        fused_rotary=True,
        loss_kernel="always",
        kernel_logit_bytes=8.0,
    ),
    "whynlp-deepspeed": replace(
        OVERLAPPED,
        unfused_norms=False,
        fused_activation=True,
        multiplies_again=True,
        fused_rotary=True,
        loss_kernel="always",
        kernel_logit_bytes=8.0,
    ),
    # Megatron's kernels and DeepSpeed's ZeRO-3, of 2022, when it no longer gathered one matrix at a time.
    "megatron-zero3": replace(
        TRAITS["deepspeed"],
        unfused_norms=False,
        fused_qkv=True,
        fused_activation=True,
        loss_kernel="always",
        fused_softmax="always",
        fused_by_hand=True,
        reentrant=True,
    ),
    # A loop around transformers' models, sharded by DTensors with the loss on sharded logits; AdamW with `foreach`
    # false, and the flash-attn package.
    "benchmark-tp": replace(LOOP, foreach_step=False, flash2=True, dtensors=True),
    # HybridParallelPlugin with zero_stage 2: LowLevelZero, and Apex's norms.
    "colossal-zero2": replace(
        TRAITS["deepspeed"], unfused_norms=False, offloads_gradients=False, hooks_gradients=False
    ),
    # The Trainer of transformers 4.39 under Accelerate's FSDP: embedding and head in units of their own, gradients
    # reduced in fp32, and blocks checkpointed within FSDP's units (patches/transformers.diff).
    "yafsdp-fsdp": replace(
        EARLIER,
        logit_bytes=12.0,
        shifts_logits=True,
        upcasts_shards=True,
        reentrant=False,
        checkpoints_units=False,
        separate_head_unit=True,
        narrow_reduction=False,
    ),
    # Loops under autocast around transformers' models, whose 16-bit logits are held by what the model returned; and
    # without autocast in fp32.
    "transformers-autocast-loop": replace(
        TRAITS["huggingface"], foreach_step=True, reentrant=True, logit_bytes=14.0, holds_outputs="step", **OWN_LOOP
    ),
    "transformers-fp32-loop": replace(LOOP, logit_bytes=16.0, holds_outputs="step"),
    # The Trainer of 2024 with torch_compile, which also has the loss.
    "huggingface-2024-compiled": replace(
        EARLIER, logit_bytes=16.0, upcasts_shards=True, liger_kernels=False, loss_kernel="compiled"
    ),
    # SFTTrainer with a model in bf16, which leaves autocast nothing but the adapters to cast.
    "trl-bf16": replace(TRL, wide_residual_stream=False, casts_per_use=False, wide_base=False),
    # Loops around transformers 5, with a fused AdamW or bitsandbytes' own, or with PyTorch's foreach.
    "transformers-5-plain-loop": replace(LOOP_5, foreach_step=False),
    "plain-loop": replace(LOOP_5, foreach_step=False),
    "plain-loop-foreach": LOOP_5,
    "plain-loop-compiled": replace(LOOP_5, foreach_step=False, **WITH_LOSS),
    "plain-loop-compiled-foreach": replace(LOOP_5, **WITH_LOSS),
    "plain-loop-autocast": replace(LOOP_5_AUTOCAST, foreach_step=False),
    "plain-loop-autocast-foreach": LOOP_5_AUTOCAST,
    "plain-loop-autocast-compiled": replace(LOOP_5_AUTOCAST, foreach_step=False, **WITH_LOSS),
    "plain-loop-autocast-compiled-foreach": replace(LOOP_5_AUTOCAST, **WITH_LOSS),
    # Loops of llm-infra-bench around transformers 5 with torch.optim.AdamW as it is: under autocast, with `out` held in
    # the backward pass (08, train_loop.py) or the loss alone (09, train_dist.py), with DDP's gradient_as_bucket_view,
    # FSDP's own mixed precision, and DeepSpeed with torch_adam.
    "infra-bench-held": replace(
        TRAITS["huggingface"],
        foreach_step=True,
        copies_to_buckets=False,
        logit_bytes=14.0,
        holds_outputs="step",
        **OWN_LOOP,
    ),
    "infra-bench-held-fp32": replace(
        TRAITS["huggingface"],
        foreach_step=True,
        copies_to_buckets=False,
        logit_bytes=16.0,
        holds_outputs="step",
        **OWN_LOOP,
    ),
    "infra-bench": replace(
        TRAITS["huggingface"], foreach_step=True, copies_to_buckets=False, logit_bytes=12.0, **OWN_LOOP
    ),
    "infra-bench-lora": replace(FOREACH, copies_to_buckets=False, logit_bytes=12.0, **OWN_LOOP),
    "infra-bench-fsdp": replace(LOOP, logit_bytes=12.0, reentrant=False),
    "deepspeed-torch-adam": replace(TRAITS["deepspeed"], foreach_step=True, logit_bytes=12.0),
    # PEFT over transformers' Llama with AdamW as it is, the loss in parts of 2,048 tokens with their logits, each
    # checkpointed (train_delta.py of delta-attention); SDPA of transformers 4.51 repeats keys.
    "delta-attention": replace(LOOP, chunks="recomputed", reentrant=False, flash2=True),
    "delta-attention-sdpa": replace(LOOP, chunks="recomputed", reentrant=False, flash2=True, repeats_keys=True),
}

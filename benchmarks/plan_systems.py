"""The traits of systems whose results others published, where `--like` has no name for them, each from its code."""

from dataclasses import replace

from plan_accuracy import TRAITS

from shoal.plan.systems import MEGATRON, SYSTEMS, TRL
from shoal.plan.traits import SystemTraits

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
ALEPH = replace(
    MEGATRON,
    fused_activation=False,
    loss_kernel="never",
    accumulates_in_matmuls=False,
    flash2=True,
    widens_reduction=True,
    all_reduces=True,
    stages_of_modules=True,
)
# Systems without traits of their own are forecast as the nearest one that has some.
NEAREST: dict[str, SystemTraits] = {
    "oneflow": replace(MEGATRON, overlaps_gradients=True, planned_memory=True),
    # Overlaps data parallelism, and one block less in the first and the last stage.
    "llama3": replace(MEGATRON, overlaps_gradients=True, overlaps_weight_gather=True, even_stages=False),
    # `overlap_sync_grad` in its configs/7B_sft.py; gradients are reduced in the dtype of the weights, flattened and
    # cast, and updated weights sent after the step, rank by rank (internlm/solver/optimizer; `overlap_sync_param` is
    # off).
    "internevo": replace(
        MEGATRON,
        overlaps_gradients=True,
        wide_gradients=False,
        accumulates_in_matmuls=False,
        flattens_gradients=True,
        step_copies=2,
        broadcasts_weights=True,
        all_reduces=True,  # reduce_rank is None in _attach_reduction_hook of hybrid_zero_optim.py
    ),
    "flash-attention": MEGATRON,
    # Norms, and the sums that they read, are in fp32: call in TensorFlow2/LanguageModeling/BERT/official/nlp/modeling/
    # layers/transformer.py of NVIDIA/DeepLearningExamples; TensorFlow 1's fused_layer_norm casts in the same way.
    "tensorflow-xla": replace(MEGATRON, fused_softmax="never", planned_memory=True, wide_residual_stream=True),
    "pax": replace(MEGATRON, fused_softmax="never", planned_memory=True),
    "maxtext": replace(MEGATRON, fused_softmax="never", planned_memory=True),
    # NVIDIA's BERT: Apex's norms and optimizer, PyTorch's DDP, scores with PyTorch's softmax; later NVFuser.
    "bert-apex": replace(
        MEGATRON, fused_softmax="compiled", accumulates_in_matmuls=False, overlaps_gradients=True, wide_gradients=False
    ),
    # Its pretraining: --allreduce_post_accumulation is true in scripts/run_pretraining.sh.
    "bert-apex-pretraining": replace(
        MEGATRON, fused_softmax="compiled", accumulates_in_matmuls=False, wide_gradients=False
    ),
    # Loops around PEFT with PyTorch's AdamW as it is, which read the loss after the step.
    "huggingface-foreach": replace(FOREACH, waits_for_loss=False),
    # PyTorch before 2.11, whose SDPA took flash attention 2, and Liger 0.7.
    "huggingface-5.1": replace(FOREACH, flash2=True, sums_head_gradient=True),
    # The Trainer's fp32 model under adapters, which it is before transformers 5 unless its dtype is given; and with the
    # flash-attn package.
    "huggingface-wide-base": replace(SYSTEMS["huggingface"], wide_base=True, logs_entropy=True),
    "huggingface-wide-base-flash": replace(SYSTEMS["huggingface"], wide_base=True, logs_entropy=True, flash2=True),
    # Its first version, of July 2019: `gelu` in modeling.py.
    "bert-apex-2019-07": replace(
        MEGATRON,
        fused_softmax="compiled",
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        wide_gradients=False,
        loss_kernel="never",
        fused_activation=False,
        erf_gelu=True,
    ),
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
        EARLIER, logit_bytes=12.0, shifts_logits=True, quantized_keep_inputs=True, dequantizes_in_half=True
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
    # A loop of its own around them, which checkpoints blocks within FSDP's units.
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
    # The same of models with three matmuls: OPT in transformers, and loops with a loss of logits in 16 bits.
    "deepspeed-narrow": replace(TRAITS["deepspeed"], logit_bytes=6.0, narrow_loss=True),
    "deepspeed-narrow-overlapped": replace(OVERLAPPED, logit_bytes=6.0, narrow_loss=True),
    "deepspeed-overlapped": OVERLAPPED,
    # Of 2023: transformers' Llama replaced the logits by their fp32 copy, and copied them without the last token.
    "deepspeed-2023": replace(OVERLAPPED, logit_bytes=16.0),
    # Its LoRA without DeepSpeed: PEFT before 0.12, and one matmul for queries, keys and values.
    "qwen-2023": replace(
        EARLIER, logit_bytes=12.0, shifts_logits=True, upcasts_shards=True, narrow_adapters=True, fused_qkv=True
    ),
    # A loss of its own over 16-bit logits (benchmark/gpt/model.py); Lightning's plugin has no autocast with DeepSpeed.
    "deepspeed-lightning": replace(TRAITS["deepspeed"], logit_bytes=6.0, narrow_loss=True),
    # ColossalAI's LowLevelZero: gradients stay on the device, are cast one by one, and reduced in buckets of 12 Mi
    # elements during the backward pass (zero/low_level/low_level_optim.py).
    "colossalai": replace(
        TRAITS["deepspeed"],
        offloads_gradients=False,
        overlaps_gradients=True,
        bucket_elements=12 * 2**20,
        all_reduces=False,
    ),
    # `_allgather_param` in deepspeed/runtime/zero/partition_parameters.py, with a torch.cuda.synchronize() before each.
    "deepspeed-2021": replace(
        MEGATRON, lists_shards=True, wide_gradients=False, accumulates_in_matmuls=False, even_stages=False
    ),
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
    # Its own AdamW then updated one parameter at a time.
    "huggingface-2022": replace(TRAITS["huggingface"], foreach_step=False, wide_embedding_state=False),
    # A loop around transformers' models without autocast: logits, their copy without the last token and the
    # log-softmax are in the dtype of the head, which PEFT upcasts with quantized blocks.
    "transformers-loop": replace(LOOP, logit_bytes=6.0, narrow_loss=True),
    "transformers-loop-wide": replace(LOOP, logit_bytes=10.0),
    # The same around the loss of transformers 5's own models.
    "transformers-5-loop": replace(LOOP, logit_bytes=14.0, reentrant=False, holds_outputs="step"),
    # transformers' models under FSDP2, adapters of its own in the dtype of the layer (components/_peft/lora.py).
    "automodel": replace(LOOP, narrow_adapters=True, logit_bytes=12.0, flat_parameters=False, dtensors=True),
    # Products with 2 x 2 matrices, which move about as much; bfSixteen in fms_fsdp/policies/mixed_precision.py.
    "fms": replace(TRAITS["torchtitan"], rotary="halves", flat_parameters=True, narrow_reduction=True),
    # torch.optim.AdamW as it is, in examples/pytorch/tensor_parallel/train.py.
    "lightning-2d": replace(TRAITS["torchtitan"], foreach_step=True),
    # Its command's loss is computed with its gradient, 1,024 tokens at a time (xtuner/v1/train/arguments/arguments.py).
    "xtuner": replace(TRAITS["torchtitan"], fused_rows=1024),
    # The model, with its loss, is compiled as a whole; DDP has PyTorch's defaults. It returns the logits too; and where
    # a loop asks it not to.
    "nanogpt": replace(
        TRAITS["autocast"],
        loss_kernel="compiled",
        compiles_loss=True,
        returns_logits=True,
        pads_vocabulary=True,
        fused_activation=True,
        copies_to_buckets=True,
    ),
    "nanogpt-loss": replace(
        TRAITS["autocast"],
        loss_kernel="compiled",
        compiles_loss=True,
        pads_vocabulary=True,
        fused_activation=True,
        copies_to_buckets=True,
    ),
    # Its records from 2024-10-17 on: `updates_flat` in Muon.step.
    "modded-nanogpt": replace(
        TRAITS["autocast"],
        loss_kernel="compiled",
        compiles_loss=True,
        pads_vocabulary=True,
        fused_activation=True,
        copies_to_buckets=True,
        shares_muon=True,
    ),
    # The course's own modules (stanford-cs336/assignment2-systems, cs336_basics/model.py).
    "cs336": replace(TRAITS["by-hand"], written_out=True),
    "cs336-autocast": replace(TRAITS["autocast"], written_out=True),
    "plain-torch": replace(TRAITS["by-hand"], loss_kernel="compiled"),
    "compiled-torch": replace(TRAITS["by-hand"], loss_kernel="compiled", pads_vocabulary=True),
    # F.multi_head_attention_forward in its modules/multihead_attention.py has its softmax in the compute dtype.
    "fairseq": replace(TRAITS["by-hand"], fused_softmax="always", flat_parameters=True),
    # Of 2023 and 2024, with flash attention 2 on Hopper.
    "flagscale": replace(MEGATRON, flash2=True),
    "megatron-0.6": replace(MEGATRON, flash2=True),
    # Lit-GPT with the flash-attention package's norms, rotary embeddings, SwiGLU and loss.
    "lit-gpt-fused": replace(
        TRAITS["litgpt"],
        unfused_norms=False,
        fused_activation=True,
        multiplies_again=True,
        fused_rotary=True,
        loss_kernel="always",
    ),
    # Without fp32 gradients: "grad_accum_dtype": "bf16" in its ds_config.json, or before it had the BF16_Optimizer.
    "megatron-deepspeed-narrow": replace(
        TRAITS["megatron-deepspeed"], wide_gradients=False, keeps_added_gradients=False
    ),
    # With pp-partition-method 'type:transformer|embedding'.
    "megatron-deepspeed-balanced": replace(TRAITS["megatron-deepspeed"], even_stages=False),
    # --overlap-grad-reduce, --overlap-param-gather and --main-grads-dtype bf16.
    "megatron-overlapped": replace(
        MEGATRON, overlaps_gradients=True, overlaps_weight_gather=True, wide_gradients=False
    ),
    # NeMo from 24.01 to 24.07: NVTE_FUSED_ATTN: 0 in launcher_scripts/conf/config.yaml of NeMo-Framework-Launcher
    # leaves flash attention 2, "until we've tested it more"; and where scripts set it, as two of dgxc-benchmarking's.
    "nemo-flash2": replace(TRAITS["nemo"], flash2=True),
    # With CUDA graphs: --cuda_graphs true in nemotron/launch.sh of dgxc-benchmarking on GB200, MCORE_CUDA_GRAPH=1 in
    # configs of MLPerf's LoRA.
    "nemo-graphs": replace(TRAITS["nemo"], graphs_layers=True),
    # NeMo with ub_tp_comm_overlap: False; and that with CUDA graphs.
    "nemo-plain": replace(TRAITS["nemo"], overlaps_tensor=False),
    "nemo-plain-graphs": replace(TRAITS["nemo"], overlaps_tensor=False, graphs_layers=True),
    # Its LoRA recipes of version 24.12: no MegatronCommOverlapCallback, without which nothing overlaps, no distributed
    # optimizer, and cross_entropy_loss_fusion = False (finetune_recipe in nemo/collections/llm/recipes/llama3_8b.py and
    # llama3_70b.py); and MLPerf's code of round 5.0 where a config does not set TP_COMM_OVERLAP.
    "nemo-lora": replace(
        TRAITS["nemo"],
        overlaps_tensor=False,
        overlaps_gradients=False,
        overlaps_weight_gather=False,
        overlaps_pipeline=False,
        loss_kernel="never",
    ),
    # flash-attn's norms and attention, an eager activation and loss (cast_to_fp32 in nanotron/models/llama.py), fp32
    # gradients that FP32GradientAccumulator adds up, and stages that are balanced by get_block_compute_costs.
    "nanotron": replace(
        MEGATRON,
        fused_activation=False,
        loss_kernel="never",
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        even_stages=False,
        flash2=True,
    ),
    # Aleph Alpha's scaling: bf16 gradients are all-reduced in fp32 after the backward pass (allreduce_no_retain in
    # core/optimizer), the activation and the loss are PyTorch's, and norms too unless a run names their kernel; stages
    # have equal numbers of modules (pipe_partition_uniform).
    "aleph-scaling": ALEPH,
    "aleph-scaling-plain-norm": replace(ALEPH, unfused_norms=True),
    # NeMo of 2022, with Apex's distributed_fused_adam before overlap_param_sync; and overlap_grad_sync: False.
    "nemo-2022": replace(TRAITS["nemo"], overlaps_tensor=False, overlaps_weight_gather=False),
    "nemo-2022-bert": replace(
        TRAITS["nemo"], overlaps_tensor=False, overlaps_weight_gather=False, overlaps_gradients=False
    ),
    # --overlapped-distributed-optimizer and --no-gradient-accumulation-fusion: buckets are reduced in the backward
    # pass, and gathered asynchronously until a parameter is used; and its comparison with Megatron's own.
    "megatron-llama": replace(
        MEGATRON, flash2=True, accumulates_in_matmuls=False, overlaps_gradients=True, overlaps_weight_gather=True
    ),
    "megatron-llama-plain": replace(MEGATRON, flash2=True, accumulates_in_matmuls=False),
    # C and CUDA: bf16 weights and gradients, fp32 master weights with the optimizer, kernels fused by hand, gradients
    # reduced block by block in the backward pass (multi_gpu_async_reduce_gradient), memory allocated once; sums of the
    # residual stream are fused with norms (fused_residual_forward5), and cuDNN reads queries as a matmul wrote them.
    # fused_classifier writes the gradient over the logits.
    "llm.c": replace(
        MEGATRON,
        fused_by_hand=False,
        loss_in_place=True,
        wide_gradients=False,
        overlaps_gradients=True,
        planned_memory=True,
    ),
    # Its successor, with chunks of the head; fused_residual_rmsnorm_forward in src/kernels.
    "llm.q": replace(
        MEGATRON,
        fused_by_hand=False,
        loss_in_place=True,
        wide_gradients=False,
        overlaps_gradients=True,
        planned_memory=True,
    ),
    # scaled_upper_triang_masked_softmax_fusion and bias_gelu_fusion: false; ZeRO-1 with overlap_comm.
    "neox": replace(
        MEGATRON,
        fused_softmax="never",
        fused_activation=False,
        loss_kernel="never",
        wide_gradients=False,
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
    ),
    # Its 20B.yml has both of them.
    "neox-fused": replace(
        MEGATRON,
        loss_kernel="never",
        wide_gradients=False,
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        even_stages=False,
    ),
    # flash_attn's GPT under autocast: fused_mlp, fused_dropout_add_ln, residual_in_fp32, its in-place loss; AdamW in
    # PyTorch's ZeroRedundancyOptimizer.
    "flash-attn-amp": replace(
        TRAITS["autocast"],
        unfused_norms=False,
        fused_activation=True,
        fused_qkv=True,
        loss_kernel="always",
        loss_in_place=True,
        foreach_step=True,
        flash2=True,
    ),
    # Lightning's FSDP with precision 16: parameters, gradients and buffers in fp16.
    "lightning-fp16": replace(TRAITS["by-hand"], narrow_reduction=True, flat_parameters=True),
    # benchmark_litgpt.py of Lightning Thunder: a model whose weights are in bf16 also where its matmuls are in fp8, and
    # FSDP2 where Thunder does not shard it.
    "thunder": replace(TRAITS["litgpt"], narrow_reduction=True, flat_parameters=False),
    "thunder-fp8": replace(TRAITS["litgpt"], narrow_reduction=True, flat_parameters=False, narrow_weights=True),
    # GeminiPlugin: chunks of 16-bit weights that are gathered, fp32 masters in shards, Apex's norms.
    "colossal-gemini": replace(TRAITS["deepspeed"], unfused_norms=False, hooks_modules=False),
    # --overlap-grad-reduce, --overlap-param-gather, --no-gradient-accumulation-fusion, and a loss that is not fused.
    "megatron-tests": replace(
        MEGATRON,
        loss_kernel="never",
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        overlaps_weight_gather=True,
    ),
    # The same on Blackwell, of which cuDNN up to 9.14 has no deterministic backward pass, so that Transformer Engine
    # takes flash attention 2 (attention/dot_product_attention/utils.py of version 2.8).
    "megatron-tests-flash2": replace(
        MEGATRON,
        loss_kernel="never",
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        overlaps_weight_gather=True,
        flash2=True,
    ),
    # nanoGPT's kind of loop without DDP: gradients are reduced in the step of its sharded optimizers.
    "nanochat": replace(
        TRAITS["autocast"],
        loss_kernel="compiled",
        compiles_loss=True,
        pads_vocabulary=True,
        overlaps_gradients=False,
    ),
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
    # transformers' models under FSDP2 with compiled blocks, logits that are cast to fp32 and held by its loop beside
    # log-softmax and two gradients, and torch.optim.AdamW as it is (prime_rl/trainer/sft/train.py); and with the
    # flash-attn package.
    "prime-rl": replace(
        TRAITS["torchtitan"],
        repeats_keys=False,
        flash2=False,
        foreach_step=True,
        separate_head_unit=False,
        logit_bytes=16.0,
        holds_outputs="next",
    ),
    "prime-rl-flash2": replace(
        TRAITS["torchtitan"],
        repeats_keys=False,
        foreach_step=True,
        separate_head_unit=False,
        logit_bytes=16.0,
        holds_outputs="next",
    ),
    # AMD's Primus on Megatron: overlap_grad_reduce and overlap_param_gather true, gradient_accumulation_fusion false.
    "primus": replace(MEGATRON, accumulates_in_matmuls=False, overlaps_gradients=True, overlaps_weight_gather=True),
    # Without `optimizer.fused`, which was off by default until 2025.
    "torchtitan-foreach": replace(TRAITS["torchtitan"], foreach_step=True),
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
    # Triton kernels, the flash-attn package, weight gradients added to fp32 buffers by a kernel of their own; reduces
    # and gathers on another stream (fast_llm/engine/schedule/runner.py). Queries are a matmul apart from the keys'.
    "fast-llm": replace(
        MEGATRON, accumulates_in_matmuls=False, overlaps_gradients=True, overlaps_weight_gather=True, flash2=True
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
    # Transformer Engine's layers under FSDP2: a unit per block and one of the rest, every micro-batch reduced in fp32
    # (train_fsdp2.py), packed documents by their lengths.
    "bionemo": replace(
        TRAITS["torchtitan"],
        unfused_norms=False,
        fused_activation=True,
        fused_qkv=True,
        fused_by_hand=True,
        repeats_keys=False,
        flash2=False,
        separate_head_unit=False,
        variable_lengths=True,
    ),
    # The loop of ETH's Large-Scale AI Engineering: torchtitan's model as it was first, in bf16, logits cast to fp32,
    # torch.optim.AdamW with `fused` false, and DDP with PyTorch's defaults.
    "lsai": replace(
        TRAITS["by-hand"],
        repeats_keys=True,
        rotary="complex",
        flash2=True,
        foreach_step=True,
        copies_to_buckets=True,
        logit_bytes=14.0,
    ),
    # A loop around transformers' models, sharded by DTensors with the loss on sharded logits; AdamW with `foreach`
    # false, and the flash-attn package.
    "benchmark-tp": replace(LOOP, foreach_step=False, flash2=True, dtensors=True),
    # The same as nanoGPT and nanochat, on Hopper with versions of PyTorch that prefer flash attention 2 there.
    "gollem": replace(
        TRAITS["autocast"],
        loss_kernel="compiled",
        compiles_loss=True,
        returns_logits=True,
        pads_vocabulary=True,
        fused_activation=True,
        copies_to_buckets=True,
        flash2=True,
    ),
    "gollem-plain": replace(
        TRAITS["autocast"], narrow_loss=True, fused_activation=True, foreach_step=True, flash2=True
    ),
    "nanochat-flash2": replace(
        TRAITS["autocast"],
        loss_kernel="compiled",
        compiles_loss=True,
        pads_vocabulary=True,
        overlaps_gradients=False,
        flash2=True,
    ),
    # FSDP2 with embedding and head in one unit (apply_fsdp in olmo_core/nn/transformer/model.py), on nightly builds of
    # PyTorch from 2024-08 to 2024-10, which preferred cuDNN's attention (pytorch/pytorch#138522); with a compiled loss,
    # and with Triton's of before.
    "olmo-core": replace(TRAITS["torchtitan"], loss_kernel="compiled", flash2=False, separate_head_unit=False),
    "olmo-core-triton": replace(
        TRAITS["torchtitan"], loss_kernel="always", kernel_logit_bytes=8.0, flash2=False, separate_head_unit=False
    ),
    # HybridParallelPlugin with zero_stage 2: LowLevelZero, and Apex's norms.
    "colossal-zero2": replace(TRAITS["deepspeed"], unfused_norms=False, offloads_gradients=False),
    # parallelism.enable_async_tensor_parallel: collectives are decomposed and run with the matmuls around them.
    "torchtitan-async": replace(TRAITS["torchtitan-2025"], overlaps_tensor=True),
    "torchtitan-foreach-async": replace(TRAITS["torchtitan"], foreach_step=True, overlaps_tensor=True),
    # A compiled model whose head's matmul is padded: in bf16 with its loss and the flash-attn package; and under
    # autocast with a loss that is not compiled, and DDP with `gradient_as_bucket_view`.
    "smol-llama": replace(
        TRAITS["by-hand"], loss_kernel="compiled", compiles_loss=True, pads_vocabulary=True, flash2=True
    ),
    "autocast-padded": replace(TRAITS["autocast"], pads_vocabulary=True),
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
    # flash-attn's attention, RMSNorm and rotary embeddings between compiled parts, keys and values repeated before;
    # torch.optim.AdamW as it is.
    "llm-pretrainer": replace(TRAITS["autocast"], unfused_norms=False, repeats_keys=True, foreach_step=True),
    # The same loops with the flash-attn package, which keeps packed documents apart by their lengths.
    "autocast-flash2": replace(TRAITS["autocast"], flash2=True, variable_lengths=True),
    "by-hand-flash2": replace(TRAITS["by-hand"], flash2=True, variable_lengths=True),
    # Its own modules and LoRA: repeated keys, xFormers' attention of packed documents, checkpointed blocks as FSDP
    # units, bf16 adapters whose fp32 masters are swapped in for the step, and fp32 logits that its loop holds beside
    # log-softmax and two gradients (train.py, model/transformer.py, finetune/mixed_precision.py).
    "mistral-finetune": replace(
        TRAITS["by-hand"],
        repeats_keys=True,
        rotary="complex",
        flash2=True,
        variable_lengths=True,
        foreach_step=True,
        masters_with_optimizer=True,
        checkpoints_units=True,
        logit_bytes=16.0,
        holds_outputs="next",
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
    # nanoGPT's kind of loop without compilation: logits are held until the next ones.
    "build-nanogpt": replace(
        TRAITS["autocast"],
        narrow_loss=True,
        fused_activation=True,
        copies_to_buckets=True,
        flash2=True,
        logit_bytes=14.0,
        holds_outputs="next",
    ),
    # nanoGPT's model in a loop of its own (profile_sparse.py of FIRE_playground), compiled with its loss, and as it is.
    "fire-nanogpt": replace(
        TRAITS["autocast"],
        loss_kernel="compiled",
        compiles_loss=True,
        returns_logits=True,
        pads_vocabulary=True,
        fused_activation=True,
        flash2=True,
    ),
    "fire-nanogpt-eager": replace(
        TRAITS["autocast"], narrow_loss=True, fused_activation=True, flash2=True, logit_bytes=14.0, holds_outputs="step"
    ),
    # transformers' models in torchtitan (experiments/transformers_modeling_backend), whose attention has fewer keys.
    "torchtitan-transformers": replace(TRAITS["torchtitan-2025"], repeats_keys=False, copies_to_buckets=True),
    # A GPT by hand with torch.optim.AdamW and DDP as they are.
    "dist-trainer": replace(
        TRAITS["autocast"], fused_activation=True, foreach_step=True, copies_to_buckets=True, holds_outputs="step"
    ),
    # Primus with cross_entropy_loss_fusion: false, its default (primus/configs/models/megatron/language_model.yaml).
    "primus-plain-loss": replace(
        MEGATRON,
        loss_kernel="never",
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        overlaps_weight_gather=True,
    ),
    # Megatron with Lumen's kernels: --overlap-grad-reduce, --no-gradient-accumulation-fusion, no fused cross-entropy.
    "lumen": replace(MEGATRON, loss_kernel="never", accumulates_in_matmuls=False, overlaps_gradients=True),
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
    # core_r0.14.0 without --cross-entropy-loss-fusion; and with --overlap-grad-reduce and --overlap-param-gather.
    "megatron-0.14": replace(MEGATRON, loss_kernel="never"),
    "megatron-0.14-overlapped": replace(
        MEGATRON, loss_kernel="never", overlaps_gradients=True, overlaps_weight_gather=True
    ),
    # Recipes of Megatron-Bridge 0.1.0rc4 as they are: both overlaps and fp32 gradients (recipes/qwen), no
    # comm_overlap_config, and `bias_activation_fusion` false (models/gpt_provider.py).
    "bridge-recipe": replace(MEGATRON, fused_activation=False, overlaps_gradients=True, overlaps_weight_gather=True),
    # AMD's Llama 3.1 8B of MLPerf 5.1: a DistributedDataParallelConfig without overlaps, grad_reduce_in_fp32 false
    # (src/train.py).
    "nemo-no-overlap": replace(MEGATRON, wide_gradients=False),
    # A loop of its own over a Qwen3-like model: keys repeated before attention, the loss in four parts, each
    # checkpointed (src/nanollm/model.py).
    "nanollm": replace(TRAITS["autocast"], chunks="recomputed", repeats_keys=True),
    # A plain transformer by hand with torch.optim.AdamW as it is; logits are held until the next ones (scripts/train.py
    # of ssra).
    "ssra": replace(
        TRAITS["autocast"], fused_activation=True, foreach_step=True, logit_bytes=14.0, holds_outputs="next"
    ),
    # Logits in fp32, copied without the last token, with a fused AdamW (labs/common/frontierlab/train/loop.py).
    "frontierlab": replace(TRAITS["autocast"], logit_bytes=12.0, shifts_logits=True),
    # PEFT over transformers' Llama with AdamW as it is, the loss in parts of 2,048 tokens with their logits, each
    # checkpointed (train_delta.py of delta-attention); SDPA of transformers 4.51 repeats keys.
    "delta-attention": replace(LOOP, chunks="recomputed", reentrant=False, flash2=True),
    "delta-attention-sdpa": replace(LOOP, chunks="recomputed", reentrant=False, flash2=True, repeats_keys=True),
}

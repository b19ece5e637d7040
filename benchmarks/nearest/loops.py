"""Systems with models of their own in PyTorch: torchtitan's and LitGPT's kin, and loops like nanoGPT's."""

from dataclasses import replace
from typing import Any

from plan_accuracy import TRAITS

from shoal.plan.systems.further import FURTHER
from shoal.plan.systems.traits import SystemTraits

# How LitGPT pretrains without a compiler, unlike its fine-tuning: the cache of rotary embeddings is cast with the
# model, AdamW is fused, labels are shifted before the model runs, and the host waits once per step, when that has been
# launched.
OF_PRETRAINING: dict[str, Any] = {
    "rotary": "halves",
    "foreach_step": False,
    "splits_logits": False,
    "waits_for_loss": False,
}
# benchmark_litgpt.py of Lightning Thunder: a loop without Fabric, which would return the logits in fp32, around a model
# whose weights are in bf16 also where its matmuls are in fp8, and FSDP2 where Thunder does not shard it.
THUNDER = replace(TRAITS["litgpt"], narrow_reduction=True, flat_parameters=False, narrow_loss=True, **OF_PRETRAINING)
LOOPS: dict[str, SystemTraits] = {
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
    # Lit-GPT with the flash-attention package's norms, rotary embeddings, SwiGLU and loss.
    "lit-gpt-fused": replace(
        TRAITS["litgpt"],
        **OF_PRETRAINING,
        unfused_norms=False,
        fused_activation=True,
        multiplies_again=True,
        fused_rotary=True,
        loss_kernel="always",
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
    "thunder": THUNDER,
    "thunder-fp8": replace(THUNDER, narrow_weights=True),
    # nanoGPT's kind of loop without DDP: gradients are reduced in the step of its sharded optimizers.
    "nanochat": replace(
        TRAITS["autocast"],
        loss_kernel="compiled",
        compiles_loss=True,
        pads_vocabulary=True,
        overlaps_gradients=False,
    ),
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
    # Without `optimizer.fused`, which was off by default until 2025.
    "torchtitan-foreach": replace(TRAITS["torchtitan"], foreach_step=True),
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
    # As nanoGPT and nanochat, on Hopper with versions of PyTorch that prefer flash attention 2 there; and not compiled.
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
    "olmo-core": FURTHER["olmo-core"],
    "olmo-core-triton": replace(
        TRAITS["torchtitan"], loss_kernel="always", kernel_logit_bytes=8.0, flash2=False, separate_head_unit=False
    ),
    # parallelism.enable_async_tensor_parallel: collectives are decomposed and run with the matmuls around them.
    "torchtitan-async": replace(TRAITS["torchtitan-2025"], overlaps_tensor=True),
    "torchtitan-foreach-async": replace(TRAITS["torchtitan"], foreach_step=True, overlaps_tensor=True),
    # A compiled model whose head's matmul is padded: in bf16 with its loss and the flash-attn package; and under
    # autocast with a loss that is not compiled, and DDP with `gradient_as_bucket_view`.
    "smol-llama": replace(
        TRAITS["by-hand"], loss_kernel="compiled", compiles_loss=True, pads_vocabulary=True, flash2=True
    ),
    "autocast-padded": replace(TRAITS["autocast"], pads_vocabulary=True),
    # flash-attn's attention, RMSNorm and rotary embeddings between compiled parts, keys and values repeated before;
    # torch.optim.AdamW as it is.
    "llm-pretrainer": replace(TRAITS["autocast"], unfused_norms=False, repeats_keys=True, foreach_step=True),
    # Plain loops, under autocast and by hand, with the flash-attn package, which keeps packed documents apart by their
    # lengths.
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
}

"""The host's time in DeepSpeed's Python: hooks around parameters and modules, and its step.

Measured as what passes and steps take longer than without DeepSpeed, with its versions 0.14, 0.17 and 0.19 on the host
of an H200, whose device waited for it (benchmarks/gpu/deepspeed_h200/host.jsonl). In the same calls a block without
DeepSpeed took 1.45 times the host time that `host.py` has, so these times are divided by that.
"""

from shoal.plan.memory.states import adapted, is_expert_module
from shoal.plan.run.blocks import linears
from shoal.plan.run.run import Run
from shoal.plan.speed.launched import block_biases, block_norms

# Of each gradient that ZeRO-1 or 2 reduces: a hook copies it into a bucket, and later out of it (process_gradients in
# deepspeed/runtime/zero/stage_1_and_2.py). Since 0.18.7 every hook also counts those that are still to come, also in
# micro-batches after which nothing is reduced.
REDUCED, COUNTED, COUNTED_ONLY = 0.04e-3, 0.11e-3, 0.03e-3
# Of each gradient that a rank updates: its norm, and its part of the flat tensor; and whether it is finite, in fp16 and
# since 0.19.4 in bf16 (bf16.check_grad_overflow), some seven kernels.
UPDATED, CHECKED = 0.02e-3, 0.10e-3
# The same of ZeRO-3, all of whose ranks update a shard of each.
SHARD_UPDATED = 0.08e-3
# What a step takes besides, exposed because the Trainer reads the norm of the gradients after it.
STEP = 4e-3
# ZeRO-3 for each module with parameters, in each pass: hooks before and after it fetch its parameters, prefetch others
# and release them (deepspeed/runtime/zero/partitioned_param_coordinator.py). From steps that hardly depend on the
# length of their sequences: Qwen-1.8B on one A100 with activation checkpointing, 2.1 to 2.2 s for 8 micro-batches of
# 256 to 1,024 tokens; with other ranks, whose shards are all-gathered, 0.59 ms with Qwen-7B on two and 0.45 ms with
# adapters on Qwen-72B on four (QwenLM/Qwen, README.md). On the host of the H200 0.32 and, since 0.18.7, 0.39.
MODULE, GATHERING_MODULE = 0.39e-3, 0.52e-3


def zero_hooks(run: Run) -> float:
    """Host time of the hooks of a block in a micro-batch, both passes."""
    if not run.traits.hooks_modules or not run.data_parallelism.shards_optimizer:
        return 0.0
    if run.data_parallelism.shards_weights:
        each = MODULE if run.world_size == 1 else GATHERING_MODULE
        return each * _modules(run) * (2 + run.repeated_share + run.reference_pass)
    tensors, counts = _trained_tensors(run), run.traits.counts_hooks
    each = COUNTED if counts else REDUCED
    if not run.data_parallelism.shards_gradients:  # reduced after the last micro-batch alone
        others = COUNTED_ONLY if counts else 0.0
        each = (each + others * (run.grad_accum_steps - 1)) / run.grad_accum_steps
    checked = CHECKED / run.optimizer_shards / run.grad_accum_steps if _checks(run) else 0.0
    return tensors * (each + checked)


def zero_step(run: Run, blocks: int) -> float:
    """Host time of a step that the device waits for."""
    if not run.traits.hooks_modules or not run.data_parallelism.shards_optimizer:
        return 0.0
    each = SHARD_UPDATED if run.data_parallelism.shards_weights else UPDATED / run.optimizer_shards
    return STEP + each * _trained_tensors(run) * blocks


def _checks(run: Run) -> bool:
    """Whether each gradient is checked before a step."""
    return run.traits.checks_gradients or run.precision == "16-mixed"


def _modules(run: Run) -> int:
    """Modules of a block that have parameters."""
    return len(linears(run.shape, joined=run.traits.fused_qkv)) + block_norms(run) + 2 * _adapted(run)


def _trained_tensors(run: Run) -> int:
    """Trained tensors of a block."""
    if run.adapter is not None:
        return 2 * _adapted(run)
    layers = linears(run.shape, joined=run.traits.fused_qkv)
    matrices = sum(run.shape.experts if is_expert_module(run, one) else 1 for one in layers)
    norms = block_norms(run) * (2 if run.shape.traits.norm_bias else 1)
    return matrices + block_biases(run) + norms


def _adapted(run: Run) -> int:
    if run.adapter is None:
        return 0
    return sum(run.shape.experts if is_expert_module(run, one) else 1 for one in adapted(run))

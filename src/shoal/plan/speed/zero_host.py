"""The host's time in DeepSpeed's Python: hooks around parameters and modules, and its step.

Measured as what forward and backward passes and steps take longer than without DeepSpeed, with its versions 0.14, 0.17
and 0.19 on the host of an H200, whose device waited for it (benchmarks/gpu/deepspeed_h200/host.jsonl). In the same
calls forward and backward passes of a Llama without DeepSpeed took 1.45 times the host time that `host.py` has (0.8 to
2.6 in single configurations), so these times are medians divided by that.
"""

from shoal.plan.memory.states import adapted, stored_tensors
from shoal.plan.run.blocks import linears
from shoal.plan.run.run import Run
from shoal.plan.speed.launched import block_biases, block_norms

# Of each gradient that ZeRO-1 or 2 reduces: a hook copies it into a bucket, and later out of it (process_gradients in
# deepspeed/runtime/zero/stage_1_and_2.py). Measured with 0.19.8, hooks that keep account of the backward pass take
# longer, also in micro-batches after which nothing is reduced.
REDUCED_HOST, TRACKED_HOST, UNREDUCED_HOST = 0.04e-3, 0.11e-3, 0.03e-3
# Of each gradient that a rank updates: its norm, and its part of the flat tensor; and whether it is finite, some seven
# kernels, which a device that is still busy hides.
UPDATED_HOST, CHECKED_HOST = 0.02e-3, 0.10e-3
# The same of ZeRO-3, all of whose ranks update a shard of each.
SHARD_UPDATED_HOST = 0.08e-3
# What a step takes besides, exposed because the Trainer reads the norm of the gradients after it: as without DeepSpeed
# (STEP_HOST in host.py). Clipping and AdamW alone take 1.7 to 2.0 ms on one rank of eight, and 3.0 to 3.3 with 0.19.8.
ZERO_STEP_HOST = 4e-3
# ZeRO-3 for each module with parameters, in each pass: hooks before and after it fetch its parameters, prefetch others
# and release them (deepspeed/runtime/zero/partitioned_param_coordinator.py). From steps that hardly depend on the
# length of their sequences: Qwen-1.8B on one A100 with activation checkpointing, 2.1 to 2.2 s for 8 micro-batches of
# 256 to 1,024 tokens; with other ranks, whose shards are all-gathered, 0.59 ms with Qwen-7B on two and 0.45 ms with
# adapters on Qwen-72B on four (QwenLM/Qwen, README.md). On the host of the H200 0.31 ms, and 0.38 with 0.19.8, whether
# as one rank or as one of eight whose collectives return at once.
MODULE_HOST, GATHERING_MODULE_HOST = 0.39e-3, 0.52e-3


def zero_hooks(run: Run) -> float:
    """Host time of the hooks of a block in a micro-batch, forward and backward, with checks of its gradients."""
    if run.data_parallelism.shards_weights:
        if not run.traits.hooks_modules:
            return 0.0
        each = MODULE_HOST if run.world_size == 1 else GATHERING_MODULE_HOST
        return each * _modules(run) * (2 + run.repeated_share + run.reference_pass)
    if not _hooks_gradients(run):
        return 0.0
    each, others = (TRACKED_HOST, UNREDUCED_HOST) if run.traits.tracks_hooks else (REDUCED_HOST, 0.0)
    if not run.data_parallelism.shards_gradients:  # reduced after the last micro-batch alone
        each = (each + others * (run.grad_accum_steps - 1)) / run.grad_accum_steps
    checked = CHECKED_HOST / run.optimizer_shards / run.grad_accum_steps if _checks(run) else 0.0
    return _trained_tensors(run) * (each + checked)


def zero_step(run: Run, blocks: int) -> float:
    """Host time of a step that the device waits for."""
    if not _hooks_gradients(run):
        return 0.0
    sharded = run.data_parallelism.shards_weights
    each = SHARD_UPDATED_HOST if sharded else UPDATED_HOST / run.optimizer_shards
    return ZERO_STEP_HOST + each * _trained_tensors(run) * blocks


def _hooks_gradients(run: Run) -> bool:
    return run.traits.hooks_gradients and run.data_parallelism.shards_optimizer


def _checks(run: Run) -> bool:
    """Whether each gradient is checked before a step."""
    return run.precision == "16-mixed" or (run.traits.checks_gradients and run.precision != "32-true")


def _modules(run: Run) -> int:
    """Modules of a block that have parameters."""
    return len(linears(run.shape, joined=run.traits.fused_qkv)) + block_norms(run) + 2 * _adapted(run)


def _trained_tensors(run: Run) -> float:
    """Trained tensors of a block, on average over all of them."""
    if run.adapter is not None:
        return 2 * _adapted(run)
    layers = linears(run.shape, joined=run.traits.fused_qkv)
    norms = block_norms(run) * (2 if run.shape.traits.norm_bias else 1)
    return (stored_tensors(run, layers) + block_biases(run) + norms) * run.trained.blocks


def _adapted(run: Run) -> int:
    """Adapted layers of a block."""
    return stored_tensors(run, adapted(run)) if run.adapter is not None else 0

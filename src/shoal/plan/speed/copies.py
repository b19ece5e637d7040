"""Copies around the collectives of sharded weights and gradients: memory traffic that replicated ones do not have."""

from dataclasses import dataclass
from math import ceil

from shoal.plan.memory.states import block_bytes, trained_parameters
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import Rank, count
from shoal.plan.run.run import Run
from shoal.plan.speed.eager import cast, kernel_seconds
from shoal.plan.speed.kernels import contiguous_rate

# Share of the memory bandwidth that the copies of FSDP2 reach, out of what was gathered and into what is reduced: 3.4
# to 3.8 TB/s on an H200; if they cast to fp32, 2.0 to 2.2, as other casts do (benchmarks/gpu/fsdp_copies_h200). Blocks
# take longer by 1.1 to 2.1 times as much, the most where they are small.
COPIED = 0.75
# Elements that DeepSpeed's ZeRO-3 prefetches in one all-gather (stage3_prefetch_bucket_size), by default.
PREFETCHED = 5e7


@dataclass(frozen=True)
class Copies:
    """Seconds of a micro-batch: between the kernels of both passes, and on streams of their own beside them."""

    forward: float = 0.0
    backward: float = 0.0
    beside: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.beside


def shard_copies(run: Run, rank: Rank) -> Copies:
    """The copies of a micro-batch on a rank whose weights are sharded."""
    traits = run.traits
    if not run.gathers_weights or run.shards == 1 or run.gpu.is_cpu or traits.planned_memory:
        return Copies()
    rate, trained = contiguous_rate(run), trained_parameters(run, rank)
    copied = run.gpu.memory_bandwidth * COPIED
    steps = run.grad_accum_steps if run.accumulates_unsharded or run.mesh.pp > 1 else 1
    narrow, wide = run.compute_bytes, run.reduced_bytes
    widened = kernel_seconds(run, cast(1.0, narrow, wide), trained)
    if traits.hooks_modules:
        # AllGatherCoalescedHandle.wait in deepspeed/runtime/zero/partition_parameters.py; gradients are copied into a
        # bucket, put together for each rank and divided (stage3.py, reduce_scatter_coalesced).
        gathered = _gathered(run, rank, forward=True) + _gathered(run, rank, forward=False)
        matrices = _matrices(run)
        together = sum(size for size in matrices if size < PREFETCHED) / sum(matrices)
        return Copies(beside=(2 * together * gathered + 6 * trained * wide) / rate)
    if traits.masters_with_optimizer:
        return Copies()
    if traits.flat_parameters:
        # FSDP1 computes with views of what it gathers. Their gradients become one tensor, which is cast to the dtype of
        # the reduction and divided before it (_post_backward_hook and _reduce_grad in fsdp/_runtime_utils.py).
        return Copies(0.0, 2 * trained * narrow / copied, (widened + 2 * trained * wide / rate) / steps)
    # FSDP2 copies every parameter out of what it gathers, and every gradient into what it reduces
    # (foreach_all_gather_copy_out and foreach_reduce_scatter_copy_in in fsdp/_fully_shard/_fsdp_collectives.py).
    forward, backward = (2 * _gathered(run, rank, forward=ahead) / copied for ahead in (True, False))
    return Copies(forward, backward + (widened or 2 * trained * narrow / copied) / steps)


def block_collectives(run: Run) -> tuple[int, int]:
    """All-gathers and reduce-scatters of a block: one each; with ZeRO-3 as many as its prefetches and its buckets."""
    bucket = run.traits.bucket_elements
    if not (run.traits.hooks_modules and bucket and run.gathers_weights):
        return 1, 1
    matrices = _matrices(run)
    alone = [size for size in matrices if size >= PREFETCHED]
    together = sum(matrices) - sum(alone)
    return len(alone) + ceil(together / PREFETCHED), max(1, ceil(sum(matrices) / bucket))


def _matrices(run: Run) -> list[float]:
    """Elements of the matrices of a block."""
    return [one.parameters / run.mesh.tp for one in linears(run.shape, joined=run.traits.fused_qkv)]


def _gathered(run: Run, rank: Rank, *, forward: bool) -> float:
    """Bytes that a pass of a micro-batch gathers."""
    counts = count(run, rank)
    blocks = counts.block * rank.blocks * block_bytes(run)
    if run.keeps_weights:
        return (blocks + counts.embedding_and_head * run.compute_bytes) / run.grad_accum_steps if forward else 0.0
    if not forward:
        return blocks * (1 + run.traits.checkpoints_units * run.repeated_share)
    return blocks * (2 if run.reference_pass else 1) + counts.embedding_and_head * run.compute_bytes

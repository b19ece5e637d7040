"""Settings of a resolved run that are probably unintended: the plan, the dry run and the run itself say them."""

from collections.abc import Iterator
from dataclasses import replace

from shoal.plan.resolved import ResolvedRun
from shoal.plan.run.stages import bubble_share
from shoal.plan.speed.attention import flash2_speed
from shoal.plan.speed.forecast import forecast_speed

# From so many times the speed on, the other method of context parallelism is worth a sentence.
FASTER = 1.1
NOT_COMPILED = "train.recompute cheap has no effect: it is a choice of the compiler, and blocks are not compiled here."


def unintended(resolved: ResolvedRun) -> Iterator[str]:
    """A sentence for each."""
    parallel, stages, micro_batches = resolved.config.parallel, resolved.mesh.pp, resolved.grad_accum_steps
    if parallel.sharding == "hybrid_shard" and resolved.strategy == "fsdp" and resolved.mesh.dp_replicate == 1:
        yield "on one machine hybrid_shard equals full_shard; parallel.replicate sets the number of replicas."
    if stages > micro_batches:
        share = bubble_share(stages, micro_batches, 1 if parallel.pp_schedule == "1f1b" else 2)
        counted = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
        yield (
            f"parallel.pp {stages} with {counted} per step leaves each device idle for {share:.0%} of the step; lower "
            "train.micro_batch or raise train.global_batch for more."
        )
    yield from _slower_context(resolved)
    if resolved.config.train.recompute == "cheap" and not resolved.run.compiled:
        yield NOT_COMPILED


def _slower_context(resolved: ResolvedRun) -> Iterator[str]:
    """Gathered keys, where ulysses is possible and its kernels are faster."""
    run, mesh = resolved.run, resolved.mesh
    slower = flash2_speed(run, run.attention) < 1
    if mesh.cp == 1 or run.cp_method != "gather" or not slower or run.shape.heads % (mesh.cp * mesh.tp):
        return
    faster = resolved.speed.step_seconds / forecast_speed(replace(run, cp_method="ulysses")).step_seconds
    if faster > FASTER:
        yield (
            "parallel.cp_method gather runs flash attention 2, the only kernel without stored scores for fewer queries "
            f"than keys in 16 bits; ulysses is forecast to be {faster:.1f} times as fast here."
        )

"""Which linear layers of a block are one matmul: see parallel/packed.py, which decides the same from the real model."""

from shoal.catalogue.families import LLAMA_PLAN
from shoal.plan.run.blocks import Linear, linears
from shoal.plan.run.run import Run

# The inputs of attention and MLP, by the names in `blocks`.
ATTENTION, MLP = "norm", "second norm"


def packed_linears(run: Run) -> tuple[Linear, ...]:
    """The matmuls of a block: its linear layers, of which those that are packed are one."""
    apart = linears(run.shape, joined=run.traits.fused_qkv)
    found: dict[str, Linear] = {}
    for one in apart:
        key = one.reads if one.reads in _packed_inputs(run) else one.name
        before = found.get(key)
        found[key] = one if before is None else Linear(key, one.inputs, before.outputs + one.outputs, reads=one.reads)
    return tuple(found.values())


def summed_gradients(run: Run) -> int:
    """Gradients of a block's inputs that no longer have to be read to be added, because layers are packed."""
    return len(linears(run.shape, joined=run.traits.fused_qkv)) - len(packed_linears(run))


def gathered_sums(run: Run) -> int:
    """Sums of gradients of a block's inputs, one for each layer after the first that reads one; none where queries,
    keys and values are one matmul, as are then gate and up (Megatron's linear_qkv and linear_fc1)."""
    apart = [one.reads for one in packed_linears(run) if one.reads in (ATTENTION, MLP)]
    return 0 if run.traits.fused_qkv else len(apart) - len(set(apart))


def _packed_inputs(run: Run) -> tuple[str, ...]:
    traits, mesh = run.shape.traits, run.mesh
    if run.shape.experts:
        return (MLP,)  # gate_up_proj of transformers' experts
    applies = (
        run.traits.packs_projections
        and run.compiled
        and not run.gpu.is_cpu
        and run.precision in ("bf16-mixed", "16-mixed")
        and run.adapter is None
        and run.recompute == "none"
        and not run.sharded
        and run.offload == "none"
        and mesh.tp * mesh.cp == 1
        and traits.plan is LLAMA_PLAN
        and traits.gated
    )
    if not applies or not run.trained.blocks:
        return ()
    return (MLP,) if traits.qkv_bias or traits.head_norms else (ATTENTION, MLP)

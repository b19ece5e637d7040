"""Memory that only communication and the optimizer's step need."""

from shoal.catalogue.efficiency import CDNA3
from shoal.catalogue.optimizers import find_optimizer
from shoal.plan.memory.activations import block_input
from shoal.plan.memory.states import BUCKET_BYTES, ZERO1_BUCKET, trained_parameters
from shoal.plan.run.blocks import MLP, linears, orthogonalized
from shoal.plan.run.layout import Rank, micro_batches_in_flight
from shoal.plan.run.run import Run
from shoal.plan.terms import Term, group, leaf

# Elements of DeepSpeed's contiguous gradient bucket (reduce_bucket_size), by default.
ZERO_BUCKET = 5e8
# Elements of a rank that ZeRO-3 updates at a time (sub_group_size), by default.
ZERO_SUB_GROUP = 1e9
HOPPER = (9, 0)

# Workspaces of cuBLAS that PyTorch allocates for each thread, of the forward and of the backward pass; more on Hopper
# (parseChosenWorkspaceSize in aten/src/ATen/cuda/CublasHandlePool.cpp). Before version 2.0 cuBLAS allocated its own.
WORKSPACE, HOPPER_WORKSPACE = 8.125 * 2**20, 32 * 2**20
WORKSPACES_SINCE = 2023
ENGINE_WORKSPACE = 4 * 2**20  # before Hopper
# The same of hipBLAS, more on MI300 and MI325, and one of hipBLASLt, since PyTorch 2.6 of January 2025 (pytorch's pull
# requests 138791 and 139300).
HIP_WORKSPACE, CDNA3_WORKSPACE, LT_WORKSPACE = 32 * 2**20, 128 * 2**20, 76 * 2**20
HIP_WORKSPACES_SINCE = 2025


def matmul_workspaces(run: Run) -> float:
    """Bytes that PyTorch allocates for cuBLAS, or for hipBLAS and hipBLASLt, and keeps."""
    capability = run.gpu.compute_capability
    if run.gpu.is_cpu or run.traits.planned_memory:
        return 0.0
    if 0 < run.traits.software < (HIP_WORKSPACES_SINCE if capability is None else WORKSPACES_SINCE):
        return 0.0
    if capability is None:
        return 2 * (CDNA3_WORKSPACE if run.gpu.name in CDNA3 else HIP_WORKSPACE) + LT_WORKSPACE
    # Transformer Engine has one of its own (get_cublas_workspace in its pytorch/cpp_extensions/gemm.py).
    engine = 0 if not run.has_engine else HOPPER_WORKSPACE if capability >= HOPPER else ENGINE_WORKSPACE
    return engine + 2 * (HOPPER_WORKSPACE if capability >= HOPPER else WORKSPACE)


def dummy_gradients(run: Run, rank: Rank) -> float:
    """What autograd is given in place of weight gradients that a matmul has added up already: a tensor for each shape
    of weight, which stays."""
    if not run.keeps_dummies:
        return 0.0
    shape, trained = run.shape, run.trained
    # An expert's matrix has its share of the width of all that a token is routed to.
    each = [one.parameters / (shape.routed if shape.experts and one.reads in MLP else 1) for one in linears(shape)]
    found = sum(each) if trained.blocks else 0.0
    if rank.last and (trained.embedding if shape.tied else trained.head):
        found += shape.vocab * shape.hidden
    return run.compute_bytes * found / run.mesh.tp


def mask_buffers(run: Run, rank: Rank) -> float:
    """Causal masks of all positions that blocks keep."""
    if not run.traits.mask_buffers or run.shape.model_type not in ("gpt2", "gpt_neox"):
        return 0.0
    return float(run.shape.positions**2 * rank.blocks)


def communication_buffers(run: Run, rank: Rank) -> Term:
    """Buffers that only communication needs."""
    found = []
    if run.compress_bytes:
        found.append(leaf("compressed gradient bucket", BUCKET_BYTES))
    if run.mesh.tp > 1:
        # Input and output of an all-gather or reduce-scatter.
        found.append(leaf("tensor-parallel collectives", 2 * run.tokens * run.shape.hidden * run.compute_bytes))
    if run.mesh.pp > 1:
        receives = sum((not stage.first) + (not stage.last) for stage in rank.stages)
        in_flight = micro_batches_in_flight(run, rank)
        # PyTorch's PipelineStage preallocates receive buffers for hidden states and gradients of every micro-batch.
        # Others hold those that are in use.
        buffers = run.grad_accum_steps if run.traits.torch_pipeline else 1
        found.append(leaf("pipeline receive buffers", receives * buffers * block_input(run)))
        # It also keeps its outputs until the backward pass.
        outputs = in_flight * len(rank.stages) if run.traits.torch_pipeline else 0.0
        found.append(leaf("pipeline stage outputs", outputs * block_input(run)))
    if not frees_bucket(run):
        found.append(leaf("gradient bucket", gradient_bucket(run)))
    return group("communication buffers", *found)


def gradient_bucket(run: Run) -> float:
    """Bytes of the bucket that DeepSpeed reduces gradients in: all of it, however little is trained. Megatron's are
    reduced in the buffer that holds them."""
    flattens = run.traits.flattens_gradients and run.mixed and run.data_parallelism.shards_optimizer
    return ZERO_BUCKET * run.reduced_bytes if flattens else 0.0


def frees_bucket(run: Run) -> bool:
    """Whether the bucket is there in the backward pass alone: _release_ipg_buffers of ZeRO-1 and 2."""
    return run.traits.hooks_gradients and not run.data_parallelism.shards_weights


def adafactor_copies(run: Run) -> int:
    """Tensors in fp32 of a parameter's size that transformers' Adafactor has at a time: the squared gradient, twice,
    and, if they are in 16 bits, weight and gradient (step in transformers/optimization.py)."""
    return 4 if run.trained_bytes < 4 else 2


def optimizer_temporaries(run: Run, rank: Rank) -> Term:
    """Temporary memory of the optimizer step."""
    trained, amount = trained_parameters(run, rank), 0.0
    if run.data_parallelism.partitions_update:
        amount += 2 * ZERO1_BUCKET * run.weight_bytes
    if find_optimizer(run.optimizer).needs_whole_matrices:
        # Newton-Schulz needs a few copies of its batch in bf16, and they are made from one in fp32.
        amount += 4 * 2 * max(together * short * long for (short, long), _, together in orthogonalized(run.shape))
    amount = min(amount, 8 * trained)
    if find_optimizer(run.optimizer).factored:
        tables = run.shape.vocab * run.shape.hidden * max(run.trained.embedding, run.trained.head)
        largest = max(tables, *(one.parameters for one in linears(run.shape))) / run.mesh.tp
        amount += adafactor_copies(run) * 4 * min(largest, trained) / run.optimizer_shards
    copies = run.traits.step_copies
    if run.foreach_step and not run.optimizer_in_backward:
        copies = 1  # the square roots of the second moments
    if run.optimizer == "adamw":
        amount += copies * trained / run.optimizer_shards * run.weight_bytes
    flattens = run.traits.flattens_gradients and run.mixed and run.reduced_bytes < 4
    if flattens and not run.data_parallelism.shards_optimizer:
        # All gradients in fp32, one by one and in one tensor (FP16_Optimizer in deepspeed/runtime/fp16).
        amount += trained * (4 + 4)
    elif flattens:
        amount += sum(flat_gradients(run, rank))
    return leaf("optimizer temporaries", amount)


def flat_gradients(run: Run, rank: Rank) -> tuple[float, ...]:
    """Bytes of the tensors of a rank's gradients in DeepSpeed's step: in one tensor, and in fp32; with sharded weights
    of one sub-group after the other."""
    flattens = run.traits.flattens_gradients and run.mixed and run.reduced_bytes < 4
    if not flattens or not run.data_parallelism.shards_optimizer or run.offload != "none":
        return ()
    own = trained_parameters(run, rank) / (run.shards * run.replicas)
    if run.data_parallelism.shards_weights:
        own = min(own, ZERO_SUB_GROUP)
    return own * run.reduced_bytes, own * 4

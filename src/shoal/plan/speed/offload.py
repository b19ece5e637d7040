"""Time of what is kept in host memory: activations, weights and optimizer state, and the optimizer step of the host."""

from shoal.plan.memory.activations import block_input, block_kept
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.memory.states import held_weights, optimizer_bytes, trained_parameters
from shoal.plan.run.layout import Rank
from shoal.plan.run.run import Run
from shoal.plan.speed.compute import BlockCompute, block_compute
from shoal.plan.terms import GIB, Term, group, leaf

# Share of the nominal bandwidth of the link to the host that copies of pinned memory reach.
HOST_LINK_SHARE = 0.8
# Bytes per second that a file of optimizer state is read and written at.
NVME = 3e9
# Nominal memory bandwidth of a socket of the hosts of each generation: six channels of DDR4-2666, eight of DDR4-3200,
# eight of DDR5-4800. Machines whose devices have NVLink or its like have two sockets.
SOCKETS = {"volta": 128e9, "ampere": 205e9, "hopper": 307e9}
# The share of it that a vectorized Adam reaches: 8.2 s for 11.6 billion parameters, of 28 bytes each, with
# DeepSpeedCPUAdam (DeepSpeed's pull request 735, of 2021; it does not say the host, and a DGX-2 is assumed).
HOST_ADAM = 0.155
# If the ranks of a node share its cores, as DeepSpeed's do unless `--bind_cores_to_rank` is given, each starts as many
# threads as there are cores, and n of them together reach an n-th of that. For a billion parameters on a host with two
# sockets of DDR4-3200 it is 0.9, 1.8 and 3.5 s with two, four and eight ranks; published are 0.8 s at most with two
# (3.1 s for a step of Qwen2.5-3B, DeepSpeed's pull request 7474), 1.9 s with four (128 ms for 67 million, README of
# ZenFlow's benchmark in DeepSpeedExamples) and 2.7 s with eight (chenyaofo's table).
# Bytes that a step in fp32 moves per parameter: weight, gradient and two moments are read, all but the gradient
# written.
STEP_BYTES = 28
# Of a step of torch's FSDP: the norm reads the gradient before, and the clipped gradient is written.
CLIPPED_STEP_BYTES = STEP_BYTES + 8


def host_link(run: Run) -> float:
    """Bytes per second between a device and its host's memory, in either direction."""
    return run.gpu.host_link.bytes_per_second * HOST_LINK_SHARE


def host_adam(run: Run) -> float:
    """Bytes per second at which a host runs the optimizer step, for all of its ranks together."""
    capability = run.gpu.compute_capability or (9, 0)
    generation = "volta" if capability < (8, 0) else "ampere" if capability < (9, 0) else "hopper"
    sockets = 2 if run.gpu.link.startswith(("nvlink", "xgmi")) else 1
    sharing = run.devices if run.traits.masters_with_optimizer else 1
    return sockets * SOCKETS[generation] * HOST_ADAM / sharing


def activation_transfer(run: Run, block: BlockCompute) -> float:
    """Seconds per block in which compute waits for the transfer of its activations to the host, and back."""
    if not run.offloads_inputs and not run.offloads_activations:
        return 0.0
    seconds = (block_kept(run).amount if run.offloads_activations else block_input(run)) / host_link(run)
    ahead, back = max(0.0, seconds - block.forward), max(0.0, seconds - block.backward)
    exposed = run.traits.exposes_offload if run.offloads_inputs else ""
    return (seconds if exposed == "both" else ahead) + (seconds if exposed else back)


def steps_on_host(run: Run) -> bool:
    """Whether the host runs the optimizer step. DeepSpeed's does whatever is offloaded."""
    return run.offload == "cpu" or (run.offload == "optimizer" and run.traits.masters_with_optimizer)


def _evicted(run: Run, state: float) -> float:
    """Bytes of a paged optimizer state that the rest of a step leaves no room for on the device."""
    memory = forecast_memory(run)
    return max(0.0, state + memory.allocated + memory.context - run.gpu.memory_gib * GIB)


def offloaded_state(run: Run, rank: Rank) -> Term:
    """Seconds per step for weights and optimizer state in host memory."""
    if run.offload == "none" and not run.paged_optimizer:
        return group("offload")
    if not steps_on_host(run):
        moved = 2 * optimizer_bytes(run, rank) / run.optimizer_shards
        if run.paged_optimizer and run.offload == "none":
            moved = min(moved, 2 * _evicted(run, moved / 2))
        return leaf("optimizer state transfer", moved / (host_link(run) if run.offload != "nvme" else NVME))
    trained, block = trained_parameters(run, rank), block_compute(run)
    gradients = trained * (run.reduced_bytes if run.traits.masters_with_optimizer else run.weight_bytes)
    gradients /= run.optimizer_shards * host_link(run)
    if run.offload == "cpu":
        # Before the forward and the backward pass of every micro-batch, while the block before is computed.
        weights = held_weights(run, rank) / host_link(run)
        ahead = max(weights / max(1, rank.blocks), weights - block.forward * rank.blocks)
        back = max(weights / max(1, rank.blocks), weights + gradients - block.backward * rank.blocks)
        moved = (ahead + back) * run.grad_accum_steps
        if not run.traits.masters_with_optimizer:
            # FSDP adds gradients to those before on the host, and waits for their transfer and the sum.
            added = trained * 3 * run.weight_bytes / run.optimizer_shards * run.devices / host_adam(run)
            moved += (gradients + added) * (run.grad_accum_steps - 1)
    else:
        # Gradients during the backward pass, and updated weights in 16 bits after the step.
        updated = trained * run.updated_bytes / run.optimizer_shards / host_link(run)
        moved = max(0.0, gradients - block.backward * rank.blocks) * run.grad_accum_steps + updated
    stepped = STEP_BYTES if run.traits.masters_with_optimizer else CLIPPED_STEP_BYTES * run.trained_bytes / 4
    stepping = trained / run.optimizer_shards * stepped * run.devices / host_adam(run)
    return group("offload", leaf("exposed weight transfer", moved), leaf("CPU optimizer step", stepping))

"""The time for which a step waits for communication, where PyTorch measures it without a synchronization of ours."""

from torch.nn.parallel import DistributedDataParallel

from shoal.parallel.model import ParallelModel


def exposed_communication(model: ParallelModel, strategy: str) -> float | None:
    """Seconds per step in which the device, or on a CPU the host, waits for communication; None if it is not known.

    DDP times its all-reduces with device events, in the first ten steps and in every hundredth: what does not overlap
    with the backward pass is exposed. FSDP and the other axes of the mesh have no such timer.
    """
    mesh = model.parallel_dims.mesh
    if mesh.world_size == 1:
        return 0.0
    if strategy != "ddp" or mesh.tp * mesh.cp * mesh.pp > 1:
        return None
    wrapped = next((one for one in model.modules if isinstance(one, DistributedDataParallel)), None)
    if wrapped is None:
        return None
    found: dict[str, int] = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    all_reduce, hidden = found.get("backward_comm_time"), found.get("backward_compute_comm_overlap_time")
    if not all_reduce or hidden is None:
        return None  # not measured yet
    return max(0.0, (all_reduce - hidden) / 1e9)

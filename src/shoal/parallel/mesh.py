"""The mesh of the config, laid over real processes."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.config.mesh import Mesh

# Slowest links outermost: stages of a pipeline talk least, tensor-parallel ranks most.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def lay_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """A device mesh with all five dimensions named, also those of size one."""
    sizes = tuple(getattr(mesh, name) for name in DIMENSIONS)
    return init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)

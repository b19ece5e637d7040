"""Where the tensors of a run are: which pieces of each this rank has, and which other ranks have the same ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shoal.models.tensor_slices import BLOCK, SliceMapping, Split, Splits, pieces, whole_shape
from shoal.parallel.parallel_dims import ParallelDims

# Mesh dimensions of ours that the dimensions of a DTensor's mesh stand for.
STANDS_FOR = {
    "dp_replicate": ("dp_replicate",),
    "dp_shard_cp": ("dp_shard", "cp"),
    "replicas": ("dp_replicate", "dp_shard", "cp"),
}


@dataclass(frozen=True)
class Placement:
    """For parameters by their names, and for tensors that lie as a parameter does: its optimizer state, also where that
    has one number for each block of the parameter's."""

    parallel_dims: ParallelDims
    shapes: Mapping[str, tuple[int, ...]]  # of every parameter of the whole model, wherever it is
    splits: Splits = field(default_factory=dict)
    at_both_ends: frozenset[str] = frozenset()  # tied weights that the first and the last stage both have

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Parameters that the first stage of the pipeline speaks for."""
        return frozenset() if self.parallel_dims.place["pp"] == 0 else self.at_both_ends

    def pieces(self, name: str | None, tensor: Tensor) -> list[SliceMapping]:
        """The pieces of the whole that this rank has, for a tensor that belongs to the parameter `name`, if to any."""
        return pieces(tensor, self._split(name, tensor))

    def whole_shape(self, name: str | None, tensor: Tensor) -> tuple[int, ...]:
        return whole_shape(tensor, self._split(name, tensor))

    def shared_over(self, name: str | None, tensor: Tensor) -> tuple[str, ...] | None:
        """The dimensions of the grid in which ranks that have the same pieces differ; None: another stage speaks for
        this tensor."""
        if name in self.counted_elsewhere:
            return None
        over = ["dp_replicate", "dp_shard", "cp", "tp"]
        if self._split(name, tensor) is not None:
            over.remove("tp")
        if isinstance(tensor, DTensor):
            for label, place in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True):
                if isinstance(place, Shard):
                    over = [one for one in over if one not in STANDS_FOR[label]]
        if name is None:
            over.insert(0, "pp")  # the run's own numbers are the same everywhere
        return tuple(over)

    def _split(self, name: str | None, tensor: Tensor) -> Split | None:
        split = self.splits.get(name) if name is not None else None
        if name is None or split is None or not tensor.dim():  # a counter is not cut with its parameter
            return None
        part = split.part_shape(self.shapes[name])
        in_blocks = split.dimension == len(part) - 1 and tuple(tensor.shape) != part
        return split.in_blocks(BLOCK) if in_blocks else split

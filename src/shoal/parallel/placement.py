"""Where the tensors of a run are: which slices this rank holds, and which other ranks hold the same ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shoal.config.mesh import AXES
from shoal.models.tensor_slices import BLOCK, SliceMapping, Split, Splits, slice_mappings, whole_shape
from shoal.parallel.parallel_dims import FLATTENED, ParallelDims


@dataclass(frozen=True)
class Placement:
    """For parameters by name, and for tensors sharded like a parameter: its optimizer state, also where that has one
    element per block of the parameter."""

    parallel_dims: ParallelDims
    shapes: Mapping[str, tuple[int, ...]]  # of every parameter of the complete model, on whichever rank
    splits: Splits = field(default_factory=dict)
    tied_across_stages: frozenset[str] = frozenset()  # tied weights held by both the first and the last stage

    @property
    def owned_by_another_stage(self) -> frozenset[str]:
        """Duplicates of parameters that the first stage saves and counts in the gradient norm."""
        return frozenset() if self.parallel_dims.coordinate["pp"] == 0 else self.tied_across_stages

    def slice_mappings(self, name: str | None, tensor: Tensor) -> list[SliceMapping]:
        """The slices that this rank holds of a tensor, which belongs to the parameter `name` or to none."""
        return slice_mappings(tensor, self._split(name, tensor))

    def whole_shape(self, name: str | None, tensor: Tensor) -> tuple[int, ...]:
        return whole_shape(tensor, self._split(name, tensor))

    def replicated_over(self, name: str | None, tensor: Tensor) -> tuple[str, ...] | None:
        """The mesh axes over which this tensor is replicated; None: another stage owns it."""
        if name in self.owned_by_another_stage:
            return None
        over = list(AXES)
        if name is not None:  # state of the run itself is the same on every rank
            over.remove("pp")
        if self._split(name, tensor) is not None:
            over.remove("tp")
        if isinstance(tensor, DTensor):
            for label, placed in zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True):
                if isinstance(placed, Shard):
                    over = [axis for axis in over if axis not in FLATTENED.get(label, (label,))]
        return tuple(over)

    def _split(self, name: str | None, tensor: Tensor) -> Split | None:
        split = self.splits.get(name) if name is not None else None
        if name is None or split is None or not tensor.dim():  # a step counter is not split with its parameter
            return None
        part = split.part_shape(self.shapes[name])
        in_blocks = split.dimension == len(part) - 1 and tuple(tensor.shape) != part
        return split.in_blocks(BLOCK) if in_blocks else split

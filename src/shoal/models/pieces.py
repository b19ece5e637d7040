"""Which part of a whole tensor this rank holds. Plain tensors are held whole; sharded ones as one box."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: where it begins, and its size, in every dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    def overlap(self, other: "Box") -> "Box":
        """What both boxes hold; empty where they do not touch."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        return Box(offset, tuple(max(0, end - start) for start, end in zip(offset, ends, strict=True)))

    def within(self, outer: "Box") -> "Box":
        """This box in the coordinates of `outer`."""
        offset = tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return Box(offset, self.shape)


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory of `tensor` on this rank, without autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_box(tensor: Tensor) -> Box:
    """The part of the whole that `local_tensor(tensor)` is."""
    if not isinstance(tensor, DTensor):
        return whole(tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if 0 in shape:  # this rank holds nothing: torch gives an offset past the end
        offset = (0,) * len(shape)
    return Box(tuple(offset), tuple(shape))

"""Which slices of a global tensor this rank holds.

Tensor parallelism splits a weight along one dimension (`Split`), and data-parallel sharding (a DTensor) shards the
result, in the coordinates of the result. `slice_mappings` combines the two.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Elements along the last dimension per block, for optimizer state with one element per block (optim/eight_bit.py).
BLOCK = 256


@dataclass(frozen=True)
class TensorSlice:
    """A rectangular slice of a tensor: its offset and its size in every dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    def overlap(self, other: "TensorSlice") -> "TensorSlice":
        """The intersection; empty where the slices are disjoint."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        return TensorSlice(offset, tuple(max(0, end - start) for start, end in zip(offset, ends, strict=True)))

    def within(self, outer: "TensorSlice") -> "TensorSlice":
        """This slice in the coordinates of `outer`."""
        offset = tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return TensorSlice(offset, self.shape)


@dataclass(frozen=True)
class Split:
    """A tensor split along one dimension: this rank holds these spans of it, concatenated."""

    dimension: int
    size: int  # of the global tensor, in that dimension
    spans: tuple[tuple[int, int], ...]  # (start, length)

    def whole_shape(self, part: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The global shape, from the shape of this rank's part."""
        return (*part[: self.dimension], self.size, *part[self.dimension + 1 :])

    def part_shape(self, whole: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        length = sum(length for _, length in self.spans)
        return (*whole[: self.dimension], length, *whole[self.dimension + 1 :])

    def in_blocks(self, size: int) -> "Split":
        """The split of a tensor with one element per block of `size` elements in this dimension. Spans must begin at
        block boundaries."""
        assert all(start % size == 0 for start, _ in self.spans), "a span begins inside a block"
        spans = tuple((start // size, -(-length // size)) for start, length in self.spans)
        return Split(self.dimension, -(-self.size // size), spans)


Splits = Mapping[str, Split]  # by the parameter's name; one that is not named is not split
NOT_SPLIT: Splits = {}


@dataclass(frozen=True)
class SliceMapping:
    """A slice of a global tensor, and the slice of this rank's local tensor that holds it."""

    whole: TensorSlice
    local: TensorSlice


def whole(shape: tuple[int, ...]) -> TensorSlice:
    return TensorSlice((0,) * len(shape), tuple(shape))


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory of `tensor` on this rank, without autograd."""
    # In this order: detaching a DTensor costs much more CPU time.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same for many, with autograd and in much less CPU time."""
    return [one._local_tensor if type(one) is DTensor else one for one in tensors]  # isinstance is slow here


def placed_like(local: Tensor, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """`local` as this rank's shard of a tensor that is placed like `tensor`. `local` stays on its device, whereas
    `DTensor.from_local` would move it to the mesh's device type. `shape` is the global shape, if not `tensor`'s."""
    if not isinstance(tensor, DTensor):
        return local
    whole_size = tensor.shape if shape is None else torch.Size(shape)
    stride = torch.empty(whole_size, device="meta").stride() if shape is not None else tensor.stride()
    meta = TensorMeta(whole_size, stride, local.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_slice(tensor: Tensor) -> TensorSlice:
    """The slice of the global tensor that `local_tensor(tensor)` holds."""
    if not isinstance(tensor, DTensor):
        return whole(tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if 0 in shape:  # an empty shard: torch returns an offset past the end
        offset = (0,) * len(shape)
    return TensorSlice(tuple(offset), tuple(shape))


def whole_shape(tensor: Tensor, split: Split | None) -> tuple[int, ...]:
    """The global shape of the tensor of which `tensor` is a part."""
    return tuple(tensor.shape) if split is None else split.whole_shape(tensor.shape)


def slice_mappings(tensor: Tensor, split: Split | None) -> list[SliceMapping]:
    """The slices of the global tensor that make up `local_tensor(tensor)`; none if this rank holds nothing of it."""
    return held_slices(local_slice(tensor), split)


def held_slices(held: TensorSlice, split: Split | None) -> list[SliceMapping]:
    """The slices of the global tensor that make up the slice `held` of this rank's part of it."""
    if held.empty:
        return []
    local = whole(held.shape)
    if split is None:
        return [SliceMapping(held, local)]
    found = []
    at, dimension = 0, split.dimension
    for start, length in split.spans:
        span = TensorSlice(with_value(held.offset, dimension, at), with_value(held.shape, dimension, length))
        shared = held.overlap(span)
        if not shared.empty:
            moved = shared.offset[dimension] - at + start
            found.append(
                SliceMapping(
                    TensorSlice(with_value(shared.offset, dimension, moved), shared.shape), shared.within(held)
                )
            )
        at += length
    return found


def with_value(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """`values` with `value` at `index`."""
    return (*values[:index], value, *values[index + 1 :])


def blocks_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor with one element per block of a parameter of this shape."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))

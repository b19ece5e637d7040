"""Tables of pointers, with which one kernel launch processes many tensors. Imported only if Triton is installed.

A launch costs the host about as much for one tensor as for hundreds. Each program of a kernel looks up its tensor in
`owners`, and the pointers and sizes of that tensor in the table. Nothing is uploaded while no pointer changes, and an
upload does not wait for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# Of pointers in bytes, of sizes in elements: loads and stores of so many bytes are single instructions.
ALIGNMENT = 16
Numbers = np.ndarray[Any, np.dtype[np.int64]]
TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}


@triton.jit
def typed(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from the table."""
    pointer = address.to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@dataclass(frozen=True)
class Launch:
    """One launch, for the tensors of one kind."""

    kind: Any
    aligned: bool  # all pointers and sizes are multiples of ALIGNMENT
    owners: Tensor  # the index of the tensor of each program

    @property
    def programs(self) -> int:
        return self.owners.numel()


@dataclass(frozen=True)
class Description:
    """What kernels need to know about a list of tensors besides their pointers. Each list has an item per tensor."""

    kinds: Sequence[tuple[Any, ...]]  # tensors of one kind are processed by one launch
    programs: Sequence[int]  # how many process the tensor
    sizes: Sequence[int]
    others: Sequence[Sequence[int]] = ()  # further rows of the table


class TensorTable:
    """The table of a list of tensors on their device, and the launches that process them."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._moving: list[int] = []
        self._fixed: list[list[int]] = []
        self._dtypes: list[torch.dtype] = []
        self._rows: Numbers = np.zeros((0, 0), dtype=np.int64)
        self._kinds: list[tuple[tuple[Any, ...], int]] = []  # with the number of programs
        self._unaligned: list[bool] = []

    def refresh(self, moving: Sequence[Tensor], fixed: list[list[int]], describe: Callable[[], Description]) -> None:
        """Make the table's rows current: the pointers of `moving`, the rows `fixed`, the sizes and other rows of the
        description, which is asked for if `fixed` or the dtypes of `moving` have changed.

        `moving` are the tensors whose pointers change in most steps: gradients. Their dtype is part of the kind, as its
        first item. Tensors are in one launch if they are of one kind, and pointers and sizes are aligned for all of
        them or for none.
        """
        pointers, dtypes = pointers_of(moving), [one.dtype for one in moving]
        is_described = fixed == self._fixed and dtypes == self._dtypes
        if is_described and pointers == self._moving:
            return
        device, kinds = moving[0].device, self._kinds
        if is_described:
            self._rows[0] = pointers
        else:
            described = describe()
            self._rows = np.array([pointers, *fixed, described.sizes, *described.others], dtype=np.int64)
            together = zip(dtypes, described.kinds, described.programs, strict=True)
            kinds = [((dtype, *kind), programs) for dtype, kind, programs in together]
        self._moving, self._fixed, self._dtypes = pointers, fixed, dtypes
        self.table = _upload(self._rows, device)
        unaligned: list[bool] = np.any(self._rows[: 2 + len(fixed)] % ALIGNMENT, axis=0).tolist()
        if unaligned != self._unaligned or kinds != self._kinds:
            self._unaligned, self._kinds = unaligned, kinds
            self._make_launches(device)

    def _make_launches(self, device: torch.device) -> None:
        members: dict[tuple[tuple[Any, ...], bool], list[int]] = {}
        for index, ((kind, _), unaligned) in enumerate(zip(self._kinds, self._unaligned, strict=True)):
            members.setdefault((kind, unaligned), []).append(index)
        starts = [0] * len(self._kinds)  # the first program of each tensor
        self.launches = []
        for (kind, unaligned), indices in members.items():
            counts = [self._kinds[index][1] for index in indices]
            total = 0
            for index, count in zip(indices, counts, strict=True):
                starts[index] = total
                total += count
            if total:
                both = _upload(np.array([indices, counts], dtype=np.int64), device).int()
                owners = torch.repeat_interleave(both[0], both[1], output_size=total)
                self.launches.append(Launch(kind, not unaligned, owners))
        self.starts = _upload(np.array(starts, dtype=np.int64), device)


def pointers_of(tensors: Sequence[Tensor | None]) -> list[int]:
    return [0 if one is None else one.data_ptr() for one in tensors]


def _upload(numbers: Numbers, device: torch.device) -> Tensor:
    """The host does not wait: pinned memory is not reused by its allocator before the upload has ended."""
    found = torch.from_numpy(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.clone()

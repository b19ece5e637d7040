"""Tables of pointers, with which one kernel launch processes many tensors. Imported only if Triton is installed.

A launch costs the host about as much for one tensor as for hundreds. Each program of a kernel looks up its tensor in
`owners`, and the pointers and sizes of that tensor in the table. Nothing is uploaded while no pointer changes, and an
upload does not wait for the device.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of pointers in bytes, of sizes in elements: loads and stores of so many bytes are single instructions.
ALIGNMENT = 16
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


class TensorTable:
    """The table of a list of tensors on their device, and the launches that process them."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._pointers: list[list[int]] = []
        self._signature: object = None
        self._kinds: list[tuple[Hashable, bool, int]] = []

    def is_current(self, columns: Sequence[Sequence[Tensor | None]], signature: object = None) -> bool:
        """Whether the pointers of all `columns`, and `signature`, are those of the last call."""
        pointers = [[0 if one is None else one.data_ptr() for one in column] for column in columns]
        if pointers == self._pointers and signature == self._signature:
            return True
        self._pointers, self._signature = pointers, signature
        return False

    def renew(
        self,
        device: torch.device,
        kinds: Sequence[Hashable],
        programs: Sequence[int],
        sizes: Sequence[int],
        *others: Sequence[int],
    ) -> None:
        """Upload the pointers of the last `is_current`, then `sizes` and `others`: the rows of `table`.

        Tensors are processed by one launch if they have the same kind and `sizes` and pointers are aligned for all of
        them or for none. `programs`: how many each tensor needs.
        """
        aligning = len(self._pointers) + 1
        rows = _on_host([*self._pointers, sizes, *others], device)
        unaligned = (rows[:aligning] % ALIGNMENT).any(0).tolist()
        self.table = rows.to(device, non_blocking=True)
        full = list(zip(kinds, unaligned, programs, strict=True))
        if full != self._kinds:
            self._kinds = full
            self._make_launches(device)

    def _make_launches(self, device: torch.device) -> None:
        members: dict[tuple[Hashable, bool], list[int]] = {}
        starts, totals = [], dict.fromkeys(((kind, unaligned) for kind, unaligned, _ in self._kinds), 0)
        for index, (kind, unaligned, count) in enumerate(self._kinds):
            members.setdefault((kind, unaligned), []).append(index)
            starts.append(totals[kind, unaligned])
            totals[kind, unaligned] += count
        # The first program of each tensor.
        self.starts = _on_host(starts, device).to(device, non_blocking=True)
        self.launches = []
        for (kind, unaligned), indices in members.items():
            counts = [self._kinds[index][2] for index in indices]
            both = _on_host([indices, counts], device).to(device, non_blocking=True).int()
            owners = torch.repeat_interleave(both[0], both[1], output_size=totals[kind, unaligned])
            if owners.numel():
                self.launches.append(Launch(kind, not unaligned, owners))


def _on_host(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Pinned memory can be uploaded without a wait; its allocator does not reuse it before the upload has ended."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")

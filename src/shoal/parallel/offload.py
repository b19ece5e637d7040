"""Activation offloading: the inputs of checkpointed blocks are kept in host memory until the backward pass.

The input of a block is copied to pinned memory on a stream of its own while the block runs its forward pass, and copied
back, one block ahead, while the backward pass is in the block after it. The compute stream waits for the copy before
the memory on the device is reused, and for the copy back before the block is recomputed; the host waits for neither.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class HostBuffers:
    """Host memory that is allocated once and reused in every step: allocating pinned memory takes milliseconds."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.free: list[Tensor] = []
        self.count = 0  # of all buffers, free or not
        self.largest = 0  # bytes of the largest request

    def take(self, size: int) -> Tensor:
        """A buffer of at least `size` bytes."""
        self.largest = max(self.largest, size)
        fitting = [index for index, buffer in enumerate(self.free) if buffer.numel() >= size]
        if fitting:
            return self.free.pop(min(fitting, key=lambda index: self.free[index].numel()))
        if self.free:  # all are too small: the sequences have become longer, and one is replaced
            self.free.pop()
            self.count -= 1
        self.count += 1
        return torch.empty(self.largest, dtype=torch.uint8, pin_memory=self.pinned)

    def give_back(self, buffer: Tensor) -> None:
        """The last copy from `buffer` may still be running: the next one to it is on the same stream."""
        self.free.append(buffer)


class CopyStream:
    """Copies between device and host, all on one stream, so that they run in the order in which they are requested. On
    a CPU they run at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Start a copy behind everything that was requested of the current stream; returns the event of its end."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        copied: torch.cuda.Event = self.stream.record_event()
        return copied

    def wait(self, copied: torch.cuda.Event | None) -> None:
        """Let the current stream wait for a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(copied)


class OffloadedInput:
    """The input of one block in one micro-batch. Autograd holds this object instead of the tensor."""

    def __init__(
        self, given: Tensor, buffers: HostBuffers, copies: CopyStream, before: "OffloadedInput | None"
    ) -> None:
        """`before`: the input of the block before this one, which the backward pass needs next."""
        self.given = given.data_ptr(), given.shape, given.dtype
        self.device = given.device
        self.buffers = buffers
        self.copies = copies
        self.before = None if before is None else ref(before)
        self.buffer = buffers.take(given.nbytes)
        self.on_device: Tensor | None = given.detach()
        self.copied = copies.copy(self.on_host, self.on_device)

    @property
    def on_host(self) -> Tensor:
        _, shape, dtype = self.given
        return self.buffer[: shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def holds(self, tensor: Tensor) -> bool:
        return (tensor.data_ptr(), tensor.shape, tensor.dtype) == self.given

    def leave_device(self) -> None:
        """Free the memory on the device, once it is copied."""
        if self.on_device is not None:
            self.copies.wait(self.copied)
            self.on_device = None

    def fetch(self) -> None:
        """Start to copy it back, unless it is still on the device."""
        if self.on_device is None:
            _, shape, dtype = self.given
            self.on_device = torch.empty(shape, dtype=dtype, device=self.device)
            self.copied = self.copies.copy(self.on_device, self.on_host)

    def take(self) -> Tensor:
        """The tensor, on the device. Not held any longer afterwards, but a zero-bubble schedule takes it twice."""
        self.fetch()
        assert self.on_device is not None
        self.copies.wait(self.copied)
        tensor, self.on_device = self.on_device, None
        if self.before is not None and (before := self.before()) is not None:
            before.fetch()
        return tensor

    def __del__(self) -> None:
        if hasattr(self, "copied"):
            self.leave_device()
            self.buffers.give_back(self.buffer)


class OffloadedInputs:
    """Offloads the inputs of the blocks of a stage."""

    def __init__(self) -> None:
        self.buffers: HostBuffers | None = None
        self.copies: CopyStream | None = None
        self._newest: Callable[[], OffloadedInput | None] = lambda: None

    def saving(self, given: Tensor, *, first: bool) -> AbstractContextManager[Any]:
        """The context of a block's forward pass in which autograd saves `given` on the host. `first`: of its stage."""
        if self.buffers is None or self.copies is None:
            self.buffers, self.copies = HostBuffers(pinned=given.is_cuda), CopyStream(given.device)
        newest = self._newest()
        if newest is not None:
            newest.leave_device()
        offloaded = OffloadedInput(given, self.buffers, self.copies, None if first else newest)
        self._newest = ref(offloaded)

        def pack(tensor: Tensor) -> Tensor | OffloadedInput:
            return offloaded if offloaded.holds(tensor) else tensor

        return saved_tensors_hooks(pack, _unpack)


def _unpack(packed: Tensor | OffloadedInput) -> Tensor:
    return packed.take() if isinstance(packed, OffloadedInput) else packed

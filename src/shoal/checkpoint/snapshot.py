"""A safetensors file in the making: its header, and its bytes in order, from tensors wherever they are.

The format is safetensors' own, and its library reads the files. It is written here because the library takes a copy of
every tensor before it writes the first, and a checkpoint is to be hashed on its way to the disk.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CHUNK = 2**24
# The kernel would hold bytes back until there are many, and the sync at the end would then wait for all of them.
SYNC_EVERY = 2**27
SLAB = 2**28  # a power of two: pinned memory is only given out in such sizes


@dataclass(frozen=True)
class Snapshot:
    """What a file will hold."""

    header: bytes
    tensors: tuple[Tensor, ...]  # in the order of the file

    def chunks(self) -> Iterator[memoryview]:
        """The file's bytes, each tensor brought to the host when it is its turn."""
        yield memoryview(self.header)
        for tensor in self.tensors:
            held = _bytes_of(tensor).cpu()
            for begin in range(0, len(held), CHUNK):
                yield _view(held[begin : begin + CHUNK])


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Snapshot:
    """The file of these tensors. Wide types come first, so that every tensor is aligned for those who map the file."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Snapshot(len(text).to_bytes(8, "little") + text, tuple(tensors[name] for name in order))


class HostCopy:
    """A copy of an image on the host, so that training may change the tensors while it is written.

    On CUDA the copies wait in the device's stream like any other work, and the host goes on; `chunks` waits for them.
    The memory is kept for the next image.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slabs: list[Tensor] = []
        self._size = 0
        self._header = b""
        self._copied: torch.cuda.Event | None = None

    def take(self, image: Snapshot) -> None:
        """Copy the image as it is now."""
        self._header = image.header
        self._size = sum(tensor.numel() * tensor.element_size() for tensor in image.tensors)
        self._make_room()
        at = 0
        for tensor in image.tensors:
            held = _bytes_of(tensor)
            taken = 0
            while taken < len(held):
                slab, place = self._slabs[at // SLAB], at % SLAB
                count = min(len(held) - taken, len(slab) - place)
                slab[place : place + count].copy_(held[taken : taken + count], non_blocking=True)
                taken, at = taken + count, at + count
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self.device))

    def chunks(self) -> Iterator[memoryview]:
        """The file's bytes."""
        if self._copied is not None:
            self._copied.synchronize()
        yield memoryview(self._header)
        for begin in range(0, self._size, CHUNK):
            slab, place = self._slabs[begin // SLAB], begin % SLAB
            count = min(CHUNK, self._size - begin)
            yield _view(slab[place : place + count])

    def _make_room(self) -> None:
        pinned = self.device.type == "cuda"
        while (room := sum(map(len, self._slabs))) < self._size:
            missing = self._size - room
            # Only the last slab may be smaller: places are found by dividing by the size.
            if self._slabs and len(self._slabs[-1]) < SLAB:
                self._slabs.pop()
                continue
            size = min(SLAB, 1 << (missing - 1).bit_length())
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))


def write_snapshot(path: Path, chunks: Iterable[memoryview]) -> dict[str, Any]:
    """Write the bytes and make sure that the disk has them; returns size and hash, as a manifest lists them.

    Hashing and writing both leave the interpreter free, and go on side by side.
    """
    digest, size, unsynced = hashlib.sha256(), 0, 0
    hashing: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="shoal-hash") as pool, path.open("wb", buffering=0) as file:
        for chunk in chunks:
            hashing.append(pool.submit(digest.update, chunk))
            written = 0
            while written < len(chunk):
                written += file.write(chunk[written:])
            size, unsynced = size + len(chunk), unsynced + len(chunk)
            if unsynced >= SYNC_EVERY:
                os.fdatasync(file.fileno())
                unsynced = 0
            while len(hashing) > 4:  # no more than a few chunks are kept waiting in memory
                hashing.popleft().result()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _view(held: Tensor) -> memoryview:
    return memoryview(held.numpy())  # type: ignore[arg-type]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

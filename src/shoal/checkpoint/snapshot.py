"""Snapshots of tensors, written as safetensors files.

The files are read with the safetensors library. They are written here because the library copies every tensor before it
writes the first, and because checkpoints are hashed while they are written.
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
# Otherwise the page cache would fill with dirty pages, and the fsync at the end would wait for all of them.
SYNC_EVERY = 2**27
SLAB = 2**28  # a power of two: PyTorch rounds pinned allocations up to one


@dataclass(frozen=True)
class Snapshot:
    """The header and the tensors of a safetensors file."""

    header: bytes
    tensors: tuple[Tensor, ...]  # in file order

    def chunks(self) -> Iterator[memoryview]:
        """Yield the file's bytes. Each tensor is copied to the host when it is reached."""
        yield memoryview(self.header)
        for tensor in self.tensors:
            held = _bytes_of(tensor).cpu()
            for begin in range(0, len(held), CHUNK):
                yield _view(held[begin : begin + CHUNK])


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Snapshot:
    """Lay out a file of these tensors. Wider dtypes come first, so that every tensor is aligned in a memory map."""
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
    """A copy of a snapshot in host memory, so that training may change the tensors while it is written.

    On CUDA the copies are asynchronous, in the current stream; `chunks` waits for them. The memory is reused for the
    next snapshot.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slabs: list[Tensor] = []
        self._size = 0
        self._header = b""
        self._copied: torch.cuda.Event | None = None

    def take(self, snapshot: Snapshot) -> None:
        """Copy the current values of the snapshot's tensors."""
        self._header = snapshot.header
        self._size = sum(tensor.numel() * tensor.element_size() for tensor in snapshot.tensors)
        self._allocate()
        position = 0
        for tensor in snapshot.tensors:
            source = _bytes_of(tensor)
            copied = 0
            while copied < len(source):
                slab, offset = self._slabs[position // SLAB], position % SLAB
                count = min(len(source) - copied, len(slab) - offset)
                slab[offset : offset + count].copy_(source[copied : copied + count], non_blocking=True)
                copied, position = copied + count, position + count
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self.device))

    def chunks(self) -> Iterator[memoryview]:
        """Yield the file's bytes."""
        if self._copied is not None:
            self._copied.synchronize()
        yield memoryview(self._header)
        for begin in range(0, self._size, CHUNK):
            slab, offset = self._slabs[begin // SLAB], begin % SLAB
            count = min(CHUNK, self._size - begin)
            yield _view(slab[offset : offset + count])

    def _allocate(self) -> None:
        pinned = self.device.type == "cuda"
        while (capacity := sum(map(len, self._slabs))) < self._size:
            missing = self._size - capacity
            # Only the last slab may be smaller than SLAB: a slab's index is the position divided by SLAB.
            if self._slabs and len(self._slabs[-1]) < SLAB:
                self._slabs.pop()
                continue
            size = min(SLAB, 1 << (missing - 1).bit_length())
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))


def write_snapshot(path: Path, chunks: Iterable[memoryview]) -> dict[str, Any]:
    """Write the bytes and fsync; return size and hash as the manifest lists them.

    Hashing and writing both release the GIL and run in parallel.
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
            while len(hashing) > 4:  # bounds the memory of chunks that are not hashed yet
                hashing.popleft().result()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}


def _view(held: Tensor) -> memoryview:
    return memoryview(held.numpy())  # type: ignore[arg-type]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

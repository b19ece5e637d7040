"""Optimizer state offloaded to host memory or to files on NVMe.

The update itself runs on the device: the state of a few parameters at a time is copied there and back.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.config.schema import OffloadConfig
from shoal.mistakes import RunFailed, UserMistake
from shoal.models.tensor_slices import local_tensor, placed_like
from shoal.parallel.collectives import in_buckets
from shoal.paths import user_path

# Elements of the parameters whose state is on the device at the same time.
BUCKET = 1 << 26


def buckets(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Group parameters into buckets of bounded size, the same on every rank: Muon has collectives for each bucket."""
    groups = in_buckets(parameters.items(), lambda item: _largest_shard(item[1]), BUCKET)
    return [dict(group) for group in groups]


def _largest_shard(parameter: Tensor) -> int:
    """The elements of the first rank's shard, the largest."""
    if not isinstance(parameter, DTensor) or not parameter.numel():
        return parameter.numel()
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    shards = math.prod(size for size, placement in sizes if placement.is_shard())
    rows = parameter.shape[0]
    return -(-rows // shards) * (parameter.numel() // rows)


class Store:
    """Storage of optimizer state between steps. `folder` None: host memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None and not folder.is_dir():
            raise UserMistake(f"parallel.offload: {folder} is not a folder; create it, on the disk for the state.")

    def empty_like(self, tensor: Tensor) -> Tensor:
        """An uninitialized tensor in this storage, with the shape, dtype and placement of `tensor`."""
        local = local_tensor(tensor)
        if self.folder is None:
            kept = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
        elif local.numel() == 0:
            kept = torch.empty(local.shape, dtype=local.dtype)
        else:
            kept = self._mapped(local)
        return placed_like(kept, tensor)

    def _mapped(self, local: Tensor) -> Tensor:
        try:
            file, name = tempfile.mkstemp(prefix="shoal-", suffix=".state", dir=self.folder)
        except OSError as error:
            raise RunFailed(f"parallel.offload: {self.folder} cannot be written: {error.strerror}.") from None
        os.close(file)
        mapped = torch.from_file(name, shared=True, size=local.numel(), dtype=local.dtype)
        # The mapping keeps the file alive; unlinked, it is removed when the process ends, however that happens.
        os.unlink(name)
        return mapped.view(local.shape)


class OffloadedState:
    """Keeps the state of optimizers in a store, except during their steps."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @contextmanager
    def on_device(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Copy the optimizer's state to its parameters' device, and back at the end."""
        kept: dict[Tensor, dict[str, Tensor]] = {}
        for parameter, fields in optimizer.state.items():
            kept[parameter] = {name: value for name, value in fields.items() if value.dim()}
            for name, value in kept[parameter].items():
                fields[name] = _moved(value, local_tensor(parameter).device)
        yield
        for parameter, fields in optimizer.state.items():
            for name, value in fields.items():
                if not value.dim():
                    continue
                stored = kept.get(parameter, {}).get(name)
                if stored is None:  # created in the first step
                    stored = self.store.empty_like(value)
                held, used = local_tensor(stored), local_tensor(value)
                if held.data_ptr() != used.data_ptr():
                    held.copy_(used, non_blocking=True)
                fields[name] = stored
        if torch.cuda.is_available():
            # Memory that the next bucket frees on the device may still be copied to the host.
            torch.cuda.current_stream().synchronize()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return placed_like(local_tensor(tensor).to(device, non_blocking=True), tensor)


def find_store(offload: str | OffloadConfig) -> Store | None:
    """The store for `parallel.offload`, if only the optimizer state is offloaded."""
    if isinstance(offload, OffloadConfig):
        return Store(user_path(offload.path, "parallel.offload.path") if offload.path is not None else None)
    return Store(None) if offload == "optimizer" else None

"""Optimizer state outside the device: in the host's memory, or in files on a fast disk.

The update itself stays on the device: the state of a few parameters at a time is brought there and back.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.config.schema import OffloadConfig
from shoal.mistakes import UserMistake
from shoal.models.tensor_slices import local_tensor, placed_like
from shoal.parallel.buckets import in_buckets

# Parameters whose state is on the device at the same time have about so many numbers.
BUCKET = 1 << 26


def buckets(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """The parameters in groups whose state fits on the device together."""
    groups = in_buckets(parameters.items(), lambda item: local_tensor(item[1]).numel(), BUCKET)
    return [dict(group) for group in groups]


class Store:
    """Where state is kept between steps. `folder` None: the host's memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None and not folder.is_dir():
            raise UserMistake(f"parallel.offload: {folder} is not a folder; make it, on the disk the state is for.")

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Memory of the store's, of the same shape, type and placement as `tensor`."""
        local = local_tensor(tensor)
        if self.folder is None:
            kept = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
        elif local.numel() == 0:
            kept = torch.empty(local.shape, dtype=local.dtype)
        else:
            kept = self._mapped(local)
        return placed_like(kept, tensor)

    def _mapped(self, local: Tensor) -> Tensor:
        file, name = tempfile.mkstemp(prefix="shoal-", suffix=".state", dir=self.folder)
        os.close(file)
        mapped = torch.from_file(name, shared=True, size=local.numel(), dtype=local.dtype)
        # The mapping keeps the file alive; without a name it vanishes with the process, however that ends.
        os.unlink(name)
        return mapped.view(local.shape)


class OffloadedState:
    """Keeps the state of torch optimizers in a store, but while they step."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @contextmanager
    def on_device(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Bring the optimizer's state to its parameters' device, and put it back at the end."""
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
                place = kept.get(parameter, {}).get(name)
                if place is None:  # the first step has made it
                    place = self.store.empty_like(value)
                held, used = local_tensor(place), local_tensor(value)
                if held.data_ptr() != used.data_ptr():
                    held.copy_(used, non_blocking=True)
                fields[name] = place
        if torch.cuda.is_available():
            # What the next bucket frees on the device may still be on its way to the host.
            torch.cuda.current_stream().synchronize()


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return placed_like(local_tensor(tensor).to(device, non_blocking=True), tensor)


def find_store(offload: str | OffloadConfig) -> Store | None:
    """The store that `parallel.offload` names, if it is one for the optimizer's state alone."""
    if isinstance(offload, OffloadConfig):
        return Store(Path(offload.path).expanduser() if offload.path is not None else None)
    return Store(None) if offload == "optimizer" else None

"""The contents of a checkpoint: collecting the state of a run, and loading it back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from shoal.checkpoint import store
from shoal.checkpoint.layout import Part, SliceReader, parts_to_write
from shoal.mistakes import UserMistake
from shoal.models.tensor_slices import slice_mappings
from shoal.parallel.placement import Placement
from shoal.parallel.ranks import Ranks

MODEL, OPTIMIZER, CONTROL = "model.", "optimizer.", "control."
PROGRESS, CONFIG = "progress.json", "config.json"
LARGEST_POSITION = 2**62  # no run has as many positions


@dataclass
class Progress:
    """The training progress: all state that is not a tensor.

    The data order is a function of the step, so the data loader has no state, unless data is streamed.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # for reading it back

    step: int = 0
    tokens: int = 0  # with prompts, without padding
    loss_tokens: int = 0
    skipped: int = 0  # steps without an update, because of non-finite gradients
    loss: float | None = None  # of the last logged step
    best: float | None = None
    evaluations_without_gain: int = 0
    world_size: int = 1
    optimizer: str = ""
    data: dict[str, dict[str, int | str]] = field(default_factory=dict)  # set → what tells whether it has changed
    bad_steps: list[int] = field(default_factory=list)  # the latest consecutive steps with a non-finite loss
    losses: dict[str, float] = field(default_factory=dict)  # their mean and variance, to detect spikes
    left_out: list[tuple[int, int]] = field(default_factory=list)  # spans of the data order that are skipped
    evaluated_at: int | None = None
    eval_loss: float | None = None  # of the last evaluation
    stream: list[dict[str, int]] = field(default_factory=list)  # where each streamed source continues
    metrics: dict[str, float] = field(default_factory=dict)  # of this step, for choosing the best checkpoints
    interval: dict[str, float] = field(default_factory=dict)  # of checkpoint.every auto: train/save_interval.py
    schedule: dict[str, Any] = field(default_factory=dict)  # of a custom loop: its schedule and parameter groups


class StatefulOptimizer(Protocol):
    def state(self) -> dict[str, Tensor]: ...

    def empty_state(self, stored: Mapping[str, tuple[int, ...]], placement: Placement) -> dict[str, Tensor]: ...


class Stateful(Protocol):
    """Small state that is replicated on every rank."""

    def state(self) -> dict[str, Tensor]: ...

    def load(self, state: dict[str, Tensor]) -> None: ...


def collect(
    *,
    tensors: Mapping[str, Tensor],
    placement: Placement,
    optimizer: StatefulOptimizer,
    controls: Mapping[str, Stateful],
    ranks: Ranks,
) -> dict[str, Part]:
    """Return this rank's part of the checkpoint's tensors. The tensors are not copied."""
    # Each with the name of the parameter whose sharding it has, if any.
    everything: dict[str, tuple[Tensor, str | None]] = {
        **{MODEL + name: (tensor, name) for name, tensor in tensors.items()},
        **{OPTIMIZER + key: (tensor, _parameter(key)) for key, tensor in optimizer.state().items()},
        **{
            f"{CONTROL}{owner}.{name}": (tensor, None)
            for owner, control in controls.items()
            for name, tensor in control.state().items()
        },
    }
    parts = parts_to_write(everything, placement)
    for name, tensor in _random_state(ranks.device).items():
        shape = tuple(tensor.shape)
        parts[_random_key(ranks.rank) + name] = Part(tensor, slice_mappings(tensor, None), shape)
    return parts


def load(
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    placement: Placement,
    optimizer: StatefulOptimizer,
    controls: Mapping[str, Stateful],
    ranks: Ranks,
) -> Progress:
    """Load a complete checkpoint into a run, with any world size."""
    reader = SliceReader(folder)
    load_parameters(reader, tensors, placement)
    for key, tensor in optimizer.empty_state(reader.shapes(OPTIMIZER), placement).items():
        reader.read_into(OPTIMIZER + key, tensor, placement.slice_mappings(_parameter(key), tensor))
    for owner, control in controls.items():
        prefix = f"{CONTROL}{owner}."
        control.load({name: reader.read_whole(prefix + name) for name in reader.shapes(prefix)})
    progress = read_progress(folder)
    if progress.world_size == ranks.world_size:
        own = _random_key(ranks.rank)
        if "cpu" not in reader.shapes(own):
            raise UserMistake(f"{folder} is damaged: the RNG state of rank {ranks.rank} is missing.")
        _restore_random_state({name: reader.read_whole(own + name) for name in reader.shapes(own)}, ranks.device)
    progress.world_size = ranks.world_size
    return progress


def read_progress(folder: Path) -> Progress:
    """Read the training progress that this checkpoint was saved with."""
    try:
        progress = TypeAdapter(Progress).validate_json((folder / PROGRESS).read_bytes(), strict=True)
        # The folder's name, the manifest and the progress must agree.
        if store.step_of(folder) not in (None, progress.step):
            raise ValueError
        if any(min(span) < 0 or max(span) >= LARGEST_POSITION for span in progress.left_out):
            raise ValueError
        return progress
    except (OSError, ValueError):
        raise UserMistake(f"{folder / PROGRESS} is damaged: it is not a valid progress file.") from None


def load_parameters(reader: SliceReader, tensors: Mapping[str, Tensor], placement: Placement | None = None) -> None:
    """Load a model's parameters and buffers from a checkpoint; with `placement`, this rank's shards of them."""
    folder, stored = reader.folder, reader.shapes(MODEL)
    wanted = {name: tuple(one.shape) for name, one in tensors.items()} if placement is None else placement.shapes
    if different := sorted(set(stored) ^ set(wanted)):
        raise UserMistake(f"{folder} was saved from another model: only one of the two has the tensor {different[0]}.")
    for name, shape in wanted.items():
        if stored[name] != shape:
            raise UserMistake(f"{folder} holds {name} with shape {stored[name]}, but the model has {shape}.")
    for name, tensor in tensors.items():
        held = slice_mappings(tensor, None) if placement is None else placement.slice_mappings(name, tensor)
        reader.read_into(MODEL + name, tensor, held)


def _parameter(key: str) -> str:
    """Return the name of the parameter from the key of an optimizer state, 'field.parameter name'."""
    return key.partition(".")[2]


def newest(
    folders: Sequence[Path],
    ranks: Ranks,
    warn: Callable[[str], None] = lambda _: None,
    *,
    before: int | None = None,
) -> Path | None:
    """Return the newest undamaged checkpoint in `folders`, of a step less than `before` if given.

    Damaged checkpoints are reported to `warn`. Rank 0 lists the folders and broadcasts the candidates; the hashing is
    split among the ranks.
    """
    found = [one for folder in folders for one in store.list_complete(folder)] if ranks.first else []
    found = sorted((one for one in found if before is None or one.step < before), key=lambda one: one.step)
    newest_complete = found[-1].step if found else -1
    for step, file in (one for folder in folders for one in store.list_broken(folder)) if ranks.first else ():
        if newest_complete < step and (before is None or step < before):
            warn(f"{file} is damaged: it is missing, or its size has changed. Looking for an older checkpoint.")
    while path := ranks.broadcast(str(found.pop().path) if found else ""):
        damaged = find_damage(Path(path), ranks)
        if damaged is None:
            return Path(path)
        warn(f"{damaged} is damaged: its hash does not match. Looking for an older checkpoint.")
    return None


def find_damage(folder: Path, ranks: Ranks) -> Path | None:
    """Return the first damaged file of a checkpoint. Each rank hashes its share of the files."""
    checkpoint = store.read_manifest(folder)
    names = [] if checkpoint is None else sorted(checkpoint.files)
    mine = names[ranks.rank :: ranks.world_size]
    damaged = None if checkpoint is None else store.damaged_file(checkpoint, mine)
    index = math.inf if damaged is None else names.index(damaged)
    index = ranks.smallest(-1 if checkpoint is None else index)
    if index == math.inf:
        return None
    return folder / (store.MANIFEST if index < 0 else names[int(index)])


def _random_key(rank: int) -> str:
    return f"random.{rank:05d}."


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

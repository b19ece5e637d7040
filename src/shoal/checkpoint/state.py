"""What a checkpoint is made of, and how it gets out of a run and back into one."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.checkpoint import store
from shoal.checkpoint.layout import PieceReader, parts_to_write, write_pieces
from shoal.mistakes import UserMistake
from shoal.models.pieces import pieces
from shoal.parallel.placement import Placement
from shoal.parallel.ranks import Ranks

MODEL, OPTIMIZER, SCALER = "model.", "optimizer.", "scaler."


@dataclass
class Progress:
    """How far a run is: everything that is not a tensor. Rows follow from the step, so no loader has state."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0  # steps that changed nothing, because a number was not finite
    loss: float | None = None  # of the last line
    best: float | None = None
    evaluations_without_gain: int = 0
    world_size: int = 1
    optimizer: str = ""
    data: dict[str, int] = field(default_factory=dict)  # what the rows were made from, to notice that it changed
    evaluated_at: int | None = None
    eval_loss: float | None = None  # of the last evaluation
    metrics: dict[str, float] = field(default_factory=dict)  # of this step, for choosing the best checkpoints


class StatefulOptimizer(Protocol):
    def state(self) -> dict[str, Tensor]: ...

    def empty_state(self, stored: Mapping[str, tuple[int, ...]], placement: Placement) -> dict[str, Tensor]: ...


class StatefulScaler(Protocol):
    def state(self) -> dict[str, Tensor]: ...

    def load(self, state: dict[str, Tensor]) -> None: ...


def save(
    checkpoints: Path,
    *,
    tensors: Mapping[str, Tensor],
    placement: Placement,
    optimizer: StatefulOptimizer,
    scaler: StatefulScaler,
    progress: Progress,
    ranks: Ranks,
) -> store.Checkpoint | None:
    """Write a checkpoint together with all ranks. Rank 0 gets it back, once it is whole."""
    folder = store.folder_for(checkpoints, progress.step)
    if ranks.first:
        store.begin(checkpoints, progress.step)
    ranks.barrier()
    # Each with the parameter that it lies like, if there is one.
    everything: dict[str, tuple[Tensor, str | None]] = {
        **{MODEL + name: (tensor, name) for name, tensor in tensors.items()},
        **{OPTIMIZER + key: (tensor, _parameter(key)) for key, tensor in optimizer.state().items()},
        **{SCALER + name: (tensor, None) for name, tensor in scaler.state().items()},
    }
    written = write_pieces(folder, parts_to_write(everything, placement), ranks.rank)
    random = folder / f"random-{ranks.rank:05d}.safetensors"
    save_file(_random_state(ranks.device), random)
    written.append(random)
    if ranks.first:
        place = folder / "progress.json"
        place.write_text(json.dumps(asdict(progress)))
        written.append(place)
    # Each rank hashes what it wrote; the list stays out of the manifest, which takes its contents over.
    hashes = folder / f"hashes-{ranks.rank:05d}.json"
    hashes.write_text(json.dumps({path.name: store.describe(path) for path in written}))
    ranks.barrier()
    if not ranks.first:
        return None
    files = {}
    for listing in sorted(folder.glob("hashes-*.json")):
        files.update(json.loads(listing.read_text()))
        listing.unlink()
    return store.finish(folder, progress.step, files, progress.metrics)


def load(
    folder: Path,
    *,
    tensors: Mapping[str, Tensor],
    placement: Placement,
    optimizer: StatefulOptimizer,
    scaler: StatefulScaler,
    ranks: Ranks,
) -> Progress:
    """Fill a run from a whole checkpoint, on any number of ranks."""
    reader = PieceReader(folder)
    load_parameters(reader, tensors, placement)
    for key, tensor in optimizer.empty_state(reader.shapes(OPTIMIZER), placement).items():
        reader.read_into(OPTIMIZER + key, tensor, placement.pieces(_parameter(key), tensor))
    scaler.load({name: reader.read_whole(SCALER + name) for name in reader.shapes(SCALER)})
    progress = read_progress(folder)
    if progress.world_size == ranks.world_size:
        _restore_random_state(load_file(folder / f"random-{ranks.rank:05d}.safetensors"), ranks.device)
    progress.world_size = ranks.world_size
    return progress


def read_progress(folder: Path) -> Progress:
    """How far the run was when it wrote this checkpoint."""
    return Progress(**json.loads((folder / "progress.json").read_text()))


def load_parameters(reader: PieceReader, tensors: Mapping[str, Tensor], placement: Placement | None = None) -> None:
    """Fill a model's parameters, and buffers, from a checkpoint; with `placement`, this rank's parts of them."""
    folder, stored = reader.folder, reader.shapes(MODEL)
    wanted = {name: tuple(one.shape) for name, one in tensors.items()} if placement is None else placement.shapes
    if different := sorted(set(stored) ^ set(wanted)):
        raise UserMistake(f"{folder} was saved from another model: only one of the two has {different[0]}.")
    for name, shape in wanted.items():
        if stored[name] != shape:
            raise UserMistake(f"{folder} holds {name} as {stored[name]}, but the model has {shape}.")
    for name, tensor in tensors.items():
        held = pieces(tensor, None) if placement is None else placement.pieces(name, tensor)
        reader.read_into(MODEL + name, tensor, held)


def _parameter(key: str) -> str:
    """The parameter that an optimizer's state 'field.parameter name' belongs to."""
    return key.partition(".")[2]


def newest(checkpoints: Path, ranks: Ranks) -> Path | None:
    """The newest checkpoint that is whole and undamaged. Rank 0 looks; the others are told."""
    step = -1.0
    if ranks.first:
        for one in reversed(store.list_whole(checkpoints)):
            if store.damaged_file(one) is None:
                step = one.step
                break
    step = ranks.largest(step)
    return None if step < 0 else store.folder_for(checkpoints, int(step))


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

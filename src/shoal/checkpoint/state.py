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
from shoal.checkpoint.layout import PieceReader, own_pieces, write_pieces
from shoal.mistakes import UserMistake
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

    def empty_state(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]: ...


class StatefulScaler(Protocol):
    def state(self) -> dict[str, Tensor]: ...

    def load(self, state: dict[str, Tensor]) -> None: ...


def save(
    checkpoints: Path,
    *,
    parameters: Mapping[str, Tensor],
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
    tensors = {
        **{MODEL + name: tensor for name, tensor in parameters.items()},
        **{OPTIMIZER + name: tensor for name, tensor in optimizer.state().items()},
        **{SCALER + name: tensor for name, tensor in scaler.state().items()},
    }
    written = write_pieces(folder, own_pieces(tensors, ranks.rank, ranks.world_size), ranks.rank)
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
    parameters: Mapping[str, Tensor],
    optimizer: StatefulOptimizer,
    scaler: StatefulScaler,
    ranks: Ranks,
) -> Progress:
    """Fill a run from a whole checkpoint, on any number of ranks."""
    reader = PieceReader(folder)
    load_parameters(reader, parameters)
    for name, tensor in optimizer.empty_state(reader.shapes(OPTIMIZER)).items():
        reader.read_into(OPTIMIZER + name, tensor)
    scaler.load({name: reader.read_whole(SCALER + name) for name in reader.shapes(SCALER)})
    progress = read_progress(folder)
    if progress.world_size == ranks.world_size:
        _restore_random_state(load_file(folder / f"random-{ranks.rank:05d}.safetensors"), ranks.device)
    progress.world_size = ranks.world_size
    return progress


def read_progress(folder: Path) -> Progress:
    """How far the run was when it wrote this checkpoint."""
    return Progress(**json.loads((folder / "progress.json").read_text()))


def load_parameters(reader: PieceReader, parameters: Mapping[str, Tensor]) -> None:
    """Fill a model's parameters, or this rank's parts of them, from a checkpoint."""
    folder, stored = reader.folder, reader.shapes(MODEL)
    if different := sorted(set(stored) ^ set(parameters)):
        raise UserMistake(f"{folder} was saved from another model: only one of the two has {different[0]}.")
    for name, parameter in parameters.items():
        if stored[name] != tuple(parameter.shape):
            raise UserMistake(f"{folder} holds {name} as {stored[name]}, but the model has {tuple(parameter.shape)}.")
        reader.read_into(MODEL + name, parameter)


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

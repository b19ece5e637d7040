"""What a checkpoint is made of, and how it gets out of a run and back into one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from shoal.checkpoint import store
from shoal.checkpoint.layout import Part, SliceReader, parts_to_write
from shoal.mistakes import UserMistake
from shoal.models.tensor_slices import pieces
from shoal.parallel.placement import Placement
from shoal.parallel.ranks import Ranks

MODEL, OPTIMIZER, CONTROL = "model.", "optimizer.", "control."
PROGRESS, CONFIG = "progress.json", "config.json"
FARTHEST = 2**62  # no run has as many positions


@dataclass
class Progress:
    """How far a run is: everything that is not a tensor. Rows follow from the step, so no loader has state."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # for reading it back

    step: int = 0
    tokens: int = 0
    skipped: int = 0  # steps that changed nothing, because a number was not finite
    loss: float | None = None  # of the last line
    best: float | None = None
    evaluations_without_gain: int = 0
    world_size: int = 1
    optimizer: str = ""
    data: dict[str, int] = field(default_factory=dict)  # what the rows were made from, to notice that it changed
    bad_steps: list[int] = field(default_factory=list)  # the last ones, in a row, that were not numbers
    left_out: list[tuple[int, int]] = field(default_factory=list)  # positions of the order that are stepped over
    evaluated_at: int | None = None
    eval_loss: float | None = None  # of the last evaluation
    metrics: dict[str, float] = field(default_factory=dict)  # of this step, for choosing the best checkpoints


class StatefulOptimizer(Protocol):
    def state(self) -> dict[str, Tensor]: ...

    def empty_state(self, stored: Mapping[str, tuple[int, ...]], placement: Placement) -> dict[str, Tensor]: ...


class Stateful(Protocol):
    """A few numbers that every rank has alike."""

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
    """This rank's share of all the tensors that a checkpoint holds: the tensors themselves, not copies."""
    # Each with the parameter that it lies like, if there is one.
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
        parts[_random_key(ranks.rank) + name] = Part(tensor, pieces(tensor, None), shape)
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
    """Fill a run from a whole checkpoint, on any number of ranks."""
    reader = SliceReader(folder)
    load_parameters(reader, tensors, placement)
    for key, tensor in optimizer.empty_state(reader.shapes(OPTIMIZER), placement).items():
        reader.read_into(OPTIMIZER + key, tensor, placement.pieces(_parameter(key), tensor))
    for owner, control in controls.items():
        prefix = f"{CONTROL}{owner}."
        control.load({name: reader.read_whole(prefix + name) for name in reader.shapes(prefix)})
    progress = read_progress(folder)
    if progress.world_size == ranks.world_size:
        own = _random_key(ranks.rank)
        if "cpu" not in reader.shapes(own):
            raise UserMistake(f"{folder} is damaged: it lacks the random state of rank {ranks.rank}.")
        _restore_random_state({name: reader.read_whole(own + name) for name in reader.shapes(own)}, ranks.device)
    progress.world_size = ranks.world_size
    return progress


def read_progress(folder: Path) -> Progress:
    """How far the run was when it wrote this checkpoint."""
    try:
        progress = TypeAdapter(Progress).validate_json((folder / PROGRESS).read_bytes(), strict=True)
        # What the folder's name says is also what the manifest says.
        if store.step_of(folder) not in (None, progress.step):
            raise ValueError
        if any(min(span) < 0 or max(span) >= FARTHEST for span in progress.left_out):
            raise ValueError
        return progress
    except (OSError, ValueError):
        raise UserMistake(f"{folder / PROGRESS} is damaged: it does not say how far the run was.") from None


def load_parameters(reader: SliceReader, tensors: Mapping[str, Tensor], placement: Placement | None = None) -> None:
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


def newest(
    places: Sequence[Path],
    ranks: Ranks,
    warn: Callable[[str], None] = lambda _: None,
    *,
    before: int | None = None,
) -> Path | None:
    """The newest checkpoint in any of `places` that is whole and undamaged, and of a step `before` that one, if it is
    given; what is damaged is named.

    Rank 0 lists them and the others are told; hashing is shared.
    """
    found = [one for place in places for one in store.list_whole(place)] if ranks.first else []
    found = sorted((one for one in found if before is None or one.step < before), key=lambda one: one.step)
    newest_whole = found[-1].step if found else -1
    for step, file in (one for place in places for one in store.list_broken(place)) if ranks.first else ():
        if newest_whole < step and (before is None or step < before):
            warn(
                f"{file} is damaged: it is missing, or not as long as what was saved. Looking for an older checkpoint."
            )
    while path := ranks.told(str(found.pop().path) if found else ""):
        damaged = find_damage(Path(path), ranks)
        if damaged is None:
            return Path(path)
        warn(f"{damaged} is damaged: it is not what was saved. Looking for an older checkpoint.")
    return None


def find_damage(folder: Path, ranks: Ranks) -> Path | None:
    """The first file of a checkpoint that is not what was saved. Each rank hashes its share of the files."""
    checkpoint = store.read_manifest(folder)
    names = [] if checkpoint is None else sorted(checkpoint.files)
    mine = names[ranks.rank :: ranks.world_size]
    damaged = None if checkpoint is None else store.damaged_file(checkpoint, mine)
    place = math.inf if damaged is None else names.index(damaged)
    place = ranks.smallest(-1 if checkpoint is None else place)
    if place == math.inf:
        return None
    return folder / (store.MANIFEST if place < 0 else names[int(place)])


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

"""The base of an adapter: a run records which weights its adapter was trained on, and checks that they are the same.

An adapter on other weights computes something else, and nothing else would show it. Files are identified by their
headers and by samples of each tensor's bytes: training changes nearly every byte, and 16 GB need not be hashed.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.files import write_atomically
from shoal.mistakes import UserMistake
from shoal.models.hub import local_folder
from shoal.models.new_rows import NewRows
from shoal.models.prepare import PreparedModel, prepare_model, read_blueprint
from shoal.models.stored import open_folder
from shoal.models.weights import Weights

# Of each tensor: this many samples of so many bytes, evenly spaced from its first to its last byte.
SAMPLES, SAMPLE_BYTES = 4, 1024
LONGEST_HEADER = 100_000_000  # as in safetensors itself


@dataclass(frozen=True)
class Base:
    """The frozen model of an adapter: the weights in a folder, or else those drawn from a seed."""

    folder: str | None
    fingerprint: str | None  # of the files in the folder
    seed: int | None = None
    device: str | None = None  # the type of the device that drew the weights: each type draws other values
    new_rows: NewRows | None = None  # of added tokens

    def write(self, file: Path) -> None:
        write_atomically(file, json.dumps(asdict(self), indent=2) + "\n")

    def weights(self, prepared: PreparedModel) -> Weights:
        """The values of the base's parameters."""
        if self.folder is not None:
            return Weights(Path(self.folder), 0, prepared.new_rows)
        assert self.seed is not None
        return Weights(None, self.seed)


def describe_base(prepared: PreparedModel, *, seed: int, device: torch.device) -> Base:
    """The base of an adapter that is about to be trained on `prepared`."""
    new_rows = next(iter(prepared.new_rows.values()), None)
    if prepared.folder is None:
        return Base(None, None, seed=seed, device=device.type, new_rows=new_rows)
    return Base(str(prepared.folder.resolve()), fingerprint(prepared.folder), new_rows=new_rows)


def read_base(run: RunDirectory) -> Base | None:
    """What `run` recorded of its base, or None."""
    try:
        values = json.loads(run.base.read_text())
        rows = values.pop("new_rows")
        new_rows = None if rows is None else NewRows(tuple(rows["indices"]), int(rows["known"]), int(rows["beyond"]))
        found = Base(**values, new_rows=new_rows)
        if (found.folder is None) == (found.seed is None):
            raise ValueError
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise UserMistake(f"{run.base} is damaged: it does not say which base model the adapter belongs to.") from None


def find_base(run: RunDirectory, config: Config) -> Base:
    """The base of the adapter of `run`, with the folder where it is now. A UserMistake if it is gone or has changed."""
    recorded = read_base(run)
    if recorded is None:
        raise UserMistake(f"{run.base} is missing, so it is not known which base model the adapter belongs to.")
    if recorded.folder is None:
        return recorded
    folder = Path(recorded.folder)
    if not (folder / "config.json").is_file():
        try:
            folder = local_folder(config.model.from_ or "", "model.from")  # a cache may have moved
        except UserMistake:
            raise UserMistake(
                f"{run.path} is an adapter, and its base model in {folder} is gone; restore it, or write the folder "
                f"where it is now into {run.base}."
            ) from None
    check_same(recorded, folder, run)
    return replace(recorded, folder=str(folder))


def check_same(recorded: Base, folder: Path, run: RunDirectory) -> None:
    """A UserMistake if the weights in `folder` are not those on which the adapter of `run` was trained."""
    if recorded.fingerprint != fingerprint(folder):
        raise UserMistake(
            f"The weights in {folder} are not those on which the adapter of {run.path} was trained: their fingerprint "
            f"is not the one in {run.base}; restore the original base model there."
        )


def check_resumed_base(run: RunDirectory, folder: Path | None) -> None:
    """A UserMistake if `run` would resume its adapter on another base than it was started with."""
    recorded = read_base(run)
    if recorded is not None and folder is not None:
        check_same(recorded, folder, run)


def check_drawn_on(base: Base, device: torch.device, run: RunDirectory) -> None:
    """A UserMistake if `device` cannot draw the weights of `base` again."""
    if base.folder is None and base.device != device.type:
        raise UserMistake(
            f"The base model of {run.path} was drawn from the seed on {base.device}, and {device.type} draws other "
            f"values; use {base.device} again."
        )


def prepare_adapted(
    run: RunDirectory, config: Config, base: Base, *, attention: str = "auto", longest: int = 1, adapted: bool = True
) -> PreparedModel:
    """The model of `run` on the meta device, with its adapter or, unless `adapted`, without."""
    plan = read_blueprint(run.model)
    folder = None if base.folder is None else Path(base.folder)
    plan = replace(plan, folder=folder, new_rows=None if folder is None else base.new_rows)
    return prepare_model(plan, attention=attention, longest=longest, adapter=config.adapter if adapted else None)


def fingerprint(folder: Path) -> str:
    """A hash that differs for other weights, in whatever files they are: of the name, dtype, shape and samples of each
    tensor."""
    found = hashlib.sha256()
    files = open_folder(folder)
    described: dict[str, bytes] = {}
    for file in sorted(set(files.files.values())):
        described |= {name: text for name, text in _samples(folder / file) if files.files.get(name) == file}
    for name in sorted(described):
        found.update(hashlib.sha256(described[name]).digest())
    return f"sha256:{found.hexdigest()}"


def _samples(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each tensor of a safetensors file: its name, and what identifies it."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > LONGEST_HEADER:
                raise ValueError
            header: dict[str, Any] = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                parts = [json.dumps([name, entry["dtype"], entry["shape"]]).encode()]
                for offset, length in _sampled(start, end):
                    file.seek(8 + size + offset)
                    parts.append(file.read(length))
                yield name, b"".join(parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserMistake(f"{path} is damaged: it is not a safetensors file.") from None


def _sampled(start: int, end: int) -> list[tuple[int, int]]:
    """(offset, length) of the samples of a tensor whose bytes are between `start` and `end`."""
    if end - start <= SAMPLES * SAMPLE_BYTES:
        return [(start, end - start)]
    step = (end - start - SAMPLE_BYTES) // (SAMPLES - 1)
    return [(start + index * step, SAMPLE_BYTES) for index in range(SAMPLES)]

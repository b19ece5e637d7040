"""Reference log-probabilities of a run: computed once, from the weights it starts from, and kept in its folder.

A file holds them by sequence, for each set that the run trains on or evaluates. Which rank computed a value is not
recorded: any world size reads the same ones.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from shoal.data.sequences import Sequences
from shoal.files import write_atomically
from shoal.mistakes import UserMistake

FILE = "reference.safetensors"
AGAIN = "start another run with name=…, which computes them"


@dataclass(frozen=True)
class Known:
    """The log-probabilities of some sequences of a set."""

    sequence_ids: np.ndarray  # ascending
    counts: np.ndarray  # pairs of each
    values: np.ndarray  # all pairs × 2, fp64

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.counts)


class References:
    """By the content hash of the set of sequences."""

    def __init__(self, known: Mapping[str, Known]) -> None:
        self.known = dict(known)
        self._ends = {content: one.ends for content, one in known.items()}

    def of(self, sequences: Sequences, sequence_id: int) -> np.ndarray:
        """pairs × 2: chosen, rejected."""
        self.require(sequences, np.array([sequence_id]))
        content = sequences.summary.content
        known = self.known[content]
        place = int(np.searchsorted(known.sequence_ids, sequence_id))
        end = int(self._ends[content][place])
        return known.values[end - int(known.counts[place]) : end]

    def require(self, sequences: Sequences, sequence_ids: np.ndarray) -> None:
        """A UserMistake if those of some of these sequences are not known."""
        known = self.known.get(sequences.summary.content)
        if known is None:
            raise UserMistake(
                "There are no reference log-probabilities of this data: they are computed when a run starts, of its "
                f"own data only; {AGAIN}."
            )
        places = np.minimum(np.searchsorted(known.sequence_ids, sequence_ids), len(known.sequence_ids) - 1)
        if missing := int(np.sum(known.sequence_ids[places] != sequence_ids)):
            raise UserMistake(
                f"There are no reference log-probabilities of {missing:,} of {len(sequence_ids):,} sequences: they "
                f"were computed when the run started, for as many steps as it had then; lower train.steps, or {AGAIN}."
            )

    def write(self, folder: Path) -> None:
        """Write them into `folder`, whole or not at all."""
        tensors: dict[str, np.ndarray] = {}
        for number, one in enumerate(self.known.values()):
            tensors |= {
                f"{number}.ids": one.sequence_ids,
                f"{number}.counts": one.counts,
                f"{number}.values": one.values,
            }
        metadata = {"contents": json.dumps(list(self.known)), "hash": _hash(tensors)}
        write_atomically(folder / FILE, save(tensors, metadata))

    @staticmethod
    def read(folder: Path) -> "References":
        """Read what was written into `folder`."""
        path = folder / FILE
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            contents = json.loads(metadata["contents"])
            found = {
                content: Known(*(tensors[f"{number}.{name}"] for name in ("ids", "counts", "values")))
                for number, content in enumerate(contents)
            }
            if metadata["hash"] != _hash(tensors):
                raise ValueError
        except FileNotFoundError:
            raise UserMistake(
                f"{path} is missing: the run's reference log-probabilities, which its trained weights cannot give; "
                f"restore it, or {AGAIN}."
            ) from None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            raise UserMistake(f"{path} is damaged: it is not what was saved; restore it, or {AGAIN}.") from None
        return References(found)


def _hash(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()

"""The last collectives of this process, from PyTorch's flight recorder, and which rank is missing from which."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch._C._distributed_c10d as c10d

# Size of the flight recorder's buffer. It is read when the first process group is created.
BUFFER_SIZE = 200
LAST = 10


@dataclass(frozen=True)
class Collective:
    """A collective that this process has started."""

    group: str
    number: int  # sequence number in the group
    name: str
    sizes: str
    between_two: bool  # point-to-point: not all ranks of the group take part

    def __str__(self) -> str:
        return f"{self.name} number {self.number} of group {self.group}, {self.sizes}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def record_collectives() -> None:
    """Enable the flight recorder. Call before a process group is created."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(BUFFER_SIZE))


def last_collectives() -> list[Collective]:
    """Newest last; empty where PyTorch does not record them."""
    entries = []
    for recorder in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's, and NCCL's own
        if dump := getattr(c10d, recorder, None):
            with suppress(RuntimeError, ValueError):
                entries += json.loads(dump(True)).get("entries", [])
    entries.sort(key=lambda entry: int(entry.get("time_created_ns", 0)))
    found = []
    for entry in entries:
        backend, _, name = str(entry["profiling_name"]).partition(":")
        pair = "p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"
        found.append(
            Collective(
                group="{} {} ({})".format(backend, *entry["process_group"]),
                number=int(entry[pair]),
                name=name,
                sizes="×".join(map(str, entry["input_sizes"][0])) if entry.get("input_sizes") else "",
                between_two=bool(entry.get("is_p2p")),
            )
        )
    # The newest of every group and the last few of all: a rarely used group may be the one that hangs.
    newest = {one.group: one for one in found}
    return [one for index, one in enumerate(found) if index >= len(found) - LAST or newest[one.group] is one]


def find_missing_rank(collectives: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[int, str] | None:
    """(rank, the collective it has not reached), for the rank that is farthest behind in any group."""
    worst: tuple[int, int, str] | None = None
    together = {rank: [one for one in held if not one["between_two"]] for rank, held in collectives.items()}
    groups = {one["group"] for held in together.values() for one in held}
    for group in groups:
        newest = {
            rank: max((one for one in held if one["group"] == group), key=lambda one: int(one["number"]))
            for rank, held in together.items()
            if any(one["group"] == group for one in held)
        }
        ahead = max(newest.values(), key=lambda one: int(one["number"]))
        for rank, one in newest.items():
            behind = int(ahead["number"]) - int(one["number"])
            if behind and (worst is None or behind > worst[0]):
                worst = (behind, rank, f"{ahead['name']} number {ahead['number']} of group {group}")
    return None if worst is None else worst[1:]

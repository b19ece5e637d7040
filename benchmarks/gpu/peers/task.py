"""What one process of a peer is told: a JSON file, so that it starts with nothing but its own imports."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SEED = 1234
RATE = 1e-4
WEIGHT_DECAY = 0.1  # on matrices only, as shoal and HF Trainer both do
BETAS = (0.9, 0.95)
EPSILON = 1e-8
CLIP = 1.0
ADAPTER_RANK, ADAPTER_ALPHA, ADAPTER_TARGETS = 8, 16, ("q_proj", "v_proj")


@dataclass(frozen=True)
class Task:
    """One training of a peer."""

    runner: str
    shape: str | dict[str, Any]  # a name of the catalogue, or explicit sizes
    length: int
    rows: int
    steps: int  # all of them, also those that are not measured
    rows_file: str
    started: float  # time.time() when the process was asked for
    options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None  # a folder to start from; None: drawn from the seed
    folder: str = "."  # where a tool may write

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read_task(path: Path) -> Task:
    return Task(**json.loads(path.read_text()))

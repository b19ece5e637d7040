"""The task of one process: a JSON file, so that the process imports nothing but its own tool."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SEED = 1234
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1  # on matrices only, as shoal and HF Trainer both do
BETAS = (0.9, 0.95)
EPSILON = 1e-8
CLIP = 1.0
ADAPTER_RANK, ADAPTER_ALPHA, ADAPTER_TARGETS = 8, 16, ("q_proj", "v_proj")


@dataclass(frozen=True)
class Task:
    """One training run of another tool."""

    runner: str
    shape: str | dict[str, Any]  # a name in the catalogue, or explicit sizes
    length: int
    micro_batch: int
    steps: int  # including warmup
    sequences_file: str
    started: float  # time.time() before the process was started
    options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None  # a folder with initial weights; None: initialized from the seed
    folder: str = "."  # where the tool may write

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read_task(path: Path) -> Task:
    return Task(**json.loads(path.read_text()))

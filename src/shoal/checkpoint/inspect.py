"""Lists a run's checkpoints and verifies their hashes, for `shoal checkpoints`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.store import Checkpoint, damaged_file, examine, folder_for, step_of
from shoal.config.given_run import no_checkpoints

WHOLE, UNFINISHED, DAMAGED = "whole", "not whole", "damaged"


@dataclass(frozen=True)
class Listed:
    """One checkpoint folder of a run."""

    step: int
    path: str
    size: int  # in bytes, of the files present
    metrics: dict[str, float]
    state: str  # whole; not whole: the manifest or files are missing; damaged: a hash does not match
    damaged: str | None  # the first file that is missing, has another size, or does not match its hash
    latest: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        what = f"{self.state}: {self.damaged}" if self.damaged else self.state
        return f"{self.step:>10}  {_readable(self.size):>10}  {what}{'  latest' * self.latest}  {metrics}".rstrip()


def list_checkpoints(
    run: Path, *, verify: bool = False, report: Callable[[str], None] = lambda _: None
) -> list[Listed]:
    """List all checkpoints of a run, oldest first; with `verify`, compare every file with its hash."""
    checkpoints = run / "checkpoints"
    if not checkpoints.is_dir():
        raise no_checkpoints(run)
    try:
        latest = (checkpoints / "latest").read_text().strip()
    except (OSError, ValueError):
        latest = ""
    steps = sorted(step for path in checkpoints.iterdir() if (step := step_of(path)) is not None)
    found = []
    for step in steps:
        folder = folder_for(checkpoints, step)
        checkpoint_or_file = examine(folder)
        checkpoint = checkpoint_or_file if isinstance(checkpoint_or_file, Checkpoint) else None
        state, damaged = (WHOLE, None) if checkpoint is not None else (UNFINISHED, str(checkpoint_or_file))
        if checkpoint is not None and verify:
            report(f"verifying {folder} ({_readable(checkpoint.size)})")
            damaged = damaged_file(checkpoint)
            state = WHOLE if damaged is None else DAMAGED
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        metrics = {} if checkpoint is None else checkpoint.metrics
        found.append(Listed(step, str(folder), size, metrics, state, damaged, folder.name == latest))
    return found


def _readable(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

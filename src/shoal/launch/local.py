"""A training run in several processes on this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.processes import run_processes
from shoal.mistakes import RunFailed
from shoal.train.loop import Summary


@dataclass(frozen=True)
class Request:
    """What the processes are to do; the config itself is in the run directory."""

    run: Path
    resume: bool
    start_from: Path | None
    patience: float  # seconds that ranks get to finish a step and save, once they were asked to stop


def launch(request: Request, processes: int, *, max_restarts: int, warn: Callable[[str], None]) -> Summary:
    """Run `processes` ranks until they end. Ranks that were asked to stop end well, with a summary that says so."""
    summary = run_processes(
        "shoal.launch.worker",
        _arguments(request),
        processes,
        max_restarts=max_restarts,
        patience=request.patience,
        warn=warn,
    )
    if summary is None:
        raise RunFailed("The run was stopped before it could save.")
    return Summary(**summary)


def _arguments(request: Request) -> list[str]:
    flags = ["--resume"] if request.resume else []
    if request.start_from is not None:
        flags += ["--from", str(request.start_from)]
    return [str(request.run), *flags]

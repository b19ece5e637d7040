"""A training run in several processes on this machine."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.launch.processes import RanOut, run_processes
from shoal.mistakes import RunFailed
from shoal.plan.choose import Chosen
from shoal.train.loop import Summary
from shoal.train.out_of_memory import smaller_batch


@dataclass(frozen=True)
class Request:
    """What the processes are to do; the config itself is in the run directory."""

    run: Path
    resume: bool
    start_from: Path | None
    patience: float  # seconds that ranks get to finish a step and save, once they were asked to stop
    shrinks: bool = False  # when memory runs out, all start again with fewer rows a pass
    instead: Mapping[str, Any] | None = None  # keys that are settled otherwise than in the config by now


def launch(request: Request, processes: int, *, max_restarts: int, warn: Callable[[str], None]) -> Summary:
    """Run `processes` ranks until they end. Ranks that were asked to stop end well, with a summary that says so."""
    while True:
        try:
            summary = run_processes(
                "shoal.launch.worker",
                _arguments(request),
                processes,
                max_restarts=max_restarts,
                patience=request.patience,
                warn=warn,
            )
        except RanOut as failure:
            # Ranks cannot decide this: one that made smaller passes by itself would leave the others waiting.
            chosen = Chosen(**failure.found["chosen"])
            rows = smaller_batch(chosen)
            if not request.shrinks or rows is None:
                raise
            max_restarts -= failure.restarts
            request = replace(request, instead=_settled(chosen, rows))
            grad_accum_steps = chosen.micro_batch * chosen.grad_accum_steps // rows
            warn(
                f"{failure.found['sentence']} All processes are started again with train.micro_batch {rows} in "
                f"{grad_accum_steps} passes, from the newest checkpoint or else from the start; the global batch stays "
                f"{chosen.global_batch}."
            )
            continue
        if summary is None:
            raise RunFailed("The run was stopped before it could save.")
        return Summary(**summary)


def _settled(chosen: Chosen, rows: int) -> dict[str, Any]:
    """What was chosen stays, but for the rows of a pass: with fewer of them the forecast, which was wrong, might choose
    to spend the memory that they free."""
    found: dict[str, Any] = {
        "train.micro_batch": rows,
        "parallel.strategy": chosen.strategy,
        "parallel.tp": chosen.mesh["tp"],
        "parallel.pp": chosen.mesh["pp"],
        "parallel.sharding": chosen.sharding,
    }
    if not chosen.recompute.startswith("every"):  # which is never chosen, and stands in the config
        found["train.recompute"] = chosen.recompute
    return found


def _arguments(request: Request) -> list[str]:
    flags = ["--resume"] if request.resume else []
    if request.start_from is not None:
        flags += ["--from", str(request.start_from)]
    if request.instead is not None:
        flags += ["--instead", json.dumps(dict(request.instead))]
    return [str(request.run), *flags]

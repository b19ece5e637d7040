"""Run training in several processes on this node."""

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
    """The arguments of the processes. The config is in the run directory."""

    run: Path
    resume: bool
    start_from: Path | None
    patience: float  # seconds for ranks to finish a step and save after a request to stop
    shrinks: bool = False  # restart with a smaller micro-batch after running out of memory
    overrides: Mapping[str, Any] | None = None  # config keys that were replaced after running out of memory


def launch(request: Request, processes: int, *, max_restarts: int, warn: Callable[[str], None]) -> Summary:
    """Run `processes` ranks until they end. A run that was asked to stop returns a summary that says so."""
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
            # Ranks cannot decide this: all must have the same micro-batch.
            chosen = Chosen(**failure.found["chosen"])
            micro_batch = smaller_batch(chosen)
            if not request.shrinks or micro_batch is None:
                raise
            max_restarts -= failure.restarts
            request = replace(request, overrides=_overrides(chosen, micro_batch))
            grad_accum_steps = chosen.micro_batch * chosen.grad_accum_steps // micro_batch
            warn(
                f"{failure.found['sentence']} Restarting all processes with train.micro_batch {micro_batch} and "
                f"{grad_accum_steps} gradient accumulation steps, from the newest checkpoint if there is one. The "
                f"global batch stays {chosen.global_batch}."
            )
            continue
        if summary is None:
            raise RunFailed("The run was stopped before it could save.")
        return Summary(**summary)


def _overrides(chosen: Chosen, micro_batch: int) -> dict[str, Any]:
    """Keep every choice except for the micro-batch. A new choice by the forecast, which was wrong, might use up the
    memory that a smaller micro-batch frees."""
    found: dict[str, Any] = {
        "train.micro_batch": micro_batch,
        "parallel.strategy": chosen.strategy,
        "parallel.tp": chosen.mesh["tp"],
        "parallel.pp": chosen.mesh["pp"],
        "parallel.sharding": chosen.sharding,
    }
    if not chosen.recompute.startswith("every"):  # never an automatic choice: it is in the config
        found["train.recompute"] = chosen.recompute
    return found


def _arguments(request: Request) -> list[str]:
    flags = ["--resume"] if request.resume else []
    if request.start_from is not None:
        flags += ["--from", str(request.start_from)]
    if request.overrides is not None:
        flags += ["--overrides", json.dumps(dict(request.overrides))]
    return [str(request.run), *flags]

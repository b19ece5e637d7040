"""Measures one case and returns its record, also if the case fails."""

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import ours
from peers.cases import Case
from peers.flops import count_flops, peak_of
from peers.machine import find_missing, timestamp
from peers.process import Outcome, environment, run_process
from peers.sequences import prepare_sequences, write_sequences
from peers.task import Task

MEASURED = "measured"
NOT_RUN = "not run: time"


@dataclass(frozen=True)
class Session:
    """Settings that all cases of one call share."""

    work: Path
    warmup: int
    steps: int
    patience: float  # seconds for one case
    until: float  # on time.monotonic: no case starts or runs after it
    gpu: str | None
    weights: Path | None = None  # a folder with initial weights; None: initialized from the seed

    @property
    def cache(self) -> Path:
        return self.work / "cache"

    def sequences_file(self, length: int) -> Path:
        return self.work / f"sequences-{length}.npy"


def prepare(cases: list[Case], session: Session) -> None:
    """Prepare the tokens before anything is timed. shoal's own cases find the same sequences in the cache."""
    most: dict[int, int] = {}
    for case in cases:
        if case.data == "text":
            most[case.length] = max(most.get(case.length, 0), case.micro_batch)
        else:
            prepare_sequences({**ours.data_of(case, session.work), "pack": case.config["data.pack"]})
    for length, micro_batch in most.items():
        write_sequences(
            session.sequences_file(length), session.work, length, micro_batch * (session.warmup + session.steps)
        )


def measure(case: Case, session: Session) -> dict[str, Any]:
    """The record of one case: its figures, or why there are none."""
    record: dict[str, Any] = {
        "job": case.job,
        "label": case.label,
        "ours": case.runner == "ours",
        "measured_at": timestamp(),
        "shape": case.shape,
        "length": case.length,
        "micro_batch": case.micro_batch,
    }
    if (missing := find_missing(case.needs)) is not None:
        return {**record, "status": f"skipped: {missing} is not installed"}
    left = session.until - time.monotonic()
    if left <= 0:
        return {**record, "status": NOT_RUN}
    warmup, steps = session.warmup * case.more_steps, session.steps * case.more_steps
    outcome, answer = _run(case, session, warmup, steps, min(session.patience, left))
    record["seconds"] = round(outcome.seconds, 1)
    if outcome.status != "done":
        status = NOT_RUN if outcome.timed_out and left < session.patience else outcome.status
        return {**record, "status": status, "stderr": outcome.stderr}
    try:
        return {**record, "status": MEASURED, **figures(case, json.loads(answer), warmup, steps, session)}
    except (ValueError, KeyError) as error:
        return {**record, "status": f"failed: its result cannot be read: {error!r}", "stderr": outcome.stderr}


def _run(case: Case, session: Session, warmup: int, steps: int, seconds: float) -> tuple[Outcome, str]:
    """Run the process of a case, and return its outcome and its result."""
    folder = session.work / case.name
    folder.mkdir()
    settings = environment(folder, session.cache, session.gpu is not None)
    if case.runner == "ours":
        command = ours.command_of(case, folder, session.work, warmup, steps, session.weights)
        outcome = run_process(command, folder, settings, seconds)
        return outcome, outcome.output
    task = Task(
        runner=case.runner,
        shape=case.shape,
        length=case.length,
        micro_batch=case.micro_batch,
        steps=warmup + steps,
        sequences_file=str(session.sequences_file(case.length)),
        started=time.time(),
        options=case.options,
        weights=None if session.weights is None else str(session.weights),
        folder=str(folder / "out"),
    )
    task.write(folder / "task.json")
    answer = folder / "answer.json"
    outcome = run_process(["-m", "peers", str(folder / "task.json"), str(answer)], folder, settings, seconds)
    return outcome, answer.read_text() if answer.exists() else ""


def figures(case: Case, found: dict[str, Any], warmup: int, steps: int, session: Session) -> dict[str, Any]:
    """The figures of a case, computed the same way for every tool."""
    if case.runner == "ours":
        # Steps over instructions differ in length, so the mean speed is used instead of that of the median step, and
        # only loss tokens count, which every tool has the same number of.
        speed = found["tokens_per_second" if case.data == "text" else "loss_tokens_per_second"]
        seconds = found["step_seconds"]
    else:
        # The first step has no time, and is never measured.
        seconds = statistics.median(found["step_seconds"][max(warmup, 1) :])
        speed = case.micro_batch * case.length / seconds
    peak = peak_of(session.gpu)
    # Loss tokens of instructions are only a part of the tokens computed, so they give no MFU.
    flops = count_flops(case) if case.data == "text" and case.job != "numerics" else None
    return {
        "tokens_per_second": speed,
        "step_seconds": seconds,
        "mfu": flops.mfu(speed, peak) if flops and peak else None,
        "mfu_formula": flops and flops.formula,
        "peak": peak,
        "allocated_gib": found["allocated_gib"] if session.gpu else None,
        "reserved_gib": found["reserved_gib"] if session.gpu else None,
        "first_step_seconds": found["first_step_seconds"],
        "warmup": warmup,
        "steps": steps,
        # With fake collectives a single rank trains on wrong gradients: its losses mean nothing.
        "losses": found["losses"] if case.ranks == 1 else [],
        **{key: found[key] for key in ("data_seconds", "chosen") if key in found},
    }


def summary(record: dict[str, Any]) -> str:
    """One line of progress."""
    if record["status"] != MEASURED:
        return record["status"]
    memory = record["allocated_gib"]
    held = "" if memory is None else f", {memory:.1f} GiB"
    return f"{record['tokens_per_second']:,.0f} tokens/s{held}, {record['seconds']:.0f} s in all"

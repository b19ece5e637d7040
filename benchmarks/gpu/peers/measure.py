"""One case from its description to its figures, whatever comes of it."""

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import ours
from peers.cases import Case
from peers.flops import count_work, peak_of
from peers.machine import lacking, today
from peers.process import Outcome, environment, run_process
from peers.rows import prepare_rows, write_rows
from peers.task import Task

MEASURED = "measured"
NOT_RUN = "not run: time"


@dataclass(frozen=True)
class Session:
    """What the cases of one call share."""

    work: Path
    warmup: int
    steps: int
    patience: float  # seconds for one case
    until: float  # on time.monotonic: no case begins later, and none runs on beyond it
    gpu: str | None
    weights: Path | None = None  # a folder that all start from; None: drawn from the seed

    @property
    def cache(self) -> Path:
        return self.work / "cache"

    def rows_file(self, length: int) -> Path:
        return self.work / f"rows-{length}.npy"


def prepare(cases: list[Case], session: Session) -> None:
    """Tokens for everyone, before any clock runs. shoal's own cases find the same rows in the cache."""
    most: dict[int, int] = {}
    for case in cases:
        if case.data == "text":
            most[case.length] = max(most.get(case.length, 0), case.rows)
        else:
            prepare_rows({**ours.data_of(case, session.work), "pack": case.config["data.pack"]})
    for length, rows in most.items():
        write_rows(session.rows_file(length), session.work, length, rows * (session.warmup + session.steps))


def measure(case: Case, session: Session) -> dict[str, Any]:
    """The record of one case: its figures, or why there are none."""
    record: dict[str, Any] = {
        "job": case.job,
        "label": case.label,
        "ours": case.runner == "ours",
        "measured_at": today(),
        "shape": case.shape,
        "length": case.length,
        "rows": case.rows,
    }
    if (missing := lacking(case.needs)) is not None:
        return {**record, "status": f"skipped: {missing} is not installed"}
    left = session.until - time.monotonic()
    if left <= 0:
        return {**record, "status": NOT_RUN}
    warmup, steps = session.warmup * case.longer, session.steps * case.longer
    outcome, answer = _run(case, session, warmup, steps, min(session.patience, left))
    record["seconds"] = round(outcome.seconds, 1)
    if outcome.status != "done":
        status = NOT_RUN if outcome.late and left < session.patience else outcome.status
        return {**record, "status": status, "said": outcome.said}
    try:
        return {**record, "status": MEASURED, **figures(case, json.loads(answer), warmup, steps, session)}
    except (ValueError, KeyError) as error:
        return {**record, "status": f"failed: its answer cannot be read: {error!r}", "said": outcome.said}


def _run(case: Case, session: Session, warmup: int, steps: int, seconds: float) -> tuple[Outcome, str]:
    """The case's process, and what it answered."""
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
        rows=case.rows,
        steps=warmup + steps,
        rows_file=str(session.rows_file(case.length)),
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
    """The same figures for ours and for a peer, counted the same way."""
    if case.runner == "ours":
        # Steps over instructions differ in their length, so that their median would be of no step in particular.
        speed = found["tokens_per_second" if case.data == "text" else "tokens_per_second_mean"]
        seconds = found["step_seconds"]
    else:
        # The first step has no time of its own, and is never measured.
        seconds = statistics.median(found["step_seconds"][max(warmup, 1) :])
        speed = case.rows * case.length / seconds
    peak = peak_of(session.gpu)
    # The targets of instructions are a part of what is computed: their number says nothing about the chip.
    work = count_work(case) if case.data == "text" and case.job != "numerics" else None
    return {
        "tokens_per_second": speed,
        "step_seconds": seconds,
        "mfu": work.utilisation(speed, peak) if work and peak else None,
        "mfu_formula": work and work.formula,
        "peak": peak,
        "allocated_gib": found["allocated_gib"] if session.gpu else None,
        "reserved_gib": found["reserved_gib"] if session.gpu else None,
        "first_step_seconds": found["first_step_seconds"],
        "warmup": warmup,
        "steps": steps,
        # A rank without the others gets its own numbers back from every exchange: it trains nothing.
        "losses": found["losses"] if case.ranks == 1 else [],
        **{key: found[key] for key in ("data_seconds", "chosen") if key in found},
    }


def summary(record: dict[str, Any]) -> str:
    """For the person who waits."""
    if record["status"] != MEASURED:
        return record["status"]
    memory = record["allocated_gib"]
    held = "" if memory is None else f", {memory:.1f} GiB"
    return f"{record['tokens_per_second']:,.0f} tokens/s{held}, {record['seconds']:.0f} s in all"

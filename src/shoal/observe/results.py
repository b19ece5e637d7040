"""The figures of a run that sum it up: for the top of its report, the list of runs, and the comparison."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from shoal.observe.run_reader import RunRecord, Values, column, number

# A mean over the last lines says more than the last one, and the first ones compile and warm up.
RECENT = 20


@dataclass(frozen=True)
class Results:
    """How far a run is and how well it does. None: not known."""

    loss: float | None
    eval_loss: float | None
    best_eval_loss: float | None
    best_step: int | None
    tokens: float | None
    tokens_per_second: float | None  # mean of recent lines
    samples: float | None  # of a custom loop, which has no tokens
    samples_per_second: float | None
    mfu: float | None
    memory_gib: float | None  # peak
    seconds: float | None  # since it was started first, or until it ended
    seconds_left: float | None
    restarts: int
    skipped: float | None
    waits: dict[str, float]  # seconds per step, by what the step waited for; "computing" is the rest


_KNOWN: "WeakKeyDictionary[RunRecord, Results]" = WeakKeyDictionary()


def results_of(run: RunRecord) -> Results:
    found = _KNOWN.get(run)
    if found is None:
        found = _KNOWN[run] = _results_of(run)
    return found


def _results_of(run: RunRecord) -> Results:
    last = run.training[-1] if run.training else {}
    recent = run.training[-RECENT:]
    evaluated = [(value, one["step"]) for one in run.evaluations if (value := number(one.get("eval_loss"))) is not None]
    best = min(evaluated, default=None)
    attempts = {one.get("attempt") for one in (*run.training, *run.events) if isinstance(one.get("attempt"), int)}
    step_seconds = _mean(recent, "seconds")
    left = None
    if run.state == "running" and run.steps is not None and run.step is not None and step_seconds is not None:
        left = max(0, run.steps - run.step) * step_seconds
    return Results(
        loss=number(last.get("loss")),
        eval_loss=number(run.evaluations[-1].get("eval_loss")) if run.evaluations else None,
        best_eval_loss=best[0] if best else None,
        best_step=int(best[1]) if best else None,
        tokens=number(last.get("tokens")),
        tokens_per_second=_mean(recent, "tokens_per_second"),
        samples=number(last.get("samples")),
        samples_per_second=_mean(recent, "samples_per_second"),
        mfu=_mean(recent, "mfu"),
        memory_gib=max(column(run.training, "memory_gib")[1], default=None),
        seconds=_duration(run),
        seconds_left=left,
        restarts=max(0, len(attempts) - 1),
        skipped=number(last.get("skipped")),
        waits=_waits(run.training),
    )


def _mean(lines: list[Values], name: str) -> float | None:
    _, found = column(lines, name)
    return sum(found) / len(found) if found else None


def _duration(run: RunRecord) -> float | None:
    times = [
        found for one in (*run.events, *run.training[:1], *run.training[-1:]) if (found := number(one.get("time")))
    ]
    if not times:
        return None
    end = run.read if run.state == "running" else max(times)
    return max(0.0, end - min(times))


def _waits(lines: list[Values]) -> dict[str, float]:
    """Where the mean step of the run went, after the first line, whose steps compile and warm up."""
    measured = lines[1:] or lines
    whole = _mean(measured, "seconds")
    if whole is None:
        return {}
    named = {
        "waiting for data": _mean(measured, "data_seconds"),
        "exposed communication": _mean(measured, "communication_seconds"),
        "waiting for checkpoints": _mean(measured, "save_seconds"),
    }
    waits = {name: value for name, value in named.items() if value}
    within = sum(
        value for name, value in waits.items() if name != "waiting for checkpoints"
    )  # which `seconds` leaves out
    return {"computing": max(0.0, whole - within), **waits}

"""The metrics of every step. They are read from the device one step late, so that it never waits for the host."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shoal.observe.device_clock import Mark, mark, seconds_between
from shoal.observe.metrics import last_line
from shoal.parallel.ranks import Ranks
from shoal.resilience.health import StepMetrics
from shoal.train.hooks import Hook, LogInterval
from shoal.train.step import StepResult


@dataclass
class Window:
    """Sums over the steps since the last log line."""

    began: Mark
    steps: int = 0
    tokens: int = 0  # of all ranks
    positions: int = 0  # tokens of this rank's sequences, with prompts and padding
    flops: float = 0.0  # of this rank
    data_seconds: float = 0.0
    profiled: bool = False  # a profiler has slowed down some of the steps
    excluded: list[tuple[Mark, Mark]] = field(default_factory=list)  # within a step, but not of it


@dataclass
class _Waits:
    """What the loop has waited for checkpoints, over all steps since the last log line."""

    steps: int = 0
    until: float = 0.0  # the total at that line

    def mean(self, total: float) -> float:
        found = (total - self.until) / max(1, self.steps)
        self.steps, self.until = 0, total
        return found


@dataclass(frozen=True)
class Unread:
    """Steps whose metrics are still on the device."""

    steps: tuple[int, ...]
    weights: tuple[int | None, ...]
    # steps × (norm, usable, the sums of the objective): valid on the host once the device has reached the copy
    values: Tensor

    def read(self) -> list[StepMetrics]:
        rows = zip(self.steps, self.weights, self.values.tolist(), strict=True)
        return [
            StepMetrics(step, sums[0] / (weight or sums[1]), norm, bool(usable), tuple(sums))
            for step, weight, (norm, usable, *sums) in rows
        ]


@dataclass(frozen=True)
class Pending:
    """A log line whose metrics are being copied from the device."""

    lr: float
    tokens: int
    loss_tokens: int
    unread: Unread
    window: Window
    ended: Mark
    save_seconds: float
    communication: Callable[[], float | None]


class Sums(Protocol):
    """Names the sums of a step, and makes metrics of them: an objective, or the optimizers of a custom loop."""

    @property
    def sums(self) -> Sequence[str]: ...

    def metrics(self, sums: Mapping[str, float], /) -> Mapping[str, float]: ...


class StepLog:
    """Records every step, and makes a log line every `every` steps and at the last step, which goes to `hooks`."""

    def __init__(
        self,
        *,
        every: int,
        total: int,
        ranks: Ranks,
        attempt: int,
        peak: float | None,
        hooks: Hook,
        objective: Sums | None = None,
        in_samples: bool = False,
    ) -> None:
        """`in_samples`: what `after_step` counts as tokens are samples, and is logged as such."""
        self.in_samples = in_samples
        self.every = every
        self.total = total
        self.ranks = ranks
        self.attempt = attempt
        self.peak = peak
        self.hooks = hooks
        # Whose metrics are logged, if it sums more than the loss and its weight.
        self.objective = objective if objective is not None and len(objective.sums) > 2 else None
        # More values for every line, and how to read, when the steps so far are done, the seconds per step for which
        # they waited for communication.
        self.readings: Callable[[], Mapping[str, float | int | None]] = dict
        self.communication: Callable[[], Callable[[], float | None]] = lambda: lambda: None
        self.skipped = 0  # skipped steps
        self.step_seconds = 0.0  # of the last log interval
        self.profiled = False  # a profiler runs
        self._window = Window(mark(ranks.device))
        self._saves = _Waits()
        self._pending: Pending | None = None
        self._results: list[tuple[int, StepResult]] = []

    def after_step(
        self,
        step: int,
        result: StepResult,
        *,
        lr: float,
        tokens: int,
        total_tokens: int,
        loss_tokens: int,
        positions: int,
        flops: float,
        data_seconds: float,
        save_seconds: float,
    ) -> list[StepMetrics]:
        """Record a step. `save_seconds`: for which the loop has waited for checkpoints so far. Returns the metrics of
        earlier steps that have arrived."""
        self._results.append((step, result))
        self._saves.steps += 1
        window = self._window
        window.steps += 1
        window.tokens += tokens
        window.positions += positions
        window.flops += flops
        window.data_seconds += data_seconds
        window.profiled |= self.profiled
        # The previous step is done by now, or nearly, and this one keeps the device busy.
        arrived = self._read_pending()
        if step % self.every == 0 or step == self.total:
            unread = self._fetch_metrics()
            ended = mark(self.ranks.device)
            self._pending = Pending(
                lr,
                total_tokens,
                loss_tokens,
                unread,
                window,
                ended,
                self._saves.mean(save_seconds),
                self.communication(),
            )
            self._window = Window(ended)
        return arrived

    def _fetch_metrics(self) -> Unread:
        """Start to copy the metrics of all unread steps to the host: one all-reduce, without waiting for the result."""
        steps, results = zip(*self._results, strict=True)
        self._results = []
        sums = self.ranks.sum(torch.stack([result.sums for result in results]))
        norms, usable = (
            torch.stack([getattr(result, name).double() for result in results]).to(sums.device)
            for name in ("norm", "usable")
        )
        values = torch.cat([norms[:, None], usable[:, None], sums], dim=1)
        if values.is_cuda:  # copied after the steps' work; the host does not wait
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
        return Unread(steps, tuple(result.weight for result in results), values)

    def catch_up(self) -> list[StepMetrics]:
        """The metrics of every step so far that were not returned yet. Waits for the device."""
        arrived = self._read_pending()
        if self._results:
            unread = self._fetch_metrics()
            mark(self.ranks.device).wait()
            arrived += self._count(unread.read())
        return arrived

    @property
    def caught_up(self) -> bool:
        """Whether the metrics of every step have been returned."""
        return self._pending is None and not self._results

    def _count(self, steps: list[StepMetrics]) -> list[StepMetrics]:
        self.skipped += sum(not one.usable for one in steps)
        return steps

    def _read_pending(self) -> list[StepMetrics]:
        """Read the metrics of the pending log line and give it to the hooks."""
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        pending.ended.wait()
        steps = self._count(pending.unread.read())
        last, window = steps[-1], pending.window
        excluded = sum(seconds_between(*each) for each in window.excluded)
        seconds = (seconds_between(window.began, pending.ended) - excluded) / window.steps
        self.step_seconds = seconds
        mfu = None
        if self.peak is not None and math.isfinite(window.flops):
            mfu = round(window.flops / window.steps / seconds / self.peak, 4)
        allocated, reserved = self.ranks.largest(_peak_memory_gib(self.ranks.device)), _reserved_gib(self.ranks)
        communication = pending.communication()
        line: dict[str, float | int | None] = {
            "step": last.step,
            "attempt": self.attempt,
            "loss": last.loss if math.isfinite(last.loss) else None,
            "grad_norm": last.norm if math.isfinite(last.norm) else None,
            "lr": pending.lr,
            "tokens": pending.tokens,
            "loss_tokens": pending.loss_tokens,
            "tokens_per_second": round(window.tokens / window.steps / seconds, 1),
            "mfu": mfu,
            "memory_gib": round(allocated, 3),
            "reserved_gib": reserved,
            "data_seconds": round(window.data_seconds / window.steps, 6),
            "save_seconds": round(pending.save_seconds, 6),
            "communication_seconds": None if communication is None else round(min(communication, seconds), 6),
            "seconds": round(seconds, 6),
            "skipped": self.skipped,
            "time": round(time.time(), 3),
            **self.readings(),
            **self._metrics(last),
            **({"profiled": True} if window.profiled else {}),
        }
        if self.in_samples:
            line = _in_samples(line)
        interval = LogInterval(
            last.step, window.steps, seconds * window.steps, window.positions, mfu, allocated, reserved, window.profiled
        )
        self.hooks.on_metrics(line, interval)
        return steps

    def _metrics(self, step: StepMetrics) -> dict[str, float | None]:
        """The objective's metrics of a step, without the loss."""
        if self.objective is None:
            return {}
        found = self.objective.metrics(dict(zip(self.objective.sums, step.sums, strict=True)))
        return {name: value if math.isfinite(value) else None for name, value in found.items() if name != "loss"}

    def forget(self) -> None:
        """Discard unread steps, before a rollback."""
        self._pending, self._results = None, []
        self.restart_clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude work within a step, such as an evaluation in the body of a custom loop, from its time."""
        began = mark(self.ranks.device)
        yield
        self._window.excluded.append((began, mark(self.ranks.device)))

    def restart_clock(self) -> None:
        """Exclude an evaluation or a save from the step time."""
        self._window = Window(mark(self.ranks.device))


def _in_samples(line: dict[str, float | int | None]) -> dict[str, float | int | None]:
    """The line of a model that is not a language model: samples where others have tokens."""
    names = {"tokens": "samples", "tokens_per_second": "samples_per_second"}
    return {names.get(name, name): value for name, value in line.items() if name != "loss_tokens"}


def next_attempt(metrics: Path) -> int:
    """0 at the first start, else one more than in the last line of `metrics.jsonl`."""
    found = last_line(metrics).get("attempt")
    return found + 1 if isinstance(found, int) else 0


def _reserved_gib(ranks: Ranks) -> float | None:
    """Peak memory reserved by the CUDA caching allocator, maximum over ranks. None on CPU."""
    if ranks.device.type != "cuda":
        return None
    return round(ranks.largest(torch.cuda.max_memory_reserved(ranks.device) / 2**30), 3)


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

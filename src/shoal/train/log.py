"""From device tensors to lines of `metrics.jsonl`, read one step late so that the device never waits for the host."""

import math
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.observe.metrics import Line, Sink, last_line
from shoal.observe.progress import Reporter
from shoal.parallel.ranks import Ranks
from shoal.train.clock import Mark, mark, seconds_between
from shoal.train.step import StepResult


@dataclass
class Window:
    """Sums over the steps since the last line."""

    began: Mark
    steps: int = 0
    targets: int = 0
    flops: float = 0.0  # of this rank: prompts and padding are computed on too
    data_seconds: float = 0.0


@dataclass(frozen=True)
class Pending:
    """A line whose numbers are on their way from the device."""

    step: int
    rate: float
    tokens: int
    targets: int  # of this step
    numbers: Tensor  # loss sum, norm, skipped steps: on the host once `ended` is reached
    window: Window
    ended: Mark


class StepLog:
    """Told of every step; writes every `every`-th, and the last."""

    def __init__(
        self,
        *,
        every: int,
        total: int,
        sinks: list[Sink],
        reporter: Reporter,
        ranks: Ranks,
        attempt: int,
        skipped: int,
        peak: float | None,
    ) -> None:
        self.every = every
        self.total = total
        self.sinks = sinks
        self.reporter = reporter
        self.ranks = ranks
        self.attempt = attempt
        self.peak = peak
        self.last: dict[str, float | int | None] = {}
        self.listener: Callable[[Line], None] = lambda line: None  # told of every line
        self._window = Window(mark(ranks.device))
        self._pending: Pending | None = None
        self._skipped = torch.full((), float(skipped), dtype=torch.float64, device=ranks.device)

    def after_step(
        self, step: int, result: StepResult, *, rate: float, tokens: int, flops: float, data_seconds: float
    ) -> None:
        """Take note of a step."""
        self.reporter.advance(step)
        self._skipped += (~result.usable).to(self._skipped.device)
        window = self._window
        window.steps += 1
        window.targets += result.targets
        window.flops += flops
        window.data_seconds += data_seconds
        # The step before this one is done by now, or nearly, and this one keeps the device busy meanwhile.
        self.flush()
        if step % self.every == 0 or step == self.total:
            self.ranks.sum(result.loss_sum)
            numbers = torch.stack([result.loss_sum, result.norm.double().to(self._skipped.device), self._skipped])
            if numbers.is_cuda:  # copied behind the step's work; the host goes on
                numbers = torch.empty(3, dtype=torch.float64, pin_memory=True).copy_(numbers, non_blocking=True)
            ended = mark(self.ranks.device)
            self._pending = Pending(step, rate, tokens, result.targets, numbers, window, ended)
            self._window = Window(ended)

    def flush(self) -> None:
        """Read what is pending, and write its line."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.ended.wait()
        loss_sum, norm, skipped = pending.numbers.tolist()
        loss = loss_sum / pending.targets
        window = pending.window
        seconds = seconds_between(window.began, pending.ended) / window.steps
        mfu = None
        if self.peak is not None and math.isfinite(window.flops):
            mfu = round(window.flops / window.steps / seconds / self.peak, 4)
        line: dict[str, float | int | None] = {
            "step": pending.step,
            "attempt": self.attempt,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "lr": pending.rate,
            "tokens": pending.tokens,
            "tokens_per_second": round(window.targets / window.steps / seconds, 1),
            "mfu": mfu,
            "memory_gib": round(self.ranks.largest(_peak_memory_gib(self.ranks.device)), 3),
            "data_seconds": round(window.data_seconds / window.steps, 6),
            "seconds": round(seconds, 6),
            "skipped": int(skipped),
        }
        self.write(line)
        self.reporter.report(line, self.total)
        self.last = line
        self.listener(line)

    def write(self, line: Line) -> None:
        for sink in self.sinks:
            sink.write(line)

    def restart_clock(self) -> None:
        """After work that is not training: an evaluation, a save."""
        self._window = Window(mark(self.ranks.device))

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def next_attempt(metrics: Path) -> int:
    """0 for a first start, one more than the last line's after that."""
    found = last_line(metrics).get("attempt")
    return found + 1 if isinstance(found, int) else 0


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

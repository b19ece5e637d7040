"""From device tensors to lines of `metrics.jsonl`, read one step late so that the device never waits for the host."""

import math
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shoal.observe.device_clock import Mark, mark, seconds_between
from shoal.observe.metrics import Line, Sink, last_line
from shoal.observe.progress import Reporter
from shoal.parallel.ranks import Ranks
from shoal.train.step import StepResult


@dataclass
class Window:
    """Sums over the steps since the last line."""

    began: Mark
    steps: int = 0
    loss_tokens: int = 0
    positions: int = 0  # tokens of this rank's rows: prompts and padding are computed on too
    flops: float = 0.0  # of this rank
    data_seconds: float = 0.0


@dataclass(frozen=True)
class StepNumbers:
    """What became of one step: the same on every rank."""

    step: int
    loss: float
    norm: float
    usable: bool  # false: it changed nothing


@dataclass(frozen=True)
class Pace:
    """What a line tells of the steps since the one before it."""

    step: int  # the last
    steps: int
    seconds: float  # of all of them
    positions: int  # tokens that this rank's rows had
    mfu: float | None
    allocated_gib: float  # at the peak so far, the worst rank's
    reserved_gib: float | None


@dataclass(frozen=True)
class Unread:
    """Steps whose numbers are still with the device."""

    steps: tuple[int, ...]
    loss_tokens: tuple[int, ...]
    numbers: Tensor  # steps × (loss sum, norm, usable): on the host once the device has come so far

    def read(self) -> list[StepNumbers]:
        rows = zip(self.steps, self.loss_tokens, self.numbers.tolist(), strict=True)
        return [
            StepNumbers(step, loss / loss_tokens, norm, bool(usable))
            for step, loss_tokens, (loss, norm, usable) in rows
        ]


@dataclass(frozen=True)
class Pending:
    """A line whose numbers are on their way from the device."""

    lr: float
    tokens: int
    unread: Unread
    window: Window
    ended: Mark


class StepLog:
    """Told of every step; writes every `every`-th, and the last."""

    def __init__(
        self,
        *,
        every: int,
        total: int,
        reporter: Reporter,
        ranks: Ranks,
        attempt: int,
        peak: float | None,
    ) -> None:
        self.every = every
        self.total = total
        self.sinks: list[Sink] = []  # where lines go
        self.reporter = reporter
        self.ranks = ranks
        self.attempt = attempt
        self.peak = peak
        self.last: dict[str, float | int | None] = {}
        self.skipped = 0  # steps that changed nothing
        self.on_steps: Callable[[list[StepNumbers]], None] = lambda steps: None  # told of every step, if late
        self.on_line: Callable[[Pace], None] = lambda pace: None  # told of every line
        self.step_seconds = 0.0  # of the last line
        self._window = Window(mark(ranks.device))
        self._pending: Pending | None = None
        self._results: list[tuple[int, StepResult]] = []
        self._failed: list[Sink] = []

    def after_step(
        self,
        step: int,
        result: StepResult,
        *,
        lr: float,
        tokens: int,
        positions: int,
        flops: float,
        data_seconds: float,
    ) -> None:
        """Take note of a step."""
        self.reporter.advance(step)
        self._results.append((step, result))
        window = self._window
        window.steps += 1
        window.loss_tokens += result.loss_tokens
        window.positions += positions
        window.flops += flops
        window.data_seconds += data_seconds
        # The step before this one is done by now, or nearly, and this one keeps the device busy meanwhile.
        self.flush()
        if step % self.every == 0 or step == self.total:
            unread = self._send_for_numbers()
            ended = mark(self.ranks.device)
            self._pending = Pending(lr, tokens, unread, window, ended)
            self._window = Window(ended)

    def _send_for_numbers(self) -> Unread:
        """One collective for all steps since the last time; the host does not wait for the answer."""
        steps, results = zip(*self._results, strict=True)
        self._results = []
        losses = self.ranks.sum(torch.stack([result.loss_sum for result in results]))
        norms, usable = (
            torch.stack([getattr(result, name).double() for result in results]).to(losses.device)
            for name in ("norm", "usable")
        )
        numbers = torch.stack([losses, norms, usable], dim=1)
        if numbers.is_cuda:  # copied behind the steps' work; the host goes on
            there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = there.copy_(numbers, non_blocking=True)
        return Unread(steps, tuple(result.loss_tokens for result in results), numbers)

    def catch_up(self) -> None:
        """Hear of every step so far, also of those that get no line: before a save, which is to be of a good run."""
        self.flush()
        if self._results:
            unread = self._send_for_numbers()
            mark(self.ranks.device).wait()
            steps = unread.read()
            self.skipped += sum(not one.usable for one in steps)
            self.on_steps(steps)

    def flush(self) -> None:
        """Read what is pending, and write its line."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.ended.wait()
        steps = pending.unread.read()
        self.skipped += sum(not one.usable for one in steps)
        last, window = steps[-1], pending.window
        seconds = seconds_between(window.began, pending.ended) / window.steps
        self.step_seconds = seconds
        mfu = None
        if self.peak is not None and math.isfinite(window.flops):
            mfu = round(window.flops / window.steps / seconds / self.peak, 4)
        allocated, reserved = self.ranks.largest(_peak_memory_gib(self.ranks.device)), _reserved_gib(self.ranks)
        line: dict[str, float | int | None] = {
            "step": last.step,
            "attempt": self.attempt,
            "loss": last.loss if math.isfinite(last.loss) else None,
            "grad_norm": last.norm if math.isfinite(last.norm) else None,
            "lr": pending.lr,
            "tokens": pending.tokens,
            "tokens_per_second": round(window.loss_tokens / window.steps / seconds, 1),
            "mfu": mfu,
            "memory_gib": round(allocated, 3),
            "reserved_gib": reserved,
            "data_seconds": round(window.data_seconds / window.steps, 6),
            "seconds": round(seconds, 6),
            "skipped": self.skipped,
        }
        self.write(line)
        self.reporter.report(line, self.total)
        self.last = line
        self.on_line(Pace(last.step, window.steps, seconds * window.steps, window.positions, mfu, allocated, reserved))
        self.on_steps(steps)

    def write(self, line: Line) -> None:
        for sink in self.sinks:
            try:
                sink.write(line)
            except OSError as error:  # a full disk must not end a run that can go on without it
                if sink not in self._failed:
                    self._failed.append(sink)
                    self.reporter.warn(f"{sink.name} cannot be written: {error.strerror}. Training goes on.")

    def forget(self) -> None:
        """Steps that are not to count: the run goes back to before them."""
        self._pending, self._results = None, []
        self.restart_clock()

    def restart_clock(self) -> None:
        """After work that is not training: an evaluation, a save."""
        self._window = Window(mark(self.ranks.device))

    def close(self) -> None:
        for sink in self.sinks:
            try:
                sink.close()
            except OSError as error:
                self.reporter.warn(f"{sink.name} could not be written to the end: {error.strerror}.")


def next_attempt(metrics: Path) -> int:
    """0 for a first start, one more than the last line's after that."""
    found = last_line(metrics).get("attempt")
    return found + 1 if isinstance(found, int) else 0


def _reserved_gib(ranks: Ranks) -> float | None:
    """What the allocator holds, the worst rank's: what must be free on a GPU. A CPU has no such thing."""
    if ranks.device.type != "cuda":
        return None
    return round(ranks.largest(torch.cuda.max_memory_reserved(ranks.device) / 2**30), 3)


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

"""Progress output of a run on standard error, from rank 0 only.

In a terminal a progress bar is updated; in a file or a pipe every report is a line of its own.
"""

import logging
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from shoal.observe.logs import EVENT, LOGGER, PRINTED

Line = Mapping[str, float | int | None]
TREND = 20  # log lines
FLAT = 0.002  # relative change of the loss that counts as none
SMALLEST_SHOWN = 0.005  # share of the time


class Reporter:
    """Prints messages, warnings and progress. Standard output is reserved for `--json`."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: Any = None
        self._trend = Trend()

    def say(self, text: str) -> None:
        if self.enabled and LOGGER.isEnabledFor(logging.INFO):
            self._print(text)
            LOGGER.info("%s", text, extra={PRINTED: True})

    def warn(self, text: str, *, event: bool = True) -> None:
        """`event` False: what happens is an event of its own, and the warning is not another."""
        if self.enabled:
            self._print(f"warning: {text}", style="yellow")
            LOGGER.warning("%s", text, extra={PRINTED: True, EVENT: event})

    def _print(self, text: str, style: str | None = None) -> None:
        if self._console.is_terminal:
            self._console.print(text, style=style, markup=False)
        else:  # rich takes ten times as long, for the same text
            self._console.file.write(f"{text}\n")
            self._console.file.flush()

    def begin(
        self, step: int, total: int, *, noun: str = "step", waiting: str = "the first steps compile and warm up"
    ) -> None:
        """Show the progress bar."""
        if self.enabled and self._console.is_terminal and LOGGER.isEnabledFor(logging.INFO):
            columns: list[ProgressColumn] = [TextColumn(noun), MofNCompleteColumn(), BarColumn(), _MetricsColumn()]
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=total, completed=step, line=waiting)
            self._bar.start()

    def advance(self, step: int) -> None:
        """A step was launched. Does not wait for the device."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def report(self, line: Line, total: int) -> None:
        """Print the metrics of a step."""
        text = format_metrics(line, total, self._trend.after(line.get("loss")))
        self.tell(text if self._bar is not None else f"step {line['step']}/{total}  {text}")
        if self._bar is not None:
            LOGGER.info("step %s/%d  %s", line["step"], total, text, extra={PRINTED: True})

    def report_evaluation(self, line: Line) -> None:
        """Print the metrics of an evaluation."""
        shown = {name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_")}
        parts = (f"{name} {'non-finite' if value is None else f'{value:.4f}'}" for name, value in shown.items())
        self.say(f"step {line['step']}  evaluation: {', '.join(parts)}")

    def tell(self, text: str) -> None:
        """Show `text` beside the progress bar, or on a line of its own."""
        if self._bar is not None:
            self._bar.update(self._task, line=text)
        else:
            self.say(text)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _MetricsColumn(ProgressColumn):
    """Loss, speed and other metrics, truncated at the width of the terminal."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["line"], no_wrap=True, overflow="ellipsis")


class Trend:
    """Whether the loss falls or rises: the mean of the last log lines against that of those before."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=TREND)

    def after(self, loss: float | None) -> str:
        """An arrow, with this loss; empty while there are few."""
        if loss is not None:
            self._losses.append(loss)
        half = len(self._losses) // 2
        if half < 2:
            return ""
        losses = list(self._losses)
        before, now = sum(losses[:half]) / half, sum(losses[-half:]) / half
        change = (now - before) / max(abs(before), 1e-12)
        return "→" if abs(change) < FLAT else "↓" if change < 0 else "↑"


def format_metrics(line: Line, total: int, trend: str = "") -> str:
    """A line of `metrics.jsonl` in human-readable form."""
    parts = []
    for name, text in (("loss", "loss {:.4f}"), ("grad_norm", "norm {:.3f}"), ("lr", "lr {:.2e}")):
        value = line[name]
        parts.append(f"{name} non-finite" if value is None else text.format(value))
        if name == "loss" and trend:
            parts[-1] += f" {trend}"
    if line.get("samples_per_second") is not None:  # not a language model
        parts.append(f"{line['samples_per_second']:,.0f} samples/s")
    else:
        parts.append(f"{line['tokens_per_second']:,.0f} tok/s")
    if line.get("mfu") is not None:
        parts.append(f"MFU {line['mfu']:.1%}")
    whole = line.get("memory_total_gib")
    parts.append(f"{line['memory_gib']:.2f} GiB" if whole is None else f"{line['memory_gib']:.1f}/{whole:.0f} GiB")
    waited = [f"{name} {share:.0%}" for name, share in waits(line).items() if share >= SMALLEST_SHOWN]
    parts += [f"waits: {', '.join(waited)}"] if waited else []
    parts += _gpu(line)
    seconds, step = line["seconds"], line["step"]
    if seconds is not None and step is not None and step < total:
        parts.append(f"{duration((seconds + (line.get('save_seconds') or 0)) * (total - step))} left")
    return "  ".join(parts)


def waits(line: Line) -> dict[str, float]:
    """The shares of a step's time in which it waited for data, for communication and for checkpoints, where known."""
    whole = (line.get("seconds") or 0) + (line.get("save_seconds") or 0)
    names = {"data": "data_seconds", "communication": "communication_seconds", "checkpoints": "save_seconds"}
    found = {name: line.get(key) for name, key in names.items()}
    return {name: seconds / whole for name, seconds in found.items() if seconds is not None and whole > 0}


def _gpu(line: Line) -> list[str]:
    """What NVML tells, where it does."""
    names = (("gpu_utilization", "GPU {:.0f}%"), ("power_watts", "{:.0f} W"), ("temperature_celsius", "{:.0f} °C"))
    found = [text.format(value) for name, text in names if (value := line.get(name)) is not None]
    return [" ".join(found)] if found else []


def duration(seconds: float) -> str:
    """'42s', '3m 05s', '2h 10m'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"

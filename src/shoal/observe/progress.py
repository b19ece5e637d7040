"""Progress output of a run on standard error, from rank 0 only.

In a terminal a progress bar is updated; in a file or a pipe every report is a line of its own.
"""

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

Line = Mapping[str, float | int | None]


class Reporter:
    """Prints messages, warnings and progress. Standard output is reserved for `--json`."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: Any = None

    def say(self, text: str) -> None:
        if self.enabled:
            self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        if self.enabled:
            self._console.print(f"warning: {text}", style="yellow", markup=False)

    def begin(
        self, step: int, total: int, *, noun: str = "step", waiting: str = "the first steps compile and warm up"
    ) -> None:
        """Show the progress bar."""
        if self.enabled and self._console.is_terminal:
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
        text = f"step {line['step']}/{total}  {format_metrics(line, total)}"
        self.tell(format_metrics(line, total) if self._bar is not None else text)

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


def format_metrics(line: Line, total: int) -> str:
    """A line of `metrics.jsonl` in human-readable form."""
    parts = []
    for name, text in (("loss", "loss {:.4f}"), ("grad_norm", "norm {:.3f}"), ("lr", "lr {:.2e}")):
        value = line[name]
        parts.append(f"{name} non-finite" if value is None else text.format(value))
    parts.append(f"{line['tokens_per_second']:,.0f} tok/s")
    if line.get("mfu") is not None:
        parts.append(f"MFU {line['mfu']:.1%}")
    parts.append(f"{line['memory_gib']:.2f} GiB")
    seconds, step = line["seconds"], line["step"]
    if seconds is not None and step is not None and step < total:
        parts.append(f"{duration(seconds * (total - step))} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """'42s', '3m 05s', '2h 10m'."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"

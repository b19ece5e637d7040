"""What a person sees while a run goes: one line a report, on standard error, from rank 0 alone."""

import sys
from collections.abc import Mapping

from rich.console import Console


class Reporter:
    """Says things to the person at the terminal. Standard output stays free for `--json`."""

    def __init__(self, *, speaks: bool) -> None:
        self.speaks = speaks
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        if self.speaks:
            self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        if self.speaks:
            self._console.print(f"warning: {text}", style="yellow", markup=False)

    def step(self, line: Mapping[str, float | int | None], total: int) -> None:
        parts = [f"step {line['step']}/{total}"]
        for name, text in (("loss", "loss {:.4f}"), ("grad_norm", "norm {:.3f}"), ("lr", "lr {:.2e}")):
            value = line[name]
            parts.append(f"{name} is not a number" if value is None else text.format(value))
        parts.append(f"{line['tokens_per_second']:,.0f} tok/s")
        if line.get("mfu") is not None:
            parts.append(f"MFU {line['mfu']:.1%}")
        parts.append(f"{line['memory_gib']:.2f} GiB")
        seconds, step = line["seconds"], line["step"]
        if seconds is not None and step is not None:
            parts.append(f"{duration(seconds * (total - step))} left")
        self.say("  ".join(parts))


def duration(seconds: float) -> str:
    """'42s', '3m 05s', '2h 10m': as short as it stays clear."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"

"""Compare the forecast with the first steps of the run. Both are in `plan.json`; a large difference is a warning."""

from typing import Any

from shoal.config.run import RunDirectory
from shoal.observe.metrics import Line
from shoal.observe.progress import Reporter
from shoal.plan.resolved import ResolvedRun
from shoal.train.describe import write_plan
from shoal.train.hooks import Hook, LogInterval, RunStart

# Steps after a start that are not measured: they compile and allocate the optimizer state.
WARM_UP = 5
# Steps to measure.
ENOUGH = 10
# Relative difference above which there is a warning.
FAR_OFF = 0.10
# Sequences are full, as the forecast assumes, from this share of non-padding tokens on.
FULL = 0.98


class Comparison(Hook):
    """Collects log intervals until enough steps are measured. Every rank has one; rank 0 writes."""

    def __init__(self, run: RunDirectory, resolved: ResolvedRun, plan: dict[str, Any], reporter: Reporter) -> None:
        self.run = run
        self.resolved = resolved
        self.plan = plan  # the contents of plan.json; updated, for a fallback folder that is made later
        self.reporter = reporter
        self.first_step = 0
        self.writes = False
        self.seen: list[LogInterval] = []
        self.done = False

    def on_run_start(self, start: RunStart) -> None:
        self.first_step, self.writes = start.step, start.ranks.first

    def on_metrics(self, line: Line, interval: LogInterval) -> None:
        """Record the steps of a log interval, unless one of them is a warm-up step or was profiled."""
        if self.done or interval.profiled or interval.step - interval.steps < self.first_step + WARM_UP:
            return
        self.seen.append(interval)
        if sum(one.steps for one in self.seen) >= ENOUGH:
            self._write()

    def on_run_end(self, error: BaseException | None) -> None:
        if error is None:
            self._write()

    def _write(self) -> None:
        """Write what was measured, if any steps were."""
        if self.done or not self.seen:
            return
        self.done = True
        measured, off = self._measure()
        self.plan |= {"measured": measured, "off": off}
        if not self.writes:
            return
        try:
            write_plan(self.run, self.plan)
        except OSError as error:  # a full disk must not end a run that does not depend on this file
            self.reporter.warn(f"{self.run.plan} cannot be written: {error.strerror}. Training continues.")
        for sentence in self._warnings(measured, off):
            self.reporter.warn(sentence)

    def _measure(self) -> tuple[dict[str, Any], dict[str, float] | None]:
        """The measurement, and its relative difference from the forecast if the two can be compared."""
        run, last = self.resolved.run, self.seen[-1]
        steps = sum(one.steps for one in self.seen)
        seconds = sum(one.seconds for one in self.seen)
        positions = sum(one.positions for one in self.seen)
        flops_share = [one.mfu * one.seconds for one in self.seen if one.mfu is not None]
        on_device = last.reserved_gib is not None  # on CPU only the memory of the process is known
        speed = positions / seconds / (run.mesh.tp * run.mesh.cp * run.mesh.pp)
        measured = {
            "steps": [last.step - steps + 1, last.step],
            "full_sequences": positions >= FULL * steps * run.micro_batch * run.grad_accum_steps * run.length,
            "memory": {
                "allocated_gib": round(last.allocated_gib, 3) if on_device else None,
                "reserved_gib": last.reserved_gib,
            },
            "speed": {
                "tokens_per_second_per_gpu": round(speed, 1 if speed > 100 else 3),
                "step_seconds": round(seconds / steps, 6),
                "mfu": round(sum(flops_share) / seconds, 4) if len(flops_share) == len(self.seen) else None,
            },
        }
        if not (self.resolved.is_promise and on_device and measured["full_sequences"]):
            return measured, None
        memory, forecast = self.resolved.memory, self.resolved.speed
        return measured, {
            "memory": round(last.allocated_gib / (memory.allocated / 2**30) - 1, 4),
            "speed": round(speed / forecast.tokens_per_second_per_gpu - 1, 4),
        }

    def _warnings(self, measured: dict[str, Any], off: dict[str, float] | None) -> list[str]:
        found = []
        resolved = self.resolved
        if off is not None and abs(off["memory"]) > FAR_OFF:
            largest = max(resolved.memory.worst.peak.tree.parts, key=lambda term: term.amount)
            found.append(
                f"memory is {abs(off['memory']):.0%} {'above' if off['memory'] > 0 else 'below'} its forecast: "
                f"{measured['memory']['allocated_gib']:.1f} GiB allocated, {resolved.memory.allocated / 2**30:.1f} "
                f"expected; the largest term is {largest.name} ({largest.amount / 2**30:.1f} GiB)."
            )
        if off is not None and abs(off["speed"]) > FAR_OFF:
            found.append(
                f"the run is {abs(off['speed']):.0%} {'faster' if off['speed'] > 0 else 'slower'} than its forecast: "
                f"{measured['speed']['tokens_per_second_per_gpu']:,.0f} tokens/s per device, "
                f"{resolved.speed.tokens_per_second_per_gpu:,.0f} expected."
            )
        return found

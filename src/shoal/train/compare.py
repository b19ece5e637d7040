"""The forecast against a run's own first steps: both stand in `plan.json`, and where they differ it is said."""

from typing import Any

from shoal.train.describe import write_plan
from shoal.train.job import Job
from shoal.train.log import Pace

# Steps after a start that are no measure: they compile, and make the optimizer's state.
WARM_UP = 5
# Steps that are enough.
ENOUGH = 10
# What is worth a warning.
FAR_OFF = 0.10
# Rows this full are as long as the forecast takes them to be.
FULL = 0.98


class Comparison:
    """Looks at lines until it has seen enough steps. Every rank has one, and the first writes."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.begun = job.progress.step
        self.seen: list[Pace] = []
        self.done = False

    def look(self, pace: Pace) -> None:
        """Take note of the steps of a line, unless one of them is of those that warm up."""
        if self.done or pace.step - pace.steps < self.begun + WARM_UP:
            return
        self.seen.append(pace)
        if sum(one.steps for one in self.seen) >= ENOUGH:
            self.end()

    def end(self) -> None:
        """Write what was measured; nothing, where no steps were."""
        if self.done or not self.seen:
            return
        self.done = True
        measured, off = self._measure()
        self.job.plan |= {"measured": measured, "off": off}
        if not self.job.ranks.first:
            return
        try:
            write_plan(self.job.run, self.job.plan)
        except OSError as error:  # a full disk must not end a run that can go on without it
            self.job.reporter.warn(f"{self.job.run.plan} cannot be written: {error.strerror}. Training goes on.")
        for sentence in self._warnings(measured, off):
            self.job.reporter.warn(sentence)

    def _measure(self) -> tuple[dict[str, Any], dict[str, float] | None]:
        """What was measured, and by which share it is off the forecast, if the two can be compared."""
        run, last = self.job.forecast.choice.run, self.seen[-1]
        steps = sum(one.steps for one in self.seen)
        seconds = sum(one.seconds for one in self.seen)
        positions = sum(one.positions for one in self.seen)
        rates = [one.mfu * one.seconds for one in self.seen if one.mfu is not None]
        on_device = last.reserved_gib is not None  # the memory of a process is no device's
        speed = positions / seconds / (run.mesh.tp * run.mesh.cp * run.mesh.pp)
        measured = {
            "steps": [last.step - steps + 1, last.step],
            "full_rows": positions >= FULL * steps * run.micro_batch * run.grad_accum_steps * run.length,
            "memory": {
                "allocated_gib": round(last.allocated_gib, 3) if on_device else None,
                "reserved_gib": last.reserved_gib,
            },
            "speed": {
                "tokens_per_second_per_gpu": round(speed, 1 if speed > 100 else 3),
                "step_seconds": round(seconds / steps, 6),
                "mfu": round(sum(rates) / seconds, 4) if len(rates) == len(self.seen) else None,
            },
        }
        if not (self.job.forecast.is_promise and on_device and measured["full_rows"]):
            return measured, None
        memory, forecast = self.job.forecast.choice.memory, self.job.forecast.choice.speed
        return measured, {
            "memory": round(last.allocated_gib / (memory.allocated / 2**30) - 1, 4),
            "speed": round(speed / forecast.tokens_per_second_per_gpu - 1, 4),
        }

    def _warnings(self, measured: dict[str, Any], off: dict[str, float] | None) -> list[str]:
        found = []
        choice = self.job.forecast.choice
        if off is not None and abs(off["memory"]) > FAR_OFF:
            largest = max(choice.memory.worst.peak.tree.parts, key=lambda term: term.amount)
            found.append(
                f"memory is {abs(off['memory']):.0%} {'above' if off['memory'] > 0 else 'below'} its forecast: "
                f"{measured['memory']['allocated_gib']:.1f} GiB allocated, {choice.memory.allocated / 2**30:.1f} "
                f"expected, of which the largest part is {largest.name} ({largest.amount / 2**30:.1f} GiB)."
            )
        if off is not None and abs(off["speed"]) > FAR_OFF:
            found.append(
                f"the run is {abs(off['speed']):.0%} {'faster' if off['speed'] > 0 else 'slower'} than its forecast: "
                f"{measured['speed']['tokens_per_second_per_gpu']:,.0f} tokens/s a device, "
                f"{choice.speed.tokens_per_second_per_gpu:,.0f} expected."
            )
        return found

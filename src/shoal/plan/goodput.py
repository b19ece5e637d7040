"""What a long run really costs: interruptions, restarts, work that is done twice, and the time of saving checkpoints.

Interruptions come at random with a constant rate per device, as published logs show. Between two of them the run
repeats: an interval of steps, then a save that blocks it for a while and is complete some time later. What was done
after the last complete checkpoint is lost. With a mean time M between interruptions, restarts of R, intervals of T,
saves that block for C and are complete W after that, a span without interruption of length U contains
floor((U - W) / (T + C)) intervals that are kept. U is exponentially distributed, so that their mean is
exp(-W/M) / (exp((T + C)/M) - 1); and a restart, which may be interrupted too, takes M (exp(R/M) - 1). Hence the share
of time that is useful:

    T exp(-W/M) / (M exp(R/M) (exp((T + C)/M) - 1))

With W = 0 this is Daly's model (A higher order estimate of the optimum checkpoint interval, 2006). R and W do not
change the best interval, which is Young's sqrt(2 C M) where C is much less than M. A save waits for the one before it
to be complete, so that with T < W it blocks for W - T + C. benchmarks/goodput simulates it.
"""

from dataclasses import dataclass
from math import ceil, exp, expm1, sqrt
from typing import Any

from shoal.config.schema import Config
from shoal.config.schema_hardware import HardwareConfig
from shoal.config.schema_run import CheckpointConfig
from shoal.plan.batches import divisors
from shoal.plan.machine import Machine
from shoal.plan.memory.states import saved_bytes
from shoal.plan.run.layout import ranks
from shoal.plan.run.run import Run
from shoal.plan.speed.offload import HOST_LINK_SHARE

HOUR, DAY = 3600.0, 86400.0
# Device hours between interruptions. The Llama 3 Herd of Models (2024), section 3.3.4: 419 unexpected interruptions in
# 54 days on 16,384 GPUs.
MTBF_HOURS = 54 * 24 * 16_384 / 419
# From the interruption to where training was at the last checkpoint. In the same 54 days more than 90% of the time was
# effective, with 466 interruptions in all: at most 17 minutes each, with the steps that were lost.
RESTART_MINUTES = 15.0
# Bytes per second of a node that writes checkpoints, with hashes and fsync: benchmarks/checkpoints, rounded down.
DISK = 1.0e9
# The same of the copy in host memory that an asynchronous save makes on a CPU.
HOST_COPY = 3.0e9
# No save blocks for less: the device has to finish its queue, and the state is collected. From the same measurements.
LEAST_BLOCKED = 0.1


@dataclass(frozen=True)
class Conditions:
    """What the best interval between checkpoints and the effective share of time depend on, in seconds."""

    mtbf: float  # mean time between interruptions of the whole run
    restart: float  # from an interruption to the state of the last checkpoint
    blocked: float  # for which a save blocks training
    written: float  # until the checkpoint is complete, after that

    def share(self, interval: float) -> float:
        """The share of time that is useful, with `interval` of training between saves."""
        cycle = (interval + self.blocks_after(interval)) / self.mtbf
        lost = (self.restart + self.written) / self.mtbf
        if cycle + lost > 700:  # nothing is ever completed between two interruptions
            return 0.0
        return interval / self.mtbf * exp(-lost) / expm1(cycle)

    def blocks_after(self, interval: float) -> float:
        """Seconds for which a save blocks training, the wait for the save before it among them."""
        return self.blocked + max(0.0, self.written - interval)

    @property
    def up(self) -> float:
        """The share of time that is not spent on restarts."""
        return exp(-min(700.0, self.restart / self.mtbf))

    @property
    def best(self) -> float:
        """The interval with the largest share: the x > 0 with 1 - exp(-(x + C)/M) = x/M; but a save that waits for the
        one before it only loses time."""
        interval = min(sqrt(2 * self.blocked * self.mtbf), self.mtbf)
        for _ in range(50):  # Newton's method, for a function that is convex: it converges from Young's interval
            gone = -expm1(-(interval + self.blocked) / self.mtbf)
            step = (interval - gone * self.mtbf) / gone
            interval -= step
            if abs(step) <= 1e-9 * interval:
                break
        return max(interval, self.written)


@dataclass(frozen=True)
class Goodput:
    """The forecast of a run's interruptions and of the time it spends on anything but training."""

    conditions: Conditions
    step_seconds: float
    every: int  # steps between checkpoints
    best_every: int  # what `checkpoint.every: auto` means
    bytes: float  # of a checkpoint
    seconds: float | None  # of all steps, if their number is known

    @property
    def interval(self) -> float:
        return self.every * self.step_seconds

    @property
    def share(self) -> float:
        """The share of time that goes into steps which are kept."""
        return self.conditions.share(self.interval)

    @property
    def best_share(self) -> float:
        return self.conditions.share(self.best_every * self.step_seconds)

    @property
    def saving(self) -> float:
        """The share of time for which saves block training."""
        return self.share * self.conditions.blocks_after(self.interval) / self.interval

    @property
    def restarting(self) -> float:
        return 1 - self.conditions.up

    @property
    def repeating(self) -> float:
        """The share of time that goes into steps which are lost, and done again."""
        return max(0.0, self.conditions.up - self.share - self.saving)

    @property
    def wall_seconds(self) -> float | None:
        """Duration of the run with all of this; None if its number of steps is unknown, or if it never ends."""
        return None if self.seconds is None or self.share < 1e-6 else self.seconds / self.share

    @property
    def interruptions(self) -> float | None:
        """Expected interruptions of the whole run."""
        return None if self.wall_seconds is None else self.wall_seconds / self.conditions.mtbf

    def as_dict(self) -> dict[str, Any]:
        conditions = self.conditions
        return {
            "effective_share": round(self.share, 6),
            "saving_share": round(self.saving, 6),
            "repeated_share": round(self.repeating, 6),
            "restart_share": round(self.restarting, 6),
            "interruptions_per_day": float(f"{DAY / conditions.mtbf:.6g}"),
            "interruptions": None if self.interruptions is None else float(f"{self.interruptions:.6g}"),
            "seconds_to_finish": None if self.wall_seconds is None else round(self.wall_seconds),
            "mtbf_seconds": round(conditions.mtbf, 3),
            "restart_seconds": round(conditions.restart, 3),
            "checkpoint_bytes": round(self.bytes),
            "save_blocks_seconds": round(conditions.blocks_after(self.interval), 4),
            "save_writes_seconds": round(conditions.written, 4),
            "every": self.every,
            "best_every": self.best_every,
            "best_interval_seconds": round(self.best_every * self.step_seconds, 3),
            "best_effective_share": round(self.best_share, 6),
        }


def forecast_goodput(config: Config, run: Run, machine: Machine, step_seconds: float, steps: int | None) -> Goodput:
    """The goodput of `run`, which is that of `config`, with steps of `step_seconds`."""
    size = total_bytes(run)
    found = conditions(config.hardware, config.checkpoint, machine, size, copies=run.offload != "nvme")
    best = best_every(found, step_seconds, config)
    every = config.checkpoint.every
    return Goodput(
        conditions=found,
        step_seconds=step_seconds,
        every=best if every == "auto" else every,
        best_every=best,
        bytes=size,
        seconds=None if steps is None else steps * step_seconds,
    )


def total_bytes(run: Run) -> float:
    """Bytes of a checkpoint, over all ranks."""
    stages = ranks(run.shape, run.mesh.pp, run.schedule)
    return sum(saved_bytes(run, rank) for rank in stages) * run.mesh.tp


def conditions(
    hardware: HardwareConfig, checkpoint: CheckpointConfig, machine: Machine, size: float, *, copies: bool = True
) -> Conditions:
    """Of a run whose checkpoints have `size` bytes. `copies`: host memory can hold a copy of the state."""
    world, nodes = machine.world_size, machine.nodes
    disk = DISK if hardware.disk_gb_per_second is None else hardware.disk_gb_per_second * 1e9
    one_writer = checkpoint.format == "full"
    written = size / (disk if one_writer else disk * nodes)
    blocked = written
    if checkpoint.async_ and copies:
        # Each rank copies its part to the host, in the stream of its device; ranks on a CPU share the host's memory.
        speed = HOST_COPY if machine.is_cpu else machine.gpu.host_link.bytes_per_second * HOST_LINK_SHARE
        writers = 1 if one_writer else nodes if machine.is_cpu else world
        blocked = max(LEAST_BLOCKED, size / writers / speed)
    hours = MTBF_HOURS if hardware.mtbf_hours is None else hardware.mtbf_hours
    minutes = RESTART_MINUTES if hardware.restart_minutes is None else hardware.restart_minutes
    return Conditions(
        mtbf=hours * HOUR / world,
        restart=minutes * 60,
        blocked=blocked,
        written=written if checkpoint.async_ and copies else 0.0,
    )


def best_every(found: Conditions, step_seconds: float, config: Config) -> int:
    """The best interval in steps. The optimum is flat, but where saves wait for each other, so that it is rounded to
    where checkpoints are of use: to a divisor of `checkpoint.keep_every`, or so that evaluations and checkpoints
    coincide, for `keep_best`."""
    steps, least = max(1.0, found.best / step_seconds), found.written / step_seconds
    keep, evaluated = config.checkpoint.keep_every, config.eval.every
    if keep is not None:
        return _nearest_divisor(keep, steps, least)
    if config.data.validation == 0 or not config.checkpoint.keep_best or config.checkpoint.metric != "eval_loss":
        return ceil(steps)
    if steps < evaluated:
        return _nearest_divisor(evaluated, steps, least)
    rounded = round(steps / evaluated) * evaluated
    return rounded if rounded >= least else rounded + evaluated


def _nearest_divisor(value: int, wanted: float, least: float) -> int:
    """By ratio, and not below `least` if there is one. Only of what is a plausible number of steps."""
    if value > 10**9:
        return ceil(wanted)
    found = divisors(value)
    return min((one for one in found if one >= least), key=lambda one: max(one / wanted, wanted / one), default=value)

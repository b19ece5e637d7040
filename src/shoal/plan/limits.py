"""The largest run that the chosen configuration allows: micro-batch, sequence length, and fewest devices."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from shoal.config.mesh import configured_degrees
from shoal.plan.advise import Question, changed
from shoal.plan.from_config import choose_loss
from shoal.plan.machine import Machine
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.memory.fragmentation import is_replayed
from shoal.plan.resolved import ResolvedRun, fits
from shoal.plan.run.run import Run
from shoal.plan.terms import GIB

MAX_LENGTH = 1 << 22
MAX_MICRO_BATCH = 1 << 14
MAX_DEVICES = 4096


@dataclass(frozen=True)
class Limits:
    """The largest run that the chosen configuration allows."""

    micro_batch: int | None
    length: int | None
    devices: int | None

    def as_dict(self) -> dict[str, Any]:
        return {"largest_micro_batch": self.micro_batch, "longest_sequence": self.length, "fewest_gpus": self.devices}


def limits(choice: ResolvedRun, question: Question) -> Limits:
    """The largest micro-batch, the longest sequence at a micro-batch of one, and the fewest devices."""
    run, machine, config = choice.run, choice.machine, choice.config
    if machine.is_cpu:
        return Limits(None, None, None)
    unit = 64 * run.mesh.tp * run.mesh.cp * 2

    def with_micro_batch(size: int) -> Run:
        loss = choose_loss(config, run.shape, size * run.length // run.mesh.cp)
        return run.with_(micro_batch=size, loss=loss)

    def with_length(units: int) -> Run:
        loss = choose_loss(config, run.shape, units * unit // run.mesh.cp)
        return run.with_(micro_batch=1, length=units * unit, loss=loss)

    largest = _largest_replayed if is_replayed(run) else _largest_run
    micro_batch = largest(with_micro_batch, machine, MAX_MICRO_BATCH)
    units = largest(with_length, machine, MAX_LENGTH // unit)
    return Limits(micro_batch or None, units * unit or None, _fewest(question))


def _largest_run(run_with: Callable[[int], Run], machine: Machine, most: int) -> int:
    return _largest(lambda value: fits(run_with(value), machine), most)


def _largest_replayed(run_with: Callable[[int], Run], machine: Machine, most: int) -> int:
    """The largest value that fits where only a replay of the allocator can tell, to within a sixteenth: downwards from
    the largest whose tensors alone fit, each time with as much left free as the gaps that the one before had."""
    part = 16

    def largest_that_leaves(gib: float, most: int) -> int:
        left = machine.gpu.memory_gib - gib
        return _largest(lambda value: not forecast_memory(run_with(value)).exceeds(left), most, part)

    value, above = largest_that_leaves(0.0, most), 0
    while value and not fits(run_with(value), machine):
        above, gaps = value, forecast_memory(run_with(value)).worst.reserve / GIB
        value = min(value - max(1, value // part), largest_that_leaves(gaps, value))
    # A smaller run has smaller gaps.
    while above - value > max(1, value // part):
        middle = (value + above) // 2
        value, above = (middle, above) if fits(run_with(middle), machine) else (value, middle)
    return value


def _largest(works: Callable[[int], bool], most: int, part: int = 64) -> int:
    """The largest value that works, less at most one of `part` parts; 0 if none does."""
    if not works(1):
        return 0
    low, high = 1, 2
    while high <= most and works(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > max(1, low // part):
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def _fewest(question: Question) -> int | None:
    """The smallest power of two of these devices on which some data-parallel strategy fits."""
    degrees = configured_degrees(question.config.parallel)
    within, stages = prod(degrees.values()), degrees.get("pp", 1)
    free = {"parallel.strategy": "auto", "train.micro_batch": 1}
    count = within
    while count <= MAX_DEVICES:
        devices = min(count, max(question.machine.devices, 8))
        machine = question.machine.of(devices, -(-count // devices))
        ranks = max(1, count // within)
        # As many micro-batches as tell, if the batch has them: accumulated gradients take more memory, and a pipeline
        # holds several.
        grad_accum_steps = max(1, min(2 * stages, question.config.train.global_batch // ranks))
        if grad_accum_steps > stages:
            grad_accum_steps -= grad_accum_steps % stages
        config = changed(question.config, {**free, "train.global_batch": ranks * grad_accum_steps})
        one = Question(config, question.shape, machine, question.traits).answer()
        if one is not None and one.fits:
            return count
        count *= 2
    return None

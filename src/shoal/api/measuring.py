"""Measure training steps, one rank of many, scaling, batch sizes, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.api.arguments import as_list, check_at_least
from shoal.api.training import AnyConfig, read

if TYPE_CHECKING:
    from shoal.bench.batch import BatchReport
    from shoal.bench.collectives_report import CollectivesReport
    from shoal.bench.hardware import HardwareReport
    from shoal.bench.scaling import ScalingReport
    from shoal.bench.training import RankReport, Steps


def bench_train(
    config: AnyConfig, *, steps: int = 20, warmup: int = 5, report: Callable[[str], None] = lambda _: None
) -> Steps:
    """Train a few steps of `config` in a separate process, without saving, and measure them."""
    from shoal.bench.training import measure_training
    from shoal.models.peft_config import follow_adapter

    _check_steps(steps, warmup)
    return measure_training(follow_adapter(read(config)), steps=steps, warmup=warmup, report=report)


def bench_rank(
    config: AnyConfig,
    world_size: int,
    *,
    steps: int = 10,
    warmup: int = 4,
    real: bool | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> RankReport:
    """Run one rank of `world_size` and compare it with its forecast.

    With `real`, steps are run and collectives return at once. Otherwise a step is traced on fake tensors, which
    measures memory only. The default is real on a GPU and traced without one.
    """
    from shoal.bench.training import measure_rank
    from shoal.models.peft_config import follow_adapter

    check_at_least("world_size", world_size, 1)
    _check_steps(steps, warmup)
    return measure_rank(follow_adapter(read(config)), world_size, steps=steps, warmup=warmup, real=real, report=report)


def bench_hardware(
    *, devices: int | None = None, output: Path | str | None = None, report: Callable[[str], None] = lambda _: None
) -> HardwareReport:
    """Measure this machine's device, host and, between `devices`, links: the block `hardware` of a config.

    `devices` is every GPU by default. `output` is a YAML file that other configs include.
    """
    from shoal.bench.hardware import measure_hardware

    if devices is not None:
        check_at_least("devices", devices, 1)
    return measure_hardware(devices=devices, output=None if output is None else Path(output), report=report)


def bench_collectives(
    *,
    devices: int | None = None,
    largest: int | str | None = None,
    dtype: str = "fp32",
    repeat: int = 20,
    seconds: float = 1.0,
    link: str | None = None,
    output: Path | str | None = None,
) -> CollectivesReport:
    """Measure all-reduce, all-gather and reduce-scatter; see `shoal bench collectives --help`.

    Under torchrun or srun, every rank calls this and gets the same report.
    """
    from shoal.bench.collectives_request import make_request, named_link

    request = make_request(largest=largest, dtype=dtype, repeat=repeat, seconds=seconds)
    named = named_link(link)
    from shoal.bench.collectives import measure_collectives

    return measure_collectives(request, devices=devices, link=named, output=None if output is None else Path(output))


def bench_scaling(
    config: AnyConfig,
    *,
    devices: Sequence[int] = (1, 2, 4, 8),
    strategies: Sequence[str] = ("ddp", "fsdp"),
    steps: int = 10,
    warmup: int = 4,
    measures: bool = True,
    output: Path | str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> ScalingReport:
    """Train the same global batch on each number of `devices` and compare time and memory with the forecast."""
    from shoal.bench.output import make_folder, write_report
    from shoal.bench.scaling import measure_scaling
    from shoal.bench.steps import check_measurable
    from shoal.models.peft_config import follow_adapter

    _check_steps(steps, warmup)
    config = read(config)
    if measures:
        check_measurable(config)
    if output is not None:
        make_folder(Path(output))
    found = measure_scaling(
        follow_adapter(config),
        as_list(devices),
        as_list(strategies),
        steps=steps,
        warmup=warmup,
        measures=measures,
        report=report,
    )
    if output is not None:
        from shoal.bench.curves_plot import plot_scaling

        for note in write_report(found.as_dict(), Path(output), lambda: plot_scaling(found)):
            report(f"warning: {note}")
    return found


def bench_batch(
    config: AnyConfig,
    *,
    up_to: int | None = None,
    steps: int = 10,
    warmup: int = 4,
    measures: bool = True,
    output: Path | str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> BatchReport:
    """Double the micro-batch until it no longer fits, with and without activation checkpointing."""
    from shoal.bench.batch import measure_batches
    from shoal.bench.output import make_folder, write_report
    from shoal.bench.steps import check_measurable
    from shoal.models.peft_config import follow_adapter

    _check_steps(steps, warmup)
    config = read(config)
    if measures:
        check_measurable(config)
    if output is not None:
        make_folder(Path(output))
    found = measure_batches(
        follow_adapter(config), up_to=up_to, steps=steps, warmup=warmup, measures=measures, report=report
    )
    if output is not None:
        from shoal.bench.curves_plot import plot_batches

        for note in write_report(found.as_dict(), Path(output), lambda: plot_batches(found)):
            report(f"warning: {note}")
    return found


def _check_steps(steps: int, warmup: int) -> None:
    check_at_least("steps", steps, 1)
    check_at_least("warmup", warmup, 1)

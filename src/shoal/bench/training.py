"""Measures local training of a config: the full job, or one rank of a larger one."""

import json
from collections.abc import Callable

from shoal.bench.rank import RankReport, report_steps, trace_rank
from shoal.bench.steps import Steps, check_measurable, measure
from shoal.config.schema import Config
from shoal.temporary import temporary_folder

__all__ = ["RankReport", "Steps", "measure_rank", "measure_training"]


def measure_training(
    config: Config, *, steps: int, warmup: int, report: Callable[[str], None] = lambda _: None
) -> Steps:
    """Train `warmup` + `steps` steps of `config` without saving, and measure the latter."""
    check_measurable(config)
    return measure(config, steps=steps, warmup=warmup, worker_options=[], share=1, report=report)


def measure_rank(
    config: Config,
    world_size: int,
    *,
    steps: int,
    warmup: int,
    real: bool | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> RankReport:
    """Compare rank 0 of `world_size` with the forecast. `real`: it trains with fake collectives, which take no time, so
    its losses are meaningless. Not `real`: it is traced, for its memory only. None: real on a GPU, traced without one,
    where models of interesting sizes could not run."""
    if real is None:
        import torch

        real = torch.cuda.is_available()
    if not real:
        return trace_rank(config, world_size, report)
    check_measurable(config)
    with temporary_folder("shoal-bench-") as folder:
        forecast = folder / "forecast.json"
        options = ["--world", str(world_size), "--forecast", str(forecast)]
        found = measure(config, steps=steps, warmup=warmup, worker_options=options, share=world_size, report=report)
        return report_steps(found, json.loads(forecast.read_text()) if forecast.exists() else None)

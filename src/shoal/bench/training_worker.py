"""Worker of `bench.steps`: `python -m shoal.bench.training_worker CONFIG RUNS [--world N --forecast FILE]`.

With `--world` this process is rank 0 of N by itself: collectives return at once, with this rank's own
data. On a GPU the forecast for this run is written to FILE.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.forecast import forecast_compute, forecast_memory, machine_of
from shoal.bench.steps import MISTAKE, OUT_OF_MEMORY
from shoal.catalogue.strategies import find_strategy
from shoal.config.load import load_config
from shoal.config.resolve import with_global_batch, with_precision
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.crash import report_crash
from shoal.launch.join import choose_device
from shoal.launch.processes import RanOut
from shoal.launch.run import start
from shoal.mistakes import RunFailed, UserMistake
from shoal.observe.progress import Reporter
from shoal.parallel.device import inspect_device
from shoal.parallel.ranks import Ranks
from shoal.plan.decide import choose
from shoal.plan.machine import Machine, machine_at_hand
from shoal.plan.models import read_shape
from shoal.plan.resolved import ResolvedRun
from shoal.plan.terms import GIB
from shoal.resilience.out_of_memory import OutOfMemory
from shoal.train.inputs import read_inputs
from shoal.train.loop import train
from shoal.train.preflight import preflight
from shoal.train.setup import Start


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--world", type=int)
    parser.add_argument("--forecast", type=Path)
    given = parser.parse_args()
    config = load_config(given.config)
    try:
        if given.world is None:
            start(config, runs=given.runs)
        else:
            train_as_single_rank(config, given.world, RunDirectory(given.runs / config.name), given.forecast)
    except (UserMistake, RunFailed) as failure:
        print(f"shoal: {failure}", file=sys.stderr)
        if isinstance(failure, OutOfMemory | RanOut):
            return OUT_OF_MEMORY
        return MISTAKE if isinstance(failure, UserMistake) else 1
    except Exception as error:
        print(f"shoal: {report_crash(error, in_run=False)}", file=sys.stderr)
        return 1
    return 0


def train_as_single_rank(config: Config, world_size: int, run: RunDirectory, forecast: Path | None) -> None:
    """Train as rank 0 of `world_size`, without the other ranks."""
    here = machine_of(config, world_size)
    os.environ["LOCAL_WORLD_SIZE"] = str(here.devices)
    device = choose_device(0)
    config = with_global_batch(with_precision(config, inspect_device(device).auto_precision), world_size)
    inputs = read_inputs(config, Reporter(enabled=False))
    checked = preflight(config, inputs, world_size, inspect_device(device))
    resolved = checked.resolved
    if resolved.mesh.pp > 1 or (find_strategy(resolved.strategy).ddp and resolved.data_parallel > 1):
        raise UserMistake(
            f"bench rank cannot replace the collectives of {'pp' if resolved.mesh.pp > 1 else resolved.strategy} by "
            "fake ones; it supports fsdp, zero2 and zero3, with tp and cp. A ddp rank computes the same as one device: "
            "use shoal bench train for its speed, and --traced for its memory."
        )
    dist.init_process_group("fake", rank=0, world_size=world_size)
    run.create(config, overwrite=False)
    train(checked, run, Ranks(0, world_size, 0, device), Start())
    if forecast is not None and device.type == "cuda":
        forecast.write_text(json.dumps(_forecast(resolved, device, here)))


def _forecast(resolved: ResolvedRun, device: torch.device, machines: Machine) -> dict[str, Any]:
    """The forecast for the run that was measured, by the catalogue's shape of the model."""
    found = inspect_device(device)
    machine = machine_at_hand(
        torch.cuda.get_device_name(device),
        found.memory_gib,
        machines.devices,
        machines.nodes,
        hardware=resolved.config.hardware,
    )
    choice = choose(resolved.config, read_shape(resolved.config.model), machine)
    memory = forecast_memory(choice)
    return memory | forecast_compute(choice) | {"reserved_gib": choice.memory.pipeline_ranks[0].reserved / GIB}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the fake process group would block a normal exit

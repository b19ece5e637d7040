"""What `bench.training` starts: `python -m shoal.bench.training_worker CONFIG RUNS [--world N]`.

With `--world` this process is rank 0 of N by itself: exchanges with the others return at once, with this rank's own
numbers in their places.
"""

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from shoal.config.load import load_config
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.launch.join import choose_device
from shoal.launch.run import start
from shoal.mistakes import RunFailed, UserMistake
from shoal.observe.progress import Reporter
from shoal.parallel.device import inspect_device
from shoal.parallel.ranks import Ranks
from shoal.train.inputs import read_inputs
from shoal.train.loop import train
from shoal.train.setup import Start, rehearse

DEVICES_PER_NODE = 8


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--world", type=int)
    given = parser.parse_args()
    config = load_config(given.config)
    try:
        if given.world is None:
            start(config, runs=given.runs)
        else:
            train_alone_as_one_of(config, given.world, RunDirectory(given.runs / config.name))
    except (UserMistake, RunFailed) as failure:
        print(f"shoal: {failure}", file=sys.stderr)
        return 2 if isinstance(failure, UserMistake) else 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def train_alone_as_one_of(config: Config, world_size: int, run: RunDirectory) -> None:
    """Train as the first of `world_size` ranks, of which there is no other."""
    here = config.hardware.devices
    os.environ["LOCAL_WORLD_SIZE"] = str(min(world_size, DEVICES_PER_NODE if here == "auto" else here))
    device = choose_device(0)
    inputs = read_inputs(config, Reporter(speaks=False))
    chosen = rehearse(config, inputs, world_size, inspect_device(device), None)
    if chosen.mesh["pp"] > 1 or (chosen.strategy in ("ddp", "zero1") and chosen.data_parallel > 1):
        raise UserMistake(
            f"bench rank cannot leave out the exchanges of {'pp' if chosen.mesh['pp'] > 1 else chosen.strategy}; it "
            "measures fsdp, zero2 and zero3, with tp and cp. A rank of ddp holds what one device alone does: shoal "
            "bench train."
        )
    dist.init_process_group("fake", rank=0, world_size=world_size)
    run.create(config, overwrite=False)
    train(config, inputs, run, Ranks(0, world_size, 0, device), Start())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a group that is not one would keep the interpreter

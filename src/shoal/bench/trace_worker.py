"""What `bench.rank` starts without a GPU: `python -m shoal.bench.trace_worker CONFIG RESULT --world N`.

In a process of its own, because a process has one process group.
"""

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.bench.forecast import compared_terms, forecast_memory, uncompiled_choice
from shoal.bench.ledger import REDUCING, Fullest
from shoal.bench.trace import LOSS, check_traceable, trace
from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.mistakes import UserMistake
from shoal.parallel.device import describe_machine
from shoal.plan.terms import GIB


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--world", type=int, required=True)
    given = parser.parse_args()
    try:
        found = trace_rank(load_config(given.config), given.world)
    except UserMistake as mistake:
        print(f"shoal: {mistake}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    given.result.write_text(json.dumps(found))
    return 0


def trace_rank(config: Config, world_size: int) -> dict[str, Any]:
    """Forecast and trace of the first of `world_size` ranks, as `bench.rank` reads them."""
    import torch

    choice = uncompiled_choice(config, world_size)
    check_traceable(choice.config, choice.run)
    if world_size > 1:
        dist.init_process_group("fake", rank=0, world_size=world_size)
    traced = trace(choice, lambda sentence: print(sentence, flush=True))
    peak = traced.peak
    return {
        "parameters": traced.parameters,
        "chosen": choice.chosen().as_dict(),
        "device": choice.machine.gpu.name,
        "machine": describe_machine(torch.device("cpu")),
        "forecast": forecast_memory(choice, peak),
        "measured": {
            "allocated_gib": traced.moments[peak].bytes / GIB,
            "fullest": peak,
            "terms_at": peak,
            "terms": compared_terms(_terms(peak, traced.moments[peak])),
            "moments": {name: moment.bytes / GIB for name, moment in traced.moments.items()},
        },
    }


def _terms(part: str, moment: Fullest) -> dict[str, float]:
    """As the forecast counts them: while there is a loss, the gradient that the head will hand on is the head's."""
    terms: dict[str, float] = dict(moment.terms)
    if part == LOSS:
        terms["head"] = terms.get("head", 0) + terms.pop(REDUCING, 0)
    return terms


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a group that is not one would keep the interpreter

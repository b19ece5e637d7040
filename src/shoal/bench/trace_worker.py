"""Worker of `bench.rank` without a GPU: `python -m shoal.bench.trace_worker CONFIG RESULT --world N`.

A separate process, because a process has one default process group.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.bench.forecast import compared_terms, forecast_memory, uncompiled_choice
from shoal.bench.ledger import REDUCING, Peak
from shoal.bench.trace import LOSS, check_traceable, trace
from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.crash import report_crash
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
    except Exception as error:
        print(f"shoal: {report_crash(error)}", file=sys.stderr)
        return 1
    given.result.write_text(json.dumps(found))
    return 0


def trace_rank(config: Config, world_size: int) -> dict[str, Any]:
    """Forecast and trace of rank 0 of `world_size`, as `bench.rank` reads them."""
    import torch

    choice = uncompiled_choice(config, world_size)
    check_traceable(choice.config, choice.run)
    if world_size > 1:
        dist.init_process_group("fake", rank=0, world_size=world_size)
    traced = trace(choice, lambda sentence: print(sentence, flush=True))
    peak = traced.peak
    return {
        "parameters": traced.parameters,
        "chosen": choice.as_dict(),
        "device": choice.machine.gpu.name,
        "machine": describe_machine(torch.device("cpu")),
        "forecast": forecast_memory(choice, peak, traced=True),
        "measured": {
            "allocated_gib": traced.moments[peak].bytes / GIB,
            "peak_at": peak,
            "terms_at": peak,
            "terms": compared_terms(_terms(peak, traced.moments[peak])),
            "moments": {name: moment.bytes / GIB for name, moment in traced.moments.items()},
        },
    }


def _terms(part: str, moment: Peak) -> dict[str, float]:
    """As the forecast counts them: during the loss, the head's gradient counts as head."""
    terms: dict[str, float] = dict(moment.terms)
    if part == LOSS:
        terms["head"] = terms.get("head", 0) + terms.pop(REDUCING, 0)
    return terms


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the fake process group would block a normal exit

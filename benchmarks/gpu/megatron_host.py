"""What the host takes in a step of Megatron-LM, by what is switched on: micro-batches for which the device waits.

    python benchmarks/gpu/megatron_host.py FILE --site FOLDER [--seconds 540]

A line of FILE is a run of `drawn_megatron.py` with the options that differ, and the milliseconds per iteration. Then a
run with few blocks and large logits writes every allocation of its first four iterations beside FILE; and the last
lines are runs of Hugging Face's Trainer on the same machine, whose host the forecast knows. These three come after the
`--seconds` of the others.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import drawn_megatron
import trainer_runs
from drawn_megatron import ITERATION, WINDOW, WINDOWS, arguments, processes
from trainer_runs import row

MODEL = "llama3.2-1b"
NO_CHECKS = ["--no-check-for-nan-in-loss-and-grad"]
NO_MASK = ["--no-create-attention-mask-in-dataloader"]
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("as it is", {}, []),
    ("four blocks", {}, ["--num-layers", "4"]),
    ("four micro-batches", {"accum": 4}, []),
    ("no checks", {}, NO_CHECKS),
    ("no mask", {}, NO_MASK),
    ("fp8", {"precision": "fp8"}, []),
    ("recompute", {"recompute": "full"}, []),
    ("8,192 tokens, four blocks", {"sequence": 8192}, ["--num-layers", "4"]),
    ("no mask, 8,192 tokens, four blocks", {"sequence": 8192}, ["--num-layers", "4", *NO_MASK]),
]
HISTORY = {"sequence": 4096, "micro_batch": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description="What the host takes in a step of Megatron-LM.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--site", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=540)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        ready = processes(args.site.resolve(), Path(name))
        for label, others, options in CASES:
            if time.monotonic() - began > args.seconds:
                print("no time left")
                break
            case = {**row(MODEL, 1, 512, "bf16-mixed"), "strategy": "zero1", "compiled": True, **others}
            case |= {"system": "megatron@2026-03"}
            log = next(ready)([*arguments(case, WINDOW * WINDOWS), *options])
            milliseconds = [float(found[2]) for found in ITERATION.finditer(log)]
            found = drawn_megatron.measured(case, log)
            write(args.file, {"label": label, "options": options, "milliseconds": milliseconds, **found})
        case = {**row(MODEL, precision="bf16-mixed", **HISTORY), "strategy": "zero1", "compiled": True}
        snapshot = str(args.file.with_suffix(".snapshot"))
        options = ["--num-layers", "4", "--record-memory-history", "--memory-snapshot-path", snapshot]
        log = next(ready)([*arguments(case, WINDOW), *options])
        write(args.file, {"label": "history", "log": log[-3000:]})
        ready.close()
    for model, batch in (("qwen3-0.6b", 1), ("llama3.2-1b", 1)):
        case = row(model, batch, 512, "bf16-true")
        write(args.file, {"label": "Trainer", **trainer_runs.measure(case, 16, model)})


def write(path: Path, found: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(found) + "\n")
    print(found["label"], found.get("milliseconds", found.get("tokens_per_second_per_gpu")), flush=True)


if __name__ == "__main__":
    main()

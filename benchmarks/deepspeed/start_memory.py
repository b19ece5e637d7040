"""Host memory in which a run of `parallel.engine: deepspeed` with ZeRO-3 starts, on CPUs.

    python benchmarks/deepspeed/start_memory.py OUTPUT.json [RANKS]

Each rank is a process that trains one step of a generated model. Its peak of resident memory up to the first step, less
what it had when torch and DeepSpeed were imported, is given in bytes per parameter of the whole model. Buckets are as
small beside this model as DeepSpeed's are beside a large one.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {"family": "llama", "hidden": 768, "layers": 10, "heads": 12, "vocab": 16_000, "positions": 64, "tied": False}


def memory(field: str) -> int:
    """VmHWM or VmRSS of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def work(folder: Path, runs: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.runtime.zero.stage3

    import shoal.parallel.deepspeed
    from shoal import api
    from shoal.train.hooks import Hook

    # DeepSpeed allocates a bucket of this many elements, or else as many as a small model has: twice its weights.
    shoal.parallel.deepspeed.BUCKET = 1_000_000

    config = json.loads((folder / "config.json").read_text())
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again

    class Peak(Hook):
        def on_run_start(self, start: Any) -> None:
            found = {"before": before, "peak": memory("VmHWM"), "after": memory("VmRSS")}
            (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))

    assert deepspeed.runtime.zero.stage3
    api.train(config, runs=runs, hooks=[Peak()])


def main(output: Path, ranks: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
        config = {
            "name": "start",
            "model": {"shape": SHAPE, "tokenizer": "bytes"},
            "data": {"source": "text", "path": str(folder / "text.txt"), "max_length": 32, "validation": 0},
            "train": {"steps": 1, "global_batch": ranks, "precision": "32-true"},
            "parallel": {"strategy": "zero3", "engine": "deepspeed"},
            "checkpoint": {"at_end": False, "every": 1000},
            "log": {"to": []},
        }
        (folder / "config.json").write_text(json.dumps(config))
        command = [sys.executable, __file__, "--work", str(folder), str(folder / "runs")]
        shared = {"WORLD_SIZE": str(ranks), "SHOAL_LAUNCH": str(folder), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        if any(process.wait() for process in processes):
            raise SystemExit("A rank has failed.")
        found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        parameters = json.loads((folder / "runs" / "start" / "plan.json").read_text())["parameters"]
    import deepspeed
    import torch

    report = {
        "machine": {"torch": torch.__version__, "deepspeed": deepspeed.__version__, "device": "cpu"},
        "ranks": ranks,
        "parameters": parameters,
        "peak_bytes_per_parameter": [round((one["peak"] - one["before"]) / parameters, 2) for one in found],
        "at_the_first_step_bytes_per_parameter": [
            round((one["after"] - one["before"]) / parameters, 2) for one in found
        ],
    }
    print(json.dumps(report, indent=1))
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4)

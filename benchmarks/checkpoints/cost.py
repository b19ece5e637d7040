"""Cost of a checkpoint: how long training is blocked, write throughput, and time to restart after a kill.

    python benchmarks/checkpoints/cost.py OUTPUT.json [--folder FOLDER_ON_THE_DISK]

Measured with `shoal train` and its files, on the disk of FOLDER (default: the current one). Only the write throughput
is measured on the class that writes checkpoints, and compared with `dd` of the same size with a sync.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shoal import api
from shoal.checkpoint.layout import Part
from shoal.checkpoint.saver import Destination, Saver
from shoal.models.tensor_slices import slice_mappings
from shoal.parallel.ranks import Ranks
from tests.launch.command import SHOAL, Command, rank_process, training_lines, write_config

SHAPE = {"family": "llama", "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 1408, "vocab": 512}
GIB = 2**30


def config(folder: Path, name: str, *, steps: int, every: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "model": {"shape": {**SHAPE, "positions": 256}, "tokenizer": "bytes"},
        "data": {"source": "text", "path": str(folder / "text.txt"), "max_length": 128, "validation": 0},
        "train": {"steps": steps, "global_batch": 8, "micro_batch": 8, "lr": 3e-4, "precision": "32-true"},
        "checkpoint": {"every": every, "keep": 1, **more},
        "log": {"every": 10, "to": []},
    }


def waiting(folder: Path, steps: int = 61, every: int = 20, counted: int = 100) -> dict[str, Any]:
    """The share of the training time that is blocked by saves, with one save per `counted` steps; asynchronous and
    synchronous."""
    found: dict[str, Any] = {"steps": steps, "every": every, "counted": counted}
    # Every run waits for its last save, so the time of a run with only that save is subtracted.
    only_last = api.train(api.config_from_mapping(config(folder, "last", steps=steps, every=10**6)), runs=folder / "r")
    for kind, more in (("async", {"async": True}), ("sync", {"async": False})):
        summary = api.train(
            api.config_from_mapping(config(folder, kind, steps=steps - 1, every=every, **more)), runs=folder / "r"
        )
        lines = [json.loads(line) for line in (folder / "r" / kind / "metrics.jsonl").read_text().splitlines()]
        step = statistics.median(line["seconds"] for line in lines)
        saves = (steps - 2) // every  # without the last
        waited = max(0.0, summary.save_seconds - only_last.save_seconds)
        found[kind] = {
            "saves": saves,
            "step_seconds": step,
            "waited_seconds_per_save": waited / saves,
            "share_of_training": waited / saves / (counted * step),
        }
    found["checkpoint_bytes"] = sum(path.stat().st_size for path in (folder / "r" / "async" / "checkpoints").rglob("*"))
    return found


def bandwidth(folder: Path, size: int = GIB, times: int = 5) -> dict[str, Any]:
    """Throughput of a save, including hashes and syncs, relative to `dd` with a sync; alternating."""
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    tensors = {f"t{index}": torch.randn(size // 16 // 4) for index in range(16)}
    parts = {name: Part(tensor, slice_mappings(tensor, None), tuple(tensor.shape)) for name, tensor in tensors.items()}
    (folder / "checkpoints").mkdir()
    saver = Saver([Destination(folder / "checkpoints")], ranks, tidy=lambda folder, step: None)
    throughput: dict[str, list[float]] = {"dd": [], "save": []}
    for step in range(times + 1):
        target = folder / "dd"
        began = time.perf_counter()
        copying = ["dd", "if=/dev/zero", f"of={target}", "bs=16M", f"count={size // 2**24}", "conv=fsync"]
        subprocess.run(copying, check=True, capture_output=True)
        plain = time.perf_counter() - began
        target.unlink()
        saver.save(step, parts, {"progress.json": "{}"}, {})
        saved = saver.settle()
        assert saved is not None
        assert saved.folder is not None
        if step:  # the first of each is warmup
            throughput["dd"].append(size / plain)
            throughput["save"].append(size / saved.seconds)
        for path in saved.folder.iterdir():
            path.unlink()
    shares = [ours / theirs for ours, theirs in zip(throughput["save"], throughput["dd"], strict=True)]
    return {
        "bytes": size,
        "dd_bytes_per_second": statistics.median(throughput["dd"]),
        "save_bytes_per_second": statistics.median(throughput["save"]),
        "share": statistics.median(shares),
        "shares": shares,
    }


def restart(folder: Path) -> dict[str, Any]:
    """Seconds from the kill of a rank to the next logged step, and how much of it is imports."""
    settings = config(folder, "killed", steps=100_000, every=20)
    settings["model"]["shape"] |= {"hidden": 64, "layers": 2, "ffn": 128}
    settings["log"]["every"], settings["hardware"], settings["train"]["micro_batch"] = 1, {"devices": 2}, 4
    write_config(folder, settings)
    run = folder / "runs" / "killed"
    with Command(folder, [str(SHOAL), "train", "run.yaml", "--max-restarts", "1"]) as command:
        command.wait_until(lambda: max(training_lines(run), default=0) > 50)
        killed = time.perf_counter()
        os.kill(rank_process(command.process.pid, 1), signal.SIGKILL)
        command.wait_until(lambda: any(line["attempt"] == 1 for line in training_lines(run).values()))
        seconds = time.perf_counter() - killed
        os.kill(command.process.pid, signal.SIGTERM)
        command.wait(30)
    began = time.perf_counter()
    importing = [
        subprocess.Popen([sys.executable, "-c", "import shoal.launch.worker, transformers.models.llama.modeling_llama"])
        for _ in range(2)
    ]
    for process in importing:
        process.wait()
    imports = time.perf_counter() - began
    return {"kill_to_training_seconds": seconds, "imports_seconds": imports, "without_imports": seconds - imports}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        (folder / "text.txt").write_text(Path(argparse.__file__).read_text() * 4)
        found = {
            "machine": {"cores": os.cpu_count(), "system": platform.platform(), "torch": torch.__version__},
            "writing": bandwidth(folder),
            "waiting": waiting(folder),
            "restart": restart(folder),
        }
    args.output.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

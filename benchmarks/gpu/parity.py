"""Compare every parallel strategy, with CUDA kernels and NCCL, with one process.

    python benchmarks/gpu/parity.py FOLDER [PRECISION or CASE…]

For one GPU: several processes share it. NCCL does not allow that, so each process claims to be on a different node.
This tests the numerics, not the speed. It also works without a GPU, over gloo.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

SHAPE = {"family": "llama", "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "vocab": 512, "positions": 512}
FSDP = {"strategy": "fsdp"}
# name, processes, keys of `parallel`, keys of `train`
CASES = [
    ("ddp", 2, {"strategy": "ddp"}, {}),
    ("zero1", 2, {"strategy": "zero1"}, {}),
    ("zero2", 2, {"strategy": "zero2"}, {}),
    ("zero3", 2, {"strategy": "zero3"}, {}),
    ("ddp compressed to bf16", 2, {"strategy": "ddp", "compress": "bf16"}, {}),
    ("fsdp wrapped by size", 2, {**FSDP, "wrap": {"min_params": 100_000}}, {}),
    ("fsdp, everything on the host", 2, {**FSDP, "offload": "cpu"}, {}),
    ("one process, everything on the host", 1, {"offload": "cpu"}, {}),
    ("one process, optimizer on the host", 1, {"offload": "optimizer"}, {}),
    ("fsdp, optimizer on the host", 2, {**FSDP, "offload": "optimizer"}, {}),
    ("recompute full", 1, {}, {"recompute": "full"}),
    ("recompute selective", 2, FSDP, {"recompute": "selective"}),
    ("tp", 2, {"tp": 2}, {}),
    ("tp, 4", 4, {"tp": 4}, {}),
    ("pp", 2, {"pp": 2}, {}),
    ("pp interleaved", 2, {"pp": 2, "pp_schedule": "interleaved"}, {}),
    ("pp zero-bubble", 2, {"pp": 2, "pp_schedule": "zero-bubble"}, {}),
    ("cp gather", 2, {"cp": 2}, {}),
    ("cp ulysses", 2, {"cp": 2, "cp_method": "ulysses"}, {}),
    ("hybrid", 4, {**FSDP, "sharding": "hybrid_shard", "replicate": 2}, {}),
    ("fsdp × tp", 4, {**FSDP, "tp": 2}, {}),
    ("fsdp × pp", 4, {**FSDP, "pp": 2}, {}),
    ("fsdp × cp", 4, {**FSDP, "cp": 2}, {}),
    ("tp × pp", 4, {"tp": 2, "pp": 2}, {}),
    ("pp × fsdp × tp", 8, {**FSDP, "pp": 2, "tp": 2}, {}),
]
COMPILED = [
    ("compiled", 1, {}, {"compile": True}),
    ("compiled, fsdp, recompute selective", 2, FSDP, {"compile": True, "recompute": "selective"}),
    ("compiled, tp", 2, {"tp": 2}, {"compile": True}),
    ("compiled, cp", 2, {"cp": 2}, {"compile": True}),
    ("compiled, pp", 2, {"pp": 2}, {"compile": True}),
    ("graphs", 1, {}, {"compile": True, "cuda_graphs": True, "deterministic": True}),
    ("graphs, ddp", 2, {"strategy": "ddp"}, {"compile": True, "cuda_graphs": True, "deterministic": True}),
    ("graphs, ddp, one micro-batch", 2, {"strategy": "ddp"}, {"compile": True, "cuda_graphs": True, "micro_batch": 4}),
]
PRECISIONS = ["32-true", "bf16-mixed"]
# Number of cases that run concurrently, and the time limit of a case in seconds.
AT_ONCE, PATIENCE = 4, 90


def config_of(precision: str, name: str, parallel: dict, train: dict) -> dict:
    return {
        "name": "".join(letter if letter.isalnum() else "-" for letter in f"{precision} {name}"),
        "model": {"shape": SHAPE, "tokenizer": "bytes"},
        "data": {"source": "text", "path": __file__, "max_length": 128, "validation": 0, "workers": 0},
        "train": {
            "steps": 10,
            "global_batch": 8,
            "micro_batch": 2,
            "lr": 1e-3,
            "schedule": {"warmup": 2},
            "precision": precision,
            "compile": False,
            "deterministic": not train.get("compile"),
            **train,
        },
        "parallel": parallel,
        "log": {"every": 1, "to": []},
    }


def train_case(folder: Path, precision: str, case: tuple[str, int, dict, dict]) -> dict:
    """Train a case on its number of processes, and return its record."""
    name, world, parallel, train = case
    config = config_of(precision, name, parallel, train)
    case_folder = folder / config["name"]
    case_folder.mkdir()
    (case_folder / "config.json").write_text(json.dumps(config))
    began = time.perf_counter()
    workers = []
    for rank in range(world):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "SHOAL_LAUNCH": str(case_folder)}
        # With different host ids, NCCL treats the processes as different nodes and does not check for a shared GPU.
        environment = {**os.environ, **ranks, "NCCL_HOSTID": f"machine-{rank}", "OMP_NUM_THREADS": "1"}
        if world == 1:
            del environment["RANK"], environment["WORLD_SIZE"]
        log = (case_folder / f"rank-{rank}.log").open("w")
        command = [sys.executable, __file__, "--work", str(case_folder), str(folder / "runs")]
        workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    entry = {"precision": precision, "case": name, "processes": world}
    try:
        for worker in workers:
            worker.wait(timeout=max(1.0, PATIENCE - (time.perf_counter() - began)))
    except subprocess.TimeoutExpired:
        entry["error"] = f"timed out after {PATIENCE} seconds"
    for worker in workers:
        worker.kill()
        worker.wait()
    if any(worker.returncode for worker in workers):
        logs = [*sorted(case_folder.glob("rank-*.log")), *sorted((folder / "runs" / config["name"]).glob("logs/*"))]
        entry["log"] = [path.read_text()[-1200:] for path in logs if path.stat().st_size]
        entry.setdefault("error", "a process failed")
    entry["seconds"] = round(time.perf_counter() - began, 1)
    return entry


def lines(folder: Path, precision: str, name: str) -> list[dict]:
    metrics = folder / "runs" / config_of(precision, name, {}, {})["name"] / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def main(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    wanted = [word for word in sys.argv[2:] if word not in PRECISIONS]
    precisions = [word for word in sys.argv[2:] if word in PRECISIONS] or PRECISIONS
    found = []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(temporary)
        for precision in precisions:
            train_case(folder, precision, ("reference", 1, {}, {}))
            reference = lines(folder, precision, "reference")
            cases = [case for case in [*CASES, *COMPILED] if not wanted or case[0] in wanted]
            for entry in pool.map(partial(train_case, folder, precision), cases):
                if "error" not in entry:
                    trained = lines(folder, precision, entry["case"])
                    for key in ("loss", "grad_norm"):
                        pairs = zip(trained, reference, strict=True)
                        entry[key] = float(f"{max(abs(one[key] / other[key] - 1) for one, other in pairs):.2e}")
                found.append(entry)
                print(json.dumps(entry), flush=True)
                write(output, found)


def write(output: Path, found: list[dict]) -> None:
    import torch

    machine = {"torch": torch.__version__, "cuda": torch.cuda.is_available()}
    if torch.cuda.is_available():
        machine |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    (output / "parity.json").write_text(json.dumps({"machine": machine, "cases": found}, indent=1) + "\n")


def work(case_folder: Path, runs: Path) -> None:
    from shoal import api

    api.train(api.config_from_mapping(json.loads((case_folder / "config.json").read_text())), runs=runs)


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]))

"""Every way to split a model, on real CUDA kernels and NCCL, held to one process: `python benchmarks/gpu/parity.py F`.

For one GPU: several processes share it, and NCCL, which refuses that, is told that each is on a machine of its own. It
shows that the numbers are right, and nothing about speed. Works without a GPU too, over gloo.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

SHAPE = {"family": "llama", "hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "vocab": 512, "positions": 512}
FSDP = {"strategy": "fsdp"}
# Name, processes, keys of `parallel`, keys of `train`.
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
]
WORLD = 8


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


def work(rank: int, folder: Path) -> None:
    """One of the processes: takes part in every case that has that many."""
    import torch

    from shoal import api

    for precision in ("32-true", "bf16-mixed"):
        for index, (name, world, parallel, train) in enumerate([("reference", 1, {}, {}), *CASES, *COMPILED]):
            if rank >= world:
                continue
            place = folder / f"{precision}-{index}"
            place.mkdir(exist_ok=True)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", SHOAL_LAUNCH=str(place))
            torch.use_deterministic_algorithms(False)
            torch._dynamo.reset()
            began = time.perf_counter()
            try:
                config = api.config_from_mapping(config_of(precision, name, parallel, train))
                api.train(config, runs=folder / "runs")
                said = {"seconds": round(time.perf_counter() - began, 1)}
            except Exception:
                said = {"error": traceback.format_exc()[-1500:]}
            (place / f"done-{rank}.json").write_text(json.dumps(said))


def lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def main(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        workers = []
        for rank in range(WORLD):
            # NCCL takes processes with different identities for different machines, which may share no GPU.
            environment = {**os.environ, "NCCL_HOSTID": f"machine-{rank}", "OMP_NUM_THREADS": "1"}
            log = (output / f"rank-{rank}.log").open("w") if rank < 2 else subprocess.DEVNULL
            command = [sys.executable, __file__, "--work", str(rank), str(folder)]
            workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for worker in workers:
            worker.wait()
        found = []
        for precision in ("32-true", "bf16-mixed"):
            reference = lines(folder, config_of(precision, "reference", {}, {})["name"])
            for index, (name, world, _, _) in enumerate([*CASES, *COMPILED], start=1):
                place = folder / f"{precision}-{index}"
                said = [json.loads(path.read_text()) for path in sorted(place.glob("done-*.json"))]
                entry = {"precision": precision, "case": name, "processes": world}
                errors = [one["error"] for one in said if "error" in one]
                if errors or len(said) < world:
                    entry["error"] = (errors or ["a process ended early"])[0]
                else:
                    trained = lines(folder, config_of(precision, name, {}, {})["name"])
                    for key in ("loss", "grad_norm"):
                        apart = [
                            abs(one[key] - other[key]) / other[key]
                            for one, other in zip(trained, reference, strict=True)
                        ]
                        entry[key] = float(f"{max(apart):.2e}")
                    entry["seconds"] = said[0]["seconds"]
                found.append(entry)
                print(json.dumps(entry), flush=True)
    import torch

    machine = {"torch": torch.__version__, "cuda": torch.cuda.is_available()}
    if torch.cuda.is_available():
        machine |= {"gpu": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    (output / "parity.json").write_text(json.dumps({"machine": machine, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main(Path(sys.argv[1]))

"""Peak memory and step time of `train.recompute` none, full and offload on a CUDA device.

`PYTHONPATH=src python benchmarks/gpu/offload.py OUTPUT` trains the llama3-8b shape with eight layers in bf16-true with
SGD, for several micro-batches and kinds of activation checkpointing, and prints a JSON object for each case; OUTPUT has
all of them. Each case is a process of its own. It needs a GPU with 80 GiB (`none` may run out of memory in less: that
is recorded) and takes about five minutes; `--tiny` runs a small shape on a CPU, to check that it runs. It fails if
losses or gradient norms differ, or if offload takes no less memory than full.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WARMUP, MEASURED = 4, 8
KINDS = ("none", "full", "offload")
LARGE = {"family": "llama", "hidden": 4096, "layers": 8, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
SMALL = {"family": "llama", "hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 300}
# Micro-batch, sequence length, and sequences per step.
CASES = ((4, 2048, 4), (8, 2048, 8), (4, 2048, 8))
SMALL_CASES = ((2, 32, 4),)
# Kernels of the backward pass sum in any order, and without activation checkpointing other kernels are compiled.
FULL_AGREES, NONE_AGREES = 1e-3, 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--case", help="internal: one case, as JSON")
    given = parser.parse_args()
    if given.case is not None:
        given.output.write_text(json.dumps(measure(**json.loads(given.case), tiny=given.tiny)))
        return
    found = []
    for micro_batch, length, global_batch in SMALL_CASES if given.tiny else CASES:
        records = {
            kind: run_case(given, kind=kind, micro_batch=micro_batch, length=length, global_batch=global_batch)
            for kind in KINDS
        }
        found.append({"micro_batch": micro_batch, "length": length, "global_batch": global_batch, **records})
        print(json.dumps(found[-1]), flush=True)
        given.output.write_text(json.dumps({"shape": SMALL if given.tiny else LARGE, "cases": found}, indent=1) + "\n")
    for one in found:
        check(one, given.tiny)


def run_case(given: argparse.Namespace, **case: Any) -> dict[str, Any]:
    """A case in a process of its own, so that neither memory nor compiled kernels are left from another."""
    part = given.output.with_suffix(".part")
    command = [sys.executable, __file__, str(part), "--case", json.dumps(case), *(["--tiny"] if given.tiny else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else "no message"}
    record: dict[str, Any] = json.loads(part.read_text())
    part.unlink()
    return record


def check(case: dict[str, Any], tiny: bool) -> None:
    none, full, offload = (case[kind] for kind in KINDS)
    assert "failed" not in full, full
    assert "failed" not in offload, offload
    assert offload["losses"][0] == full["losses"][0], (full["losses"], offload["losses"])
    for other, bound in ((full, FULL_AGREES), (none, NONE_AGREES)):
        for key in ("losses", "norms") if "failed" not in other else ():
            pairs = list(zip(other[key], offload[key], strict=True))
            assert max(abs(one / two - 1) for one, two in pairs) < bound, (key, pairs)
    assert tiny or offload["allocated_gib"] < full["allocated_gib"]


def measure(kind: str, micro_batch: int, length: int, global_batch: int, *, tiny: bool) -> dict[str, Any]:
    import numpy as np
    import torch

    from shoal.config import Mesh, config_from_mapping
    from shoal.data.loader import MicroBatch, StepBatch
    from shoal.models.prepare import blueprint, prepare_model
    from shoal.objectives.causal_lm import CausalLM
    from shoal.optim.loss_scaler import LossScaler
    from shoal.optim.optimizer import make_optimizer
    from shoal.parallel.apply import parallelize
    from shoal.parallel.ranks import Ranks
    from shoal.train.step import TrainStep

    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    shape = {**(SMALL if tiny else LARGE), "positions": length}
    precision = "32-true" if tiny else "bf16-true"
    train = {"precision": precision, "recompute": kind, "micro_batch": micro_batch, "global_batch": global_batch}
    config = config_from_mapping(
        {
            "model": {"shape": shape, "tokenizer": "bytes"},
            "data": {"source": "text", "path": __file__, "max_length": length},
            "train": {**train, "optimizer": {"name": "sgd", "momentum": 0.0}},
        }
    )
    accumulated = global_batch // micro_batch
    model = parallelize(
        prepare_model(blueprint(config.model), longest=length),
        config,
        objective=CausalLM(),
        strategy="single",
        mesh=Mesh(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1),
        ranks=Ranks(0, 1, 0, device),
        micro_batch=micro_batch,
        grad_accum_steps=accumulated,
    )
    optimizer = make_optimizer(model.parameters, config.train, model.anatomy, placement=model.placement)
    step = TrainStep(model, optimizer, LossScaler(device, enabled=False), clip=1.0)
    generator = torch.Generator().manual_seed(0)
    losses, norms, seconds = [], [], []
    for index in range(WARMUP + MEASURED):
        tokens = torch.randint(0, shape["vocab"], (accumulated, micro_batch, length + 1), generator=generator)
        batches = [MicroBatch(one[:, :-1], one[:, 1:]) for one in tokens]
        batch = StepBatch(batches, weight=global_batch * length, sequence_ids=np.arange(global_batch))
        if index == WARMUP and not tiny:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        result = step(batch, 1e-3)
        losses.append(result.loss_sum.item() / result.weight)  # waits for the device
        seconds.append(time.perf_counter() - began)
        norms.append(result.norm.item())
    typical = statistics.median(seconds[WARMUP:])
    gib = 0.0 if tiny else torch.cuda.max_memory_allocated() / 2**30
    return {
        "allocated_gib": round(gib, 3),
        "step_ms": round(typical * 1e3, 2),
        "tokens_per_second": round(global_batch * length / typical),
        "losses": losses,
        "norms": norms,
    }


if __name__ == "__main__":
    main()

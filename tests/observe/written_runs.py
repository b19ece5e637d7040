"""Run folders as training writes them, made in milliseconds: for readers of their files."""

import json
from pathlib import Path
from typing import Any

from shoal.config import config_from_mapping, config_to_yaml

START = 1_700_000_000.0  # Unix seconds


def training_line(step: int, *, attempt: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "attempt": attempt,
        "time": START + step,
        "loss": 4.0 - step / 100,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 1000 * step,
        "loss_tokens": 1000 * step,
        "tokens_per_second": 5000.0,
        "mfu": 0.4,
        "memory_gib": 10.0,
        "reserved_gib": 11.0,
        "data_seconds": 0.1,
        "save_seconds": 0.0,
        "communication_seconds": 0.2,
        "seconds": 1.0,
        "skipped": 0,
    } | more


def append(file: Path, *lines: dict[str, Any]) -> None:
    with file.open("a") as opened:
        opened.write("".join(json.dumps(line) + "\n" for line in lines))


def write_run(
    folder: Path, *, lr: float = 1e-3, steps: int = 100, done: int = 50, state: str | None = "finished"
) -> Path:
    """A run of llama3.2-1b that has logged every tenth step, evaluated and saved at step 50, and was restarted once."""
    (folder / "checkpoints" / "step-00000050").mkdir(parents=True)
    config = {
        "name": folder.name,
        "model": {"shape": "llama3.2-1b", "tokenizer": "bytes"},
        "data": {"source": "text", "path": "books.txt", "max_length": 1024},
        "train": {"steps": steps, "global_batch": 8, "lr": lr},
    }
    (folder / "config.yaml").write_text(config_to_yaml(config_from_mapping(config)))
    (folder / "plan.json").write_text(json.dumps(PLAN | {"steps": steps}))
    append(folder / "metrics.jsonl", *(training_line(step) for step in range(10, done + 1, 10)))
    append(folder / "metrics.jsonl", {"step": 50, "attempt": 0, "time": START + 50, "eval_loss": 3.25})
    manifest = {"format": 2, "step": 50, "metrics": {"eval_loss": 3.25}, "files": {"a": {"size": 3 * 2**20}}}
    (folder / "checkpoints" / "step-00000050" / "MANIFEST.json").write_text(json.dumps(manifest))
    (folder / "checkpoints" / "latest").write_text("step-00000050\n")
    command = ["shoal", "train", "my run.yaml", f"train.lr={lr}"]
    append(
        folder / "events.jsonl",
        event("start", 0, world_size=8, from_step=0, command=command, host="node-1", devices=8),
        event("fault", 30, text="rank 3 was killed by signal 9"),
        event("restart", 30, text="restart 1 of 3"),
        event("save", 50, path="checkpoints/step-00000050", seconds=2.5, bytes=3 * 2**20, ok=True, error=None),
        event("sample", 50, prompt="The shoal", text=" turns as one"),
    )
    if state is not None:
        (folder / "outcome.json").write_text(json.dumps({"state": state, "why": "", "ended": START + 60}))
    return folder


def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"time": START + step, "event": kind, "attempt": 0, "step": step, **fields}


PLAN = {
    "parameters": 1_235_814_400,
    "chosen": {"strategy": "fsdp", "world_size": 8, "global_batch": 8, "micro_batch": 1, "grad_accum_steps": 1,
               "mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": 8, "cp": 1, "tp": 1}, "recompute": "none"},
    "forecast": {"memory": {"allocated_gib": 9.5, "reserved_gib": 10.0, "terms": {"weights": 4.0, "activations": 5.5}},
                 "speed": {"tokens_per_second_per_gpu": 700.0, "step_seconds": 0.9, "mfu": 0.44}},
    "measured": {"steps": [6, 15], "memory": {"allocated_gib": 10.0, "reserved_gib": 11.0},
                 "speed": {"tokens_per_second_per_gpu": 625.0, "step_seconds": 1.0, "mfu": 0.4}},
    "data": {"tokens": 50_000, "sequences": 49, "loss_token_share": 1.0},
    "machine": {"device": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "cores": 8},
    "versions": {"shoal": "0.1", "torch": "2.11.0"},
}  # fmt: skip

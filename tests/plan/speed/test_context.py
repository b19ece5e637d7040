"""Context parallelism, as it was measured on an H200 with collectives that return at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.forecast import forecast_compute
from shoal.plan.speed.model_parallel import MERGED_GRADIENTS, MERGED_OUTPUT
from shoal.plan.terms import GIB
from tests.plan.planning import make_run, plan

MEASURED = json.loads((Path(__file__).parents[3] / "benchmarks" / "gpu" / "context_h200" / "context.json").read_text())
TOKENS = 8192  # per rank


@pytest.mark.parametrize("name", MEASURED["ours"])
def test_a_rank_is_forecast_as_it_was_measured(name: str) -> None:
    _, cp, method = name.split()
    shape = "{family: llama, hidden: 4096, layers: 8, heads: 32, kv_heads: 8, ffn: 14336, vocab: 128256}"
    found = plan(
        f"model.shape={shape[:-1]}, positions: {8 * TOKENS}}}",
        *("model.tokenizer=bytes", f"data.max_length={TOKENS * int(cp)}", "train.steps=100", "train.micro_batch=1"),
        *(f"train.global_batch={2 if cp == '1' else 1}", "train.recompute=full", "train.precision=bf16-mixed"),
        *("parallel.strategy=fsdp", f"parallel.cp={cp}", f"parallel.cp_method={method}", "hardware.gpu=h200"),
        f"hardware.devices={max(2, int(cp))}",
    ).choice
    measured: dict[str, Any] = MEASURED["ours"][name]["measured"]
    assert forecast_compute(found)["step_seconds"] == pytest.approx(measured["step_seconds"], rel=0.09)
    allocated = found.memory.pipeline_ranks[0].allocated / GIB
    assert allocated == pytest.approx(measured["allocated_gib"], rel=0.05)


@pytest.mark.parametrize("cp", ["2", "4", "8"])
def test_what_a_ring_merges_takes_as_long_as_measured(cp: str) -> None:
    """Between its time with flash attention and with cuDNN, which differ in more than what is merged."""
    found, queries = MEASURED["ring"][cp], TOKENS * 32 * 128
    rate = make_run(gpu="h200").gpu.memory_bandwidth * 0.64
    merged = 1e3 * (int(cp) - 1) * (MERGED_OUTPUT * queries + MERGED_GRADIENTS * 3 * queries) / rate
    least, most = (found[f"{kernel} ring"] - found[f"{kernel} plain"] for kernel in ("cudnn", "flash"))
    assert 0.5 * least < merged < 1.2 * most


def test_a_plan_with_gathered_keys_names_the_faster_method_where_there_is_one() -> None:
    long = ("model.shape=llama3-8b", "data.max_length=65536", "train.recompute=full", "train.micro_batch=1")
    long += ("parallel.strategy=fsdp", "parallel.cp=8", "hardware.devices=8", "train.steps=10", "train.global_batch=1")

    def named(*more: str) -> bool:
        return "ulysses is forecast to be" in " ".join(plan(*long, *more).notes)

    assert named("hardware.gpu=h200")
    # Before Hopper its kernel is the usual one; and 14 heads do not divide by 8.
    assert not named("hardware.gpu=a100-80gb")
    assert not named("hardware.gpu=h200", "model.shape=qwen2.5-0.5b")
    assert not named("hardware.gpu=h200", "parallel.cp_method=ulysses")

"""The experts of a mixture: their matmuls and whole steps, as they were measured on an H200."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.catalogue.model_shape import ModelShape, experts
from shoal.plan.run.blocks import Linear
from shoal.plan.run.run import Run
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.speed.linear import linear_seconds

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MEASURED = BENCHMARKS / "gpu" / "grouped_matmuls_h200" / "grouped_matmuls.json"
PLAN = {
    "data": {"max_length": 4096},
    "train": {"steps": 10, "global_batch": 1, "micro_batch": 1, "precision": "bf16-true"},
    "parallel": {"strategy": "single"},
    "hardware": {"gpu": "h200", "devices": 1},
}


def run_of(name: str, system: str = "shoal", **train: Any) -> Run:
    """A run of a named shape on one H200."""
    config = {**PLAN, "model": {"shape": name, "tokenizer": "bytes"}, "train": {**PLAN["train"], **train}}
    return api.plan(config, system=system).choice.run


def seconds(system: str, **train: Any) -> float:
    """Of a step of four blocks of Qwen3-30B-A3B."""
    run = run_of("qwen3-30b-a3b", system, **train)
    return forecast_speed(run.with_(shape=replace(run.shape, layers=4))).step_seconds


@pytest.mark.parametrize(("version", "limits"), [(5, {"full": 0.13, "LoRA": 0.1}), (4, {"full": 0.25, "LoRA": 0.4})])
def test_steps_of_transformers_mixtures_take_as_long_as_measured(
    version: int, limits: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn at random, with grouped matmuls, and with experts one after the other: benchmarks/gpu/drawn_mixtures.py."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import plan_published as published

    rows = published.read_measured(BENCHMARKS / "gpu" / "mixtures_h200" / f"transformers{version}.jsonl")
    figures = published.compare(rows)
    speeds = [one for one in figures if one.what == "speed"]
    assert len(speeds) == 16
    for one in speeds:
        assert abs(one.error) < limits[one.row.kind], one.row.label
    assert statistics.median(abs(one.error) for one in speeds) < 0.1
    # Many tensors of the same size do not fill their segments.
    reserved = [abs(one.error) for one in figures if one.what == "memory"]
    assert max(reserved) < 0.17
    assert statistics.median(reserved) < 0.05


def test_until_transformers_5_the_host_launched_every_expert() -> None:
    """Blocks with 128 experts take 0.9 ms each, however few tokens they have."""
    narrow = {"precision": "bf16-true", "recompute": "none"}
    before, since = seconds("huggingface@2025-12", **narrow), seconds("huggingface@2026-03", **narrow)
    assert before > 4 * 128 * 0.9e-3 > 4 * since
    # More tokens of the same experts hide behind their host.
    assert seconds("huggingface@2025-12", **narrow, global_batch=2, micro_batch=2) < 1.2 * before


def test_kernels_of_liger_leave_experts_one_by_one() -> None:
    """They replace what an expert computes, and not the loop over experts."""
    narrow = {"precision": "bf16-true", "recompute": "none"}
    eager, liger = (seconds("huggingface@2025-06", **narrow, compile=compiled) for compiled in (False, True))
    assert 0.8 * eager < liger <= eager


def test_a_model_with_fewer_experts_than_a_token_may_reach_has_a_forecast() -> None:
    """A Jamba with a single expert, of which its config asks for two."""
    run = run_of("qwen3-30b-a3b")
    lonely = run.with_(shape=replace(run.shape, experts=1, routed=2, layers=2))
    assert forecast_speed(lonely).step_seconds > 0


def test_an_adapter_on_experts_that_are_modules_is_one_for_each_of_them() -> None:
    config = {**PLAN, "model": {"shape": "qwen3-30b-a3b", "tokenizer": "bytes"}}
    config["adapter"] = {"kind": "lora", "rank": 8, "targets": ["down_proj"]}
    found = api.plan(config, system="axolotl@2025-09").as_dict()["memory"]["terms"]["weights"]["adapters"]
    assert found * 2**30 == pytest.approx(48 * 128 * 8 * (768 + 2048) * 4, rel=1e-3)


def test_under_autocast_grouped_matmuls_are_in_the_dtype_of_the_weights() -> None:
    wide = seconds("huggingface", precision="bf16-mixed", recompute="none")
    assert wide > 1.5 * seconds("huggingface", precision="bf16-true", recompute="none")


def test_from_april_to_september_2026_rows_of_other_ranks_were_filled_with_zeros() -> None:
    narrow = {"precision": "bf16-true", "recompute": "none"}
    *filled, today = (seconds(f"huggingface@2026-{month}", **narrow) for month in ("04", "09", "11"))
    assert seconds("huggingface@2026-03", **narrow) == pytest.approx(today)
    assert today < filled[0] < filled[1] < 1.1 * today


def test_grouped_matmuls_are_as_fast_as_measured() -> None:
    errors = []
    for one in json.loads(MEASURED.read_text())["matmuls"]:
        if one["even"]:
            continue  # tokens are not routed evenly
        ffn, others = experts(one["hidden"], one["width"], one["count"], one["routed"])
        more = {"others": others, "routed": one["routed"], "experts": one["count"]}
        shape = ModelShape("qwen3", one["hidden"], 2, 8, 8, ffn, 1024, 8192, tied=False, **more)
        run = run_of("qwen3-1.7b").with_(shape=shape, length=one["tokens"])
        layer = {
            "gate, up": Linear("mlp", shape.hidden, 2 * shape.ffn, reads="second norm"),
            "down": Linear("down", shape.ffn, shape.hidden, row=True, reads="inner"),
        }[one["layer"]]
        index = ("forward", "grad_input", "grad_weight").index(one["matmul"])
        errors.append(linear_seconds(run, layer)[index] / (one["milliseconds"] / 1e3) - 1)
    assert len(errors) == 42
    assert abs(statistics.median(errors)) < 0.05
    assert max(abs(error) for error in errors) < 0.25


def test_many_small_experts_take_longer_than_an_mlp_of_the_width_that_a_token_passes() -> None:
    mixture = run_of("qwen3-30b-a3b")
    dense = mixture.with_(shape=replace(mixture.shape, experts=0, routed=0))
    layers = [Linear("up", 2048, 8 * 768, reads="second norm"), Linear("down", 8 * 768, 2048, row=True, reads="inner")]
    for layer in layers:
        for one, other in zip(linear_seconds(mixture, layer), linear_seconds(dense, layer), strict=True):
            assert one > 1.2 * other
    attention = Linear("q", 2048, 4096, reads="norm")
    assert linear_seconds(mixture, attention) == pytest.approx(linear_seconds(dense, attention))

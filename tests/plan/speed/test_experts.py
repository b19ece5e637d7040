"""The matmuls of a mixture of experts, as they were measured on an H200."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from shoal import api
from shoal.catalogue.model_shape import ModelShape, experts
from shoal.plan.run.blocks import Linear
from shoal.plan.run.run import Run
from shoal.plan.speed.linear import linear_seconds

MEASURED = Path(__file__).parents[3] / "benchmarks" / "gpu" / "grouped_matmuls_h200" / "grouped_matmuls.json"
PLAN = {
    "data": {"max_length": 4096},
    "train": {"steps": 10, "global_batch": 1, "micro_batch": 1, "precision": "bf16-true"},
    "parallel": {"strategy": "single"},
    "hardware": {"gpu": "h200", "devices": 1},
}


def run_of(name: str) -> Run:
    """A run of a named shape on one H200."""
    return api.plan({**PLAN, "model": {"shape": name, "tokenizer": "bytes"}}).choice.run


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

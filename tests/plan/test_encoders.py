"""The forecast of encoders against one H200: benchmarks/gpu/encoders_h200."""

import json
from pathlib import Path

import pytest

from benchmarks.figures.encoders import MEASURED, forecast_of
from tests.plan.planning import make_run

CASES = json.loads((Path(__file__).parents[2] / MEASURED).read_text())


@pytest.mark.parametrize("case", CASES)
def test_an_encoder_has_the_measured_speed_and_memory(case):
    measured = CASES[case]["measured"]
    found = forecast_of(measured["config"])
    # Padding is computed too, so that it is the time of a step that can be compared.
    assert found["speed"]["step_seconds"] == pytest.approx(measured["step_seconds"], rel=0.10)
    assert found["memory"]["allocated_gib"] == pytest.approx(measured["allocated_gib"], rel=0.05)


def test_a_compiled_post_norm_block_saves_both_norm_inputs_and_a_matmul_output():
    """As traced with inductor: fp32, fp32 and bf16; with dropout two masks of a byte in place of the last."""
    from shoal.plan.memory.activations import block_kept

    def saved(**settings: object) -> dict[str, float]:
        run = make_run("bert-base", "h200", length=512, micro_batch=64, precision="bf16-mixed", **settings)
        return {part.name: part.amount / (run.tokens * 768) for part in block_kept(run).parts}

    plain, dropping = saved(compiled=True), saved(compiled=True, dropout=True)
    assert (plain["norm inputs"], plain["linear inputs"]) == (10, 4)
    assert (dropping["norm inputs"], dropping["dropout masks"]) == (8, 2)
    assert saved(compiled=False)["linear inputs"] == 8, "each linear layer casts the residual stream"

"""How long the host takes to launch what a device then waits for: by its CPU, by what it launches, and by when it may."""

from dataclasses import replace

import pytest

from shoal.plan.speed import forecast_speed
from tests.plan.planning import make_run
from tests.plan.test_other_systems import HUGGING_FACE, term


def test_a_loss_scale_makes_the_host_wait_unless_the_optimizer_is_fused():
    loop = replace(HUGGING_FACE, waits_for_loss=False, foreach_step=True)
    run = make_run("llama3-8b", "h200", traits=loop, compiled=False, precision="16-mixed")
    waited = term(forecast_speed(run), "optimizer launch overhead")
    assert waited == pytest.approx(4e-3 + 32 * 9 * 0.02e-3, rel=0.01)
    for other in (run.with_(precision="bf16-mixed"), run.with_(traits=replace(loop, foreach_step=False))):
        assert term(forecast_speed(other), "optimizer launch overhead") == 0

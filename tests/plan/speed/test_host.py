"""How long the host takes to launch what a device waits for: by its CPU, by what it launches, and by when it may."""

from dataclasses import replace

import pytest

from shoal.catalogue.gpus import GPUS
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.speed.host import host_seconds
from shoal.plan.systems.modelled import SYSTEMS
from tests.plan.planning import make_run
from tests.plan.systems.test_other_systems import HUGGING_FACE, MEGATRON, seconds, term


def test_the_cpu_beside_a_gh200_launches_kernels_more_slowly():
    run = make_run("qwen2.5-0.5b", "h200", traits=replace(HUGGING_FACE, waits_for_loss=False), compiled=False)
    for name, slower in (("gh200", 1.74), ("gh200-120gb", 1.74), ("gb200", 1.95)):
        assert host_seconds(run.with_(gpu=GPUS[name]), 1) / host_seconds(run, 1) == pytest.approx(slower, rel=0.01)
    short = run.with_(micro_batch=1, length=256)  # bound by the host
    on_grace = short.with_(gpu=GPUS["gh200"])
    assert seconds(on_grace) > 1.6 * seconds(short)
    # The Trainer's step too.
    waiting = [
        term(forecast_speed(one.with_(traits=HUGGING_FACE)), "optimizer launch overhead") for one in (short, on_grace)
    ]
    assert waiting[1] == pytest.approx(1.74 * waiting[0], rel=0.01)


def test_modules_of_transformer_engine_take_the_host_longer_than_compiled_blocks():
    run = make_run("gpt2", "h200", traits=MEGATRON, compiled=True, micro_batch=1, length=128)
    compiled = run.with_(traits=replace(MEGATRON, fused_by_hand=False))
    around = 10e-3  # of a micro-batch
    assert host_seconds(run, 10) == pytest.approx(10 * 3.5e-3 + around, rel=0.01)
    assert host_seconds(run, 10) - host_seconds(compiled, 10) == pytest.approx(10 * (3.5e-3 - 2.2e-3) + around)
    # A pipeline's ranks in the middle have neither data, embedding nor loss.
    assert host_seconds(run, 10, ends=0) == pytest.approx(host_seconds(run, 10) - around)
    assert host_seconds(run, 10, ends=1) == pytest.approx(host_seconds(run, 10) - around / 2)
    # Megatron had none in 2022, and XLA launches whole programs.
    for other in (replace(MEGATRON, software=2022), replace(MEGATRON, planned_memory=True)):
        assert host_seconds(run.with_(traits=other), 10) == host_seconds(compiled, 10)


def test_layers_that_are_replayed_as_cuda_graphs_do_not_wait():
    run = make_run("llama3-8b", "gb200", traits=SYSTEMS["nemo"], compiled=True, micro_batch=1, length=512)
    graphed = run.with_(traits=replace(run.traits, graphs_layers=True))
    assert term(forecast_speed(run), "kernel launch overhead") > 0.5 * seconds(run)
    assert term(forecast_speed(graphed), "kernel launch overhead") == 0


def test_a_loss_scale_makes_the_host_wait_unless_the_optimizer_is_fused():
    loop = replace(HUGGING_FACE, waits_for_loss=False, foreach_step=True)
    run = make_run("llama3-8b", "h200", traits=loop, compiled=False, precision="16-mixed")
    waited = term(forecast_speed(run), "optimizer launch overhead")
    assert waited == pytest.approx(4e-3 + 32 * 9 * 0.02e-3, rel=0.01)
    for other in (run.with_(precision="bf16-mixed"), run.with_(traits=replace(loop, foreach_step=False))):
        assert term(forecast_speed(other), "optimizer launch overhead") == 0


def test_a_model_that_is_one_graph_takes_the_host_less_than_compiled_blocks() -> None:
    blocks = make_run("gpt2", gpu="h100-80gb", traits=SYSTEMS["autocast"], compiled=True, length=128, micro_batch=1)
    graph = blocks.with_(traits=replace(SYSTEMS["autocast"], compiles_loss=True))
    assert host_seconds(blocks, 12) - host_seconds(graph, 12) == pytest.approx(12 * (2.2 - 1.3) * 1e-3)

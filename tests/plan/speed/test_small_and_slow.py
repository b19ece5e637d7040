"""Terms of time that weigh with small matmuls, small micro-batches, even pipeline stages and slow links."""

from dataclasses import replace

import pytest

from shoal.catalogue.efficiency import relative_rate
from shoal.catalogue.gpus import GPUS
from shoal.config.mesh import Mesh
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.memory.states import trained_parameters
from shoal.plan.run.layout import different_ranks, ranks_of
from shoal.plan.run.run import Run
from shoal.plan.speed.communication import Group, ring_speed
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.speed.kernels import bandwidth, matmul_seconds
from shoal.plan.systems.modelled import MEGATRON, SYSTEMS
from tests.plan.planning import make_run


def accumulation(run: Run) -> float:
    """Seconds per micro-batch."""
    step = forecast_speed(run).step
    found = step.find("gradient accumulation")
    return 0.0 if found is None else found.amount / run.grad_accum_steps


def test_gradients_of_earlier_micro_batches_are_read_and_written_once_more():
    run = make_run("llama2-7b", "a100-80gb", strategy="zero1", mesh=Mesh(dp_shard=8), grad_accum_steps=4)
    megatron, deepspeed = (replace(run, traits=SYSTEMS[name]) for name in ("megatron", "deepspeed"))
    parameters, streamed = trained_parameters(run, ranks_of(run)[0]), 0.8 * 2039e9
    # Fp32 gradients that matmuls add to, instead of writing 16 bits; and 16-bit ones that kernels of their own add up,
    # which do nothing but stream.
    assert accumulation(megatron) == pytest.approx(0.75 * parameters * (4 + 4 - 2) / bandwidth(run))
    assert accumulation(deepspeed) == pytest.approx(0.75 * parameters * 3 * 2 / streamed)
    assert accumulation(replace(megatron, grad_accum_steps=1)) == 0
    sharded = replace(run, strategy="fsdp", traits=SYSTEMS["torchtitan"])
    assert accumulation(sharded) == pytest.approx(0.75 * parameters / 8 * 3 * 4 / streamed)


def test_even_stages_wait_for_the_one_with_the_head():
    run = make_run("llama3-8b", "a100-80gb", mesh=Mesh(pp=8), grad_accum_steps=512, loss="plain", traits=MEGATRON)
    balanced = replace(run, traits=replace(MEGATRON, even_stages=False))
    assert [rank.blocks for rank in ranks_of(run)] == [4] * 8
    assert ranks_of(balanced)[-1].blocks < 4
    # Published for both: 3,699 tokens/s with two stages and 2,690 with eight (FlagPerf).
    assert 1.15 < forecast_speed(run).step_seconds / forecast_speed(balanced).step_seconds < 1.4


def test_of_pipeline_ranks_with_the_same_stages_the_first_needs_most():
    run = make_run("llama3-8b", mesh=Mesh(pp=8), grad_accum_steps=32)
    memory = forecast_memory(run)
    assert len(different_ranks(run)) < len(memory.pipeline_ranks) == 8
    assert memory.worst == max(memory.pipeline_ranks, key=lambda one: one.reserved)
    assert memory.allocated == max(one.allocated for one in memory.pipeline_ranks)


def test_few_tiles_leave_multiprocessors_idle():
    run = make_run()

    def rate(rows: int, inner: int, columns: int) -> float:
        return rows * inner * columns / matmul_seconds(run, rows, inner, columns)

    assert rate(16384, 2048, 16384) == pytest.approx(rate(32768, 2048, 16384), rel=0.01)
    assert 0.6 < rate(1024, 2048, 4096) / rate(16384, 2048, 16384) < 0.9
    # Several multiprocessors share the tiles of a long inner dimension, as those of weight gradients are.
    assert rate(2048, 16384, 2048) > 1.2 * rate(2048, 2048, 2048)


def test_short_inner_dimensions_cost_more_where_a_multiprocessor_is_faster():
    def share(gpu: str) -> float:
        run = make_run(gpu=gpu)
        times = [matmul_seconds(run, 65536, inner, 16384) / inner for inner in (768, 8192)]
        return times[1] / times[0]

    assert relative_rate(GPUS["b200"]) > 1 > relative_rate(GPUS["rtx4090"])
    assert share("rtx4090") > share("h200") > share("b200")


def test_collectives_over_pci_express_reach_less_of_the_link_than_over_nvlink():
    near, slow = make_run(), make_run(gpu="l40s")
    assert ring_speed(near, Group(8, 1)) == 0.8 * near.link.bytes_per_second
    assert ring_speed(slow, Group(8, 1)) == 0.45 * slow.link.bytes_per_second

"""The speed forecast: the MFU formula, and monotonicity."""

from dataclasses import replace

import pytest

from shoal.catalogue.efficiency import efficiency
from shoal.catalogue.gpus import GPUS, LINKS
from shoal.catalogue.shapes import NAMED, block_matrices
from shoal.config.mesh import Mesh
from shoal.plan.communication import collective_seconds, rank_group
from shoal.plan.run import FROZEN, Adapter
from shoal.plan.speed import flops_per_token, forecast_speed
from tests.plan.planning import make_run, tokens_per_second


def test_mfu_uses_the_formula_of_published_tables():
    run = make_run("llama3.2-1b", "h200", length=4096, micro_batch=4)
    shape = NAMED["llama3.2-1b"]
    matrices = shape.layers * block_matrices(shape) + shape.vocab * shape.hidden
    assert flops_per_token(run) == 6 * matrices + 12 * shape.layers * shape.hidden * 4096
    speed = forecast_speed(run)
    assert speed.mfu == pytest.approx(speed.tokens_per_second_per_gpu * flops_per_token(run) / 989e12)
    frozen = run.with_(adapter=Adapter(8, ("q_proj",)), trained=FROZEN)
    assert flops_per_token(frozen) == 4 * matrices + 12 * shape.layers * shape.hidden * 4096


@pytest.mark.parametrize("gpu", GPUS)
def test_every_device_has_a_speed_below_its_peak(gpu):
    precision = "16-mixed" if GPUS[gpu].bf16 is None else "bf16-mixed"
    speed = forecast_speed(make_run("gpt2", gpu, length=1024, micro_batch=8, precision=precision))
    assert 0.05 < speed.mfu < 0.9
    assert 0 < efficiency(GPUS[gpu]).matmuls < 1


def test_activation_checkpointing_takes_time():
    speeds = [
        forecast_speed(make_run(recompute=kind)).tokens_per_second_per_gpu for kind in ("none", "selective", 2, "full")
    ]
    assert speeds[0] > speeds[1]
    assert speeds[0] > speeds[2] > speeds[3]
    cheap = forecast_speed(make_run(recompute="cheap")).tokens_per_second_per_gpu
    assert 0.98 * speeds[0] < cheap < speeds[0]


def test_compiled_blocks_are_faster_and_fp8_is_faster_still():
    eager, compiled, eight = (
        forecast_speed(make_run(micro_batch=8, compiled=compiled, precision=precision)).tokens_per_second_per_gpu
        for compiled, precision in ((False, "bf16-mixed"), (True, "bf16-mixed"), (True, "fp8"))
    )
    assert eager < compiled < eight


def test_a_slower_network_is_never_faster():
    arguments = (
        "model.shape=llama3-8b", "hardware.gpu=a100-80gb", "hardware.devices=8", "hardware.nodes=4",
        "parallel.strategy=fsdp", "train.micro_batch=1", "train.global_batch=32", "data.max_length=2048",
    )  # fmt: skip
    names = ("infiniband-ndr", "infiniband-hdr", "ethernet-100", "ethernet-10")
    speeds = [tokens_per_second(*arguments, f"hardware.network={name}") for name in names]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 3 * speeds[-1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_data_parallel_speed_falls_gently_with_the_number_of_devices(strategy):
    def speed_per_gpu(count):
        mesh = Mesh(dp_replicate=count) if strategy == "ddp" else Mesh(dp_shard=count)
        run = make_run("llama3.2-1b", "a100-80gb", micro_batch=8, strategy=strategy, mesh=mesh)
        return forecast_speed(run).tokens_per_second_per_gpu

    alone = forecast_speed(make_run("llama3.2-1b", "a100-80gb", micro_batch=8)).tokens_per_second_per_gpu
    speeds = [speed_per_gpu(count) for count in (8, 64, 1024, 4096)]
    assert alone * 1.02 > speeds[0]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[1] > 0.6 * alone


def test_communication_overlaps_with_at_most_as_much_compute_as_there_is():
    """A step with little compute takes as long as its communication."""
    run = make_run("llama3-8b", length=64, micro_batch=1, strategy="fsdp", mesh=Mesh(dp_shard=64))
    run = run.with_(shape=replace(run.shape, vocab=1_000_000))
    over, shape = rank_group(run, 64, 1), run.shape
    head = shape.vocab * shape.hidden
    blocks = shape.layers * block_matrices(shape)
    gathers = collective_seconds(run, "all-gather", over, (2 * blocks + 2 * head) * 2)
    scatters = collective_seconds(run, "reduce-scatter", over, (blocks + 2 * head) * 4)
    assert forecast_speed(run).step_seconds > 0.99 * (gathers + scatters)


def test_the_bubble_shrinks_with_more_micro_batches_and_with_interleaving():
    def bubble(grad_accum_steps, schedule="1f1b"):
        run = make_run(mesh=Mesh(pp=4), grad_accum_steps=grad_accum_steps, schedule=schedule, strategy="ddp")
        step = forecast_speed(run).step
        found = step.find("pipeline bubble")
        assert found is not None
        return found.amount / step.amount

    assert bubble(4) > bubble(16) > bubble(64)
    assert bubble(16, "interleaved") < bubble(16)


def test_rank_groups_know_how_many_nodes_they_span():
    run = make_run(mesh=Mesh(tp=4, dp_shard=16))
    assert rank_group(run, 4, 1).nodes == 1  # tensor-parallel ranks are adjacent
    over = rank_group(run, 16, 4)  # every fourth rank: two of them in each node of eight
    assert (over.nodes, over.within) == (8, 2)
    assert LINKS["nvlink4"].bytes_per_second > LINKS["infiniband-ndr"].bytes_per_second


def test_small_eager_kernels_are_bound_by_launch_overhead():
    step = forecast_speed(make_run("gpt2", "h100-80gb", length=64, compiled=False)).step
    overhead = step.find("kernel launch overhead")
    assert overhead is not None
    assert overhead.amount > step.amount / 2

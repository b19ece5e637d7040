"""Reductions of gradients and the links that they travel over, checked against arithmetic by hand."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.catalogue.gpus import GPUS, LINKS
from shoal.catalogue.shapes import parameters
from shoal.config.mesh import Mesh
from shoal.plan.run.run import Run
from shoal.plan.speed.communication import Group, collective_seconds, exposed_reduction, ring_speed
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.speed.kernels import STREAMED
from shoal.plan.speed.ring import Operation
from shoal.plan.systems.modelled import SYSTEMS
from shoal.plan.systems.traits import SystemTraits
from tests.plan.planning import make_run
from tests.plan.systems.test_other_systems import term

DEEPSPEED = SYSTEMS["deepspeed"]
OVERLAPPED = replace(DEEPSPEED, overlaps_gradients=True, bucket_elements=2e8)


def on_eight(shape: str = "llama2-7b", gpu: str = "a100-80gb", *, traits: SystemTraits = DEEPSPEED, **run: Any) -> Run:
    settings: dict[str, Any] = {"precision": "bf16-mixed", "strategy": "zero2", "micro_batch": 4, **run}
    return make_run(shape, gpu, mesh=Mesh(dp_shard=8), traits=traits, compiled=False, loss="plain", **settings)


def test_a_reduction_waits_for_its_first_bucket_and_for_what_is_computed_last() -> None:
    # Of ten seconds, a backward pass of four hides what is left after a first bucket of a quarter.
    assert exposed_reduction(10, 4, 0.1, 0.25) == pytest.approx(10 - 3)
    # A backward pass that is long enough hides all but the last bucket, or what comes last.
    assert exposed_reduction(1, 10, 0.1, 0.3) == pytest.approx(0.1)
    assert exposed_reduction(1, 10, 0.05, 0.35) == pytest.approx(0.3)
    assert exposed_reduction(1, 10, 0.4, 0.3) == pytest.approx(0.4)
    # What fits in one bucket is reduced when all of it is there.
    assert exposed_reduction(1, 10, 0.1, 1.7) == 1
    assert exposed_reduction(1, 10, 0.1) == pytest.approx(0.1)


def test_zero2_of_deepspeed_all_reduces_while_nothing_else_runs_unless_told_to_overlap() -> None:
    run, count = on_eight(), parameters(on_eight().shape)
    size = 2 * count
    reduced = collective_seconds(run, "all-reduce", Group(8, 1), size)
    # Into the bucket, divided there, and flattened: read and written each time.
    copied = 6 * size / (2039e9 * STREAMED)
    found = term(forecast_speed(run), "exposed FSDP collectives")
    assert found == pytest.approx(reduced + copied, rel=0.02)
    # Before version 0.12.4, each gradient went to one rank, and was not flattened before.
    earlier = term(forecast_speed(run.with_(traits=replace(DEEPSPEED, all_reduces=False))), "exposed FSDP collectives")
    assert earlier == pytest.approx(reduced / 2 + copied * 4 / 6, rel=0.02)
    # Of 6.7 billion elements, the last bucket of 0.2 billion has 0.14.
    hidden = term(forecast_speed(run.with_(traits=OVERLAPPED)), "exposed FSDP collectives")
    assert hidden == pytest.approx(reduced * max(1 / 32, (count % 2e8) / count) + copied, rel=0.02)


def test_zero1_of_a_small_model_is_one_bucket_that_nothing_hides() -> None:
    def exposed(shape: str) -> float:
        run = on_eight(shape, strategy="zero1", traits=OVERLAPPED)
        reduced = collective_seconds(run, "all-reduce", Group(8, 1), 2 * parameters(run.shape))
        return term(forecast_speed(run), "gradient all-reduce") / reduced

    assert exposed("gpt2") == pytest.approx(1)
    assert exposed("llama2-7b") < 0.05


def test_ddp_reduces_the_embedding_when_the_backward_pass_is_over() -> None:
    run = on_eight("gpt2", strategy="ddp", traits=SYSTEMS["huggingface"], precision="32-true")
    reduced = collective_seconds(run, "all-reduce", Group(8, 1), 4 * parameters(run.shape))
    share = (run.shape.vocab + 1024) * run.shape.hidden / parameters(run.shape)
    assert share > 0.3
    assert term(forecast_speed(run), "gradient all-reduce") == pytest.approx(share * reduced, rel=0.01)


def test_the_rings_of_few_v100_have_few_links() -> None:
    def speed(ranks: int, devices: int) -> float:
        return ring_speed(on_eight(gpu="v100-32gb", devices=devices), Group(ranks, 1)) / (0.8 * 25e9)

    assert [speed(ranks, 8) for ranks in (2, 3, 4, 8)] == pytest.approx([1, 2, 4, 6])
    # Two links between any of four, and a switch between sixteen.
    assert [speed(ranks, 4) for ranks in (2, 4)] == pytest.approx([2, 6])
    assert speed(2, 16) == pytest.approx(6)
    # A switch too in nodes of A100.
    assert ring_speed(on_eight(), Group(2, 1)) == ring_speed(on_eight(), Group(8, 1))


def test_cards_that_cannot_access_each_other_communicate_through_host_memory() -> None:
    assert {GPUS[name].link for name in ("rtx2080ti", "rtx3090", "rtx4090", "a10g", "l4")} == {"pcie-host"}
    assert {GPUS[name].link for name in ("a6000", "rtx6000-ada", "l40s")} == {"pcie4"}

    def speed(gpu: str, operation: Operation, ranks: int) -> float:
        factor = (2 if operation == "all-reduce" else 1) * (ranks - 1) / ranks
        return factor * 8e9 / collective_seconds(on_eight(gpu=gpu), operation, Group(ranks, 1), 8e9)

    assert speed("rtx4090", "all-gather", 4) == pytest.approx(7.7e9, rel=0.01)
    assert speed("rtx4090", "reduce-scatter", 4) == pytest.approx(6.0e9, rel=0.01)
    assert speed("rtx4090", "all-reduce", 4) == pytest.approx(4.0e9, rel=0.01)
    # With peer access; across two sockets it is less.
    assert speed("a40", "all-reduce", 4) == pytest.approx(0.6 * 31.5e9, rel=0.01)
    assert speed("a40", "all-gather", 4) == pytest.approx(0.6 * 31.5e9, rel=0.01)
    assert speed("a40", "all-reduce", 8) == pytest.approx(0.45 * 31.5e9, rel=0.01)


def test_devices_that_share_a_port_over_tcp_reach_less_of_it() -> None:
    def speed(network: str, ranks: int, nodes: int) -> float:
        run = on_eight(devices=ranks // nodes).with_(network=LINKS[network])
        return ring_speed(run, Group(ranks, nodes)) / LINKS[network].bytes_per_second

    assert speed("ethernet-25", 16, 2) == pytest.approx(8 * 0.58)
    assert speed("ethernet-25", 2, 2) == pytest.approx(0.8)
    assert speed("infiniband-hdr", 16, 2) == pytest.approx(8 * 0.8)

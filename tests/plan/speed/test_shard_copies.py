"""Copies around the collectives of sharded weights, checked against arithmetic by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.catalogue.gpus import GPUS
from shoal.catalogue.shapes import parameters
from shoal.config.mesh import Mesh
from shoal.plan.run.layout import ranks_of
from shoal.plan.run.run import FROZEN, Adapter, Run
from shoal.plan.speed.copies import COPIED, block_collectives, shard_copies
from shoal.plan.speed.eager import Kernel, kernel_seconds
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.speed.kernels import contiguous_rate
from shoal.plan.systems.modelled import SYSTEMS
from tests.plan.planning import make_run
from tests.plan.systems.test_other_systems import term

NAME = "copies around collectives"
MEASURED = Path(__file__).parents[3] / "benchmarks" / "gpu" / "fsdp_copies_h200" / "fsdp_copies.json"


def on_eight(system: str, **settings: Any) -> Run:
    settings = {"strategy": "fsdp", "mesh": Mesh(dp_shard=8), "precision": "bf16-mixed", **settings}
    return make_run("llama2-7b", "a100-80gb", traits=SYSTEMS[system], **settings)


def each(run: Run) -> float:
    """Seconds for a byte of every parameter, in copies without casts."""
    return parameters(run.shape) / (run.gpu.memory_bandwidth * COPIED)


def widened(run: Run) -> float:
    """Seconds to cast every parameter from 16 bits to fp32."""
    return kernel_seconds(run, [Kernel(1.0, 6, unrolled=True)], parameters(run.shape))


def seconds(run: Run) -> float:
    return term(forecast_speed(run), NAME) / run.grad_accum_steps


def test_fsdp2_copies_what_it_gathers_and_what_it_reduces() -> None:
    # Two all-gathers in 16 bits, read and written; and gradients from 16 bits into fp32. The embedding and the head, 4%
    # of the parameters, are gathered once.
    run = on_eight("torchtitan")
    assert seconds(run) == pytest.approx(2 * 4 * each(run) + widened(run), rel=0.02)
    assert seconds(run.with_(reduce_bytes=2)) == pytest.approx((2 * 4 + 4) * each(run), rel=0.02)
    assert seconds(run.with_(reshard=False)) == pytest.approx(4 * each(run) + widened(run), rel=0.02)
    frozen = run.with_(adapter=Adapter(8, ("q_proj",)), trained=FROZEN)
    assert seconds(frozen) == pytest.approx(2 * 4 * each(run), rel=0.03)
    # All of it is between the kernels, where it hides collectives.
    found = shard_copies(run, ranks_of(run)[0])
    assert found.beside == 0
    assert found.forward == pytest.approx(4 * each(run))


def test_copies_are_those_that_were_measured_on_an_h200() -> None:
    """Within a ninth on eight and more ranks."""
    run = on_eight("torchtitan").with_(gpu=GPUS["h200"])
    rows = [row for row in json.loads(MEASURED.read_text())["copies"] if row["ranks"] >= 8]
    assert len(rows) == 6
    for row in rows:
        count = row["parameters"]
        assert 4e3 * count / (4.8e12 * COPIED) == pytest.approx(row["copy_out_ms"], rel=0.1)
        into = kernel_seconds(run, [Kernel(1.0, 6, unrolled=True)], count)
        assert 1e3 * into == pytest.approx(row["copy_in_fp32_ms"], rel=0.11)


def test_fsdp1_puts_gradients_together_and_casts_and_divides_them_beside_the_backward_pass() -> None:
    run = on_eight("composer")
    found, size = shard_copies(run, ranks_of(run)[0]), parameters(run.shape) / contiguous_rate(run)
    assert found.forward == 0
    assert found.backward == pytest.approx(4 * each(run))
    assert found.beside == pytest.approx(4 * size)  # of the same dtype: only divided
    wide = run.with_(traits=replace(SYSTEMS["composer"], narrow_reduction=False))
    assert shard_copies(wide, ranks_of(wide)[0]).beside == pytest.approx(widened(run) + 8 * size)
    # Without a reduction there is none of this: `no_sync` until the last of four micro-batches.
    several = on_eight("litgpt", grad_accum_steps=4)
    assert shard_copies(several, ranks_of(several)[0]).beside == pytest.approx((widened(run) + 8 * size) / 4)


def test_zero3_copies_gradients_into_buckets_and_small_matrices_out_of_what_it_gathers() -> None:
    run = on_eight("deepspeed", strategy="zero3")
    found, size = shard_copies(run, ranks_of(run)[0]), parameters(run.shape) / contiguous_rate(run)
    assert (found.forward, found.backward) == (0, 0)
    assert found.beside == pytest.approx((2 * 4 + 6 * 2) * size, rel=0.02)
    # Matrices of more elements than a prefetch has are gathered one by one, where they stay.
    large = make_run("mpt-70b", "a100-80gb", traits=SYSTEMS["deepspeed"], strategy="zero3", mesh=Mesh(dp_shard=64))
    assert shard_copies(large, ranks_of(large)[0]).beside * contiguous_rate(large) == pytest.approx(
        6 * 2 * parameters(large.shape), rel=0.01
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_replicated_weights_need_none(strategy: str) -> None:
    assert seconds(on_eight("torchtitan", strategy=strategy)) == 0
    assert seconds(make_run("llama2-7b", strategy="fsdp", mesh=Mesh(dp_shard=1))) == 0
    # Nor does a compiler that lays out memory itself.
    planned = replace(SYSTEMS["torchtitan"], planned_memory=True)
    assert seconds(on_eight("torchtitan").with_(traits=planned)) == 0


def test_zero3_fetches_large_matrices_one_by_one() -> None:
    # Four of seven matrices of a 7B model have 16.8 million elements and three 45 million; a prefetch takes 50 million.
    assert block_collectives(on_eight("deepspeed", strategy="zero3")) == (5, 1)
    large = make_run("mpt-70b", traits=SYSTEMS["deepspeed"], strategy="zero3", mesh=Mesh(dp_shard=64))
    assert block_collectives(large) == (4, 2)
    assert block_collectives(on_eight("torchtitan")) == (1, 1)
    assert block_collectives(on_eight("deepspeed", strategy="zero2")) == (1, 1)
    # On many ranks each of them has the latency of a ring.
    far: dict[str, Any] = {"strategy": "zero3", "micro_batch": 1, "length": 64}
    many = make_run("mpt-70b", traits=SYSTEMS["deepspeed"], mesh=Mesh(dp_shard=1024), **far)
    once = many.with_(traits=replace(SYSTEMS["deepspeed"], bucket_elements=0.0))
    name = "exposed FSDP collectives"
    assert term(forecast_speed(many), name) > 1.1 * term(forecast_speed(once), name)

"""Copies around the collectives of sharded weights, checked against arithmetic by hand."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.catalogue.shapes import parameters
from shoal.config.mesh import Mesh
from shoal.plan.copies import block_collectives, shard_copies
from shoal.plan.kernels import contiguous_rate
from shoal.plan.layout import ranks_of
from shoal.plan.run import FROZEN, Adapter, Run
from shoal.plan.speed import forecast_speed
from shoal.plan.systems import SYSTEMS
from tests.plan.planning import make_run
from tests.plan.test_other_systems import term

NAME = "copies around collectives"


def on_eight(system: str, **settings: Any) -> Run:
    settings = {"strategy": "fsdp", "mesh": Mesh(dp_shard=8), "precision": "bf16-mixed", **settings}
    return make_run("llama2-7b", "a100-80gb", traits=SYSTEMS[system], **settings)


def moved(run: Run) -> float:
    """Bytes per parameter."""
    return term(forecast_speed(run), NAME) / run.grad_accum_steps * contiguous_rate(run) / parameters(run.shape)


def test_fsdp2_copies_what_it_gathers_and_what_it_reduces() -> None:
    # Two all-gathers in 16 bits, read and written; and gradients from 16 bits into fp32. The embedding and the head, 4%
    # of the parameters, are gathered once.
    run = on_eight("torchtitan")
    assert moved(run) == pytest.approx(2 * 4 + 6, rel=0.02)
    assert moved(run.with_(reduce_bytes=2)) == pytest.approx(2 * 4 + 4, rel=0.02)
    assert moved(run.with_(reshard=False)) == pytest.approx(4 + 6, rel=0.02)
    frozen = run.with_(adapter=Adapter(8, ("q_proj",)), trained=FROZEN)
    assert moved(frozen) == pytest.approx(2 * 4, rel=0.03)
    # All of it is between the kernels, where it hides collectives.
    found = shard_copies(run, ranks_of(run)[0])
    assert found.beside == 0
    assert found.backward == pytest.approx(found.forward * 10 / 4, rel=0.05)


def test_fsdp1_puts_gradients_together_and_casts_and_divides_them_beside_the_backward_pass() -> None:
    run = on_eight("composer")
    found, size = shard_copies(run, ranks_of(run)[0]), parameters(run.shape) / contiguous_rate(run)
    assert found.forward == 0
    assert found.backward == pytest.approx(4 * size)
    assert found.beside == pytest.approx(4 * size)  # of the same dtype: only divided
    wide = run.with_(traits=replace(SYSTEMS["composer"], narrow_reduction=False))
    assert shard_copies(wide, ranks_of(wide)[0]).beside == pytest.approx((6 + 8) * size)
    # Without a reduction there is none of this: `no_sync` until the last of four micro-batches.
    several = on_eight("litgpt", grad_accum_steps=4)
    assert shard_copies(several, ranks_of(several)[0]).beside == pytest.approx((6 + 8) * size / 4)


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
    assert moved(on_eight("torchtitan", strategy=strategy)) == 0
    assert moved(make_run("llama2-7b", strategy="fsdp", mesh=Mesh(dp_shard=1))) == 0
    # Nor does a compiler that lays out memory itself.
    planned = replace(SYSTEMS["torchtitan"], planned_memory=True)
    assert moved(on_eight("torchtitan").with_(traits=planned)) == 0


def test_zero3_fetches_large_matrices_one_by_one() -> None:
    # Four of seven matrices of a 7B model have 16.8 million elements and three 45 million; a prefetch takes 50 million.
    assert block_collectives(on_eight("deepspeed", strategy="zero3")) == (5, 1)
    large = make_run("mpt-70b", traits=SYSTEMS["deepspeed"], strategy="zero3", mesh=Mesh(dp_shard=64))
    assert block_collectives(large) == (4, 2)
    assert block_collectives(on_eight("torchtitan")) == (1, 1)
    assert block_collectives(on_eight("deepspeed", strategy="zero2")) == (1, 1)
    # On many ranks each of them has the latency of a ring.
    far = {"strategy": "zero3", "micro_batch": 1, "length": 64}
    many = make_run("mpt-70b", traits=SYSTEMS["deepspeed"], mesh=Mesh(dp_shard=1024), **far)
    once = many.with_(traits=replace(SYSTEMS["deepspeed"], bucket_elements=0.0))
    name = "exposed FSDP collectives"
    assert term(forecast_speed(many), name) > 1.1 * term(forecast_speed(once), name)

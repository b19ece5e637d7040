"""The cost is counted, not believed: the exchanges of one optimizer step, by number and bytes, on one rank.

`docs/parallel-cost.md` gives the reasons for each formula. Sizes are those of the whole tensor: what a rank has after
an all-gather, and before a reduce-scatter. `pytest -s` prints what was counted.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import settings
from tests.parallel.measure import Amount, Exchange, Measured

HIDDEN, HEADS, KEY_HEADS, CHANNELS, FFN, VOCABULARY, BLOCKS = 64, 4, 2, 16, 176, 512, 4
ROWS, LENGTH = 2, 32
SHAPE = {
    "family": "llama",
    "hidden": HIDDEN,
    "layers": BLOCKS,
    "heads": HEADS,
    "kv_heads": KEY_HEADS,
    "ffn": FFN,
    "vocab": VOCABULARY,
    "positions": LENGTH,
}
# In bytes of fp32.
NORM = 4 * HIDDEN
BLOCK_MATRICES = 4 * HIDDEN * (2 * HIDDEN + 2 * KEY_HEADS * CHANNELS + 3 * FFN)
EMBEDDING = 4 * VOCABULARY * HIDDEN
BLOCK = BLOCK_MATRICES + 2 * NORM
ROOT = 2 * EMBEDDING + NORM  # embedding, head and final norm
ENDS = 3  # which are gathered each for itself
MODEL = BLOCKS * BLOCK + ROOT
ACTIVATIONS = 4 * ROWS * LENGTH * HIDDEN
KEYS = VALUES = 4 * ROWS * LENGTH * KEY_HEADS * CHANNELS
# Padding to equal shares, and nothing else, may come on top.
TOLERANCE = 0.02

Found = tuple[dict[Exchange, Amount], int]
Expected = dict[Exchange, tuple[int | None, float]]  # None: any number, as long as the bytes are right


@pytest.fixture
def run(text: Path) -> Callable[..., Measured]:
    """A run of `grad_accum_steps` passes a step, on rows that are all equally long."""

    def make(data_parallel: int, grad_accum_steps: int = 1, tied: bool = False, **changes: Any) -> Measured:
        options = {
            "model__shape": {**SHAPE, "tied": tied},
            "data__max_length": LENGTH,
            "data__pack": True,
            "train__deterministic": False,  # would fill new memory with NaN, which fake gathers leave there
            "train__micro_batch": ROWS,
            "train__global_batch": ROWS * grad_accum_steps * data_parallel,
        }
        return Measured(settings(text, **{**options, **changes}), length=LENGTH)

    return make


def count(measured: Measured, world_size: int) -> Found:
    found: Found = measured.as_rank_zero(world_size, measured.traffic)
    return found


def hold(found: Found, expected: Expected, *, scalars: int) -> None:
    amounts, sums = found
    for (kind, ranks), (number, size) in sorted(amounts.items()):
        print(f"\n  {number:3} × {kind} over {ranks}: {size:,} bytes ({size / MODEL:.3f} of the model)", end="")
    print(f"\n  {sums:3} × sum of one number", end="")
    assert amounts.keys() == expected.keys()
    for exchange, (number, size) in expected.items():
        assert amounts[exchange].size == pytest.approx(size, rel=TOLERANCE), exchange
        assert number in (None, amounts[exchange].number), exchange
    assert sums == scalars


def gather(ranks: int) -> Exchange:
    return Exchange("all-gather", ranks)


def scatter(ranks: int) -> Exchange:
    return Exchange("reduce-scatter", ranks)


def total(ranks: int) -> Exchange:
    return Exchange("all-reduce", ranks)


def swap(ranks: int) -> Exchange:
    return Exchange("all-to-all", ranks)


SEND, RECEIVE = Exchange("send", 2), Exchange("recv", 2)


@pytest.mark.parametrize("grad_accum_steps", [1, 3])
def test_ddp_sums_every_gradient_once_a_step_however_many_passes(run, grad_accum_steps):
    found = count(run(4, grad_accum_steps, parallel__strategy="ddp"), 4)
    hold(found, {total(4): (None, MODEL)}, scalars=0)


def test_ddp_in_bf16_sums_half_the_bytes(run):
    found = count(run(4, parallel__strategy="ddp", parallel__compress="bf16"), 4)
    hold(found, {total(4): (None, MODEL / 2)}, scalars=0)


@pytest.mark.parametrize("grad_accum_steps", [1, 3])
def test_zero1_sums_every_gradient_and_gathers_every_updated_row_once_a_step(run, grad_accum_steps):
    found = count(run(4, grad_accum_steps, parallel__strategy="zero1"), 4)
    hold(found, {total(4): (None, MODEL), gather(4): (None, MODEL)}, scalars=0)


@pytest.mark.parametrize("grad_accum_steps", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "sharding"),
    [("zero2", "full_shard"), pytest.param("fsdp", "shard_grad_op", marks=pytest.mark.slow)],
)
def test_zero2_gathers_weights_once_a_step_and_scatters_gradients_in_every_pass(
    run, strategy, sharding, grad_accum_steps
):
    found = count(run(4, grad_accum_steps, parallel__strategy=strategy, parallel__sharding=sharding), 4)
    units = BLOCKS + ENDS
    hold(
        found, {gather(4): (units, MODEL), scatter(4): (grad_accum_steps * units, grad_accum_steps * MODEL)}, scalars=1
    )


@pytest.mark.parametrize("grad_accum_steps", [1, 3])
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_zero3_gathers_blocks_twice_and_the_ends_once_in_every_pass(run, strategy, grad_accum_steps):
    found = count(run(4, grad_accum_steps, parallel__strategy=strategy), 4)
    gathered = (grad_accum_steps * (2 * BLOCKS + ENDS), grad_accum_steps * (2 * BLOCKS * BLOCK + ROOT))
    hold(
        found,
        {gather(4): gathered, scatter(4): (grad_accum_steps * (BLOCKS + ENDS), grad_accum_steps * MODEL)},
        scalars=1,
    )


def test_zero3_in_bf16_gathers_half_the_bytes_and_reduces_in_fp32(run):
    found = count(run(4, parallel__strategy="zero3", train__precision="bf16-mixed"), 4)
    norms = (2 * BLOCKS + 1) * NORM
    expected: Expected = {
        gather(4): (2 * BLOCKS + 2, (2 * BLOCKS * BLOCK_MATRICES + 2 * EMBEDDING) / 2),
        scatter(4): (BLOCKS + 2, MODEL - norms),
        total(4): (1, norms),  # every rank has them whole, in fp32
    }
    hold(found, expected, scalars=1)


def test_weights_kept_sharded_over_two_ranks_are_gathered_from_two_ranks_in_the_backward_pass(run):
    found = count(run(4, parallel__strategy="fsdp", parallel__reshard=2), 4)
    expected: Expected = {
        gather(4): (BLOCKS + ENDS, MODEL),
        gather(2): (BLOCKS, BLOCKS * BLOCK),
        scatter(4): (BLOCKS + ENDS, MODEL),
    }
    hold(found, expected, scalars=1)


@pytest.mark.parametrize("grad_accum_steps", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_hybrid_shard_shards_within_and_sums_its_shards_over_replicas(run, grad_accum_steps):
    hybrid = {"parallel__strategy": "fsdp", "parallel__sharding": "hybrid_shard", "parallel__replicate": 2}
    found = count(run(8, grad_accum_steps, **hybrid), 8)
    expected: Expected = {
        gather(4): (grad_accum_steps * (2 * BLOCKS + ENDS), grad_accum_steps * (2 * BLOCKS * BLOCK + ROOT)),
        scatter(4): (grad_accum_steps * (BLOCKS + ENDS), grad_accum_steps * MODEL),
        total(2): (BLOCKS + ENDS, MODEL / 4),  # after the last pass only
    }
    hold(found, expected, scalars=1)


def tensor_parallel(grad_accum_steps: int, recomputed_gathers: int = 0, recomputed_scatters: int = 0) -> Expected:
    """Per block and pass two gathers and two scatters each way; embedding and final norm are one pair each way."""
    exchanges = 4 * BLOCKS + 2
    gathers, scatters = exchanges + recomputed_gathers * BLOCKS, exchanges + recomputed_scatters * BLOCKS
    vocabulary = 3 * 4 * ROWS * LENGTH  # the highest logit, and then two sums together, of each token
    uncut = (2 * BLOCKS + 1) * NORM
    return {
        gather(2): (grad_accum_steps * gathers, grad_accum_steps * gathers * ACTIVATIONS),
        scatter(2): (grad_accum_steps * scatters, grad_accum_steps * scatters * ACTIVATIONS),
        total(2): (2 * grad_accum_steps + 1, grad_accum_steps * vocabulary + uncut),
    }


@pytest.mark.parametrize("grad_accum_steps", [1, 3])
def test_tensor_parallel_ranks_exchange_activations_and_the_gradients_of_norms(run, grad_accum_steps):
    hold(count(run(1, grad_accum_steps, parallel__tp=2), 2), tensor_parallel(grad_accum_steps), scalars=1)


def test_selective_recomputation_repeats_no_exchange(run):
    hold(count(run(1, parallel__tp=2, train__recompute="selective"), 2), tensor_parallel(1), scalars=1)


def test_full_recomputation_repeats_the_exchanges_of_the_forward_pass_but_the_last(run):
    found = count(run(1, parallel__tp=2, train__recompute="full"), 2)
    hold(found, tensor_parallel(1, recomputed_gathers=2, recomputed_scatters=1), scalars=1)


def test_the_costs_of_tensor_parallel_and_zero3_add_up(run):
    found = count(run(4, parallel__tp=2, parallel__strategy="zero3"), 8)
    block = BLOCK_MATRICES / 2 + 2 * NORM
    root = EMBEDDING + NORM
    expected = tensor_parallel(1)
    # The norms' gradients are summed over tensor-parallel ranks after they were scattered.
    expected[total(2)] = (3, 3 * 4 * ROWS * LENGTH + (2 * BLOCKS + 1) * NORM / 4)
    expected[gather(4)] = (2 * BLOCKS + ENDS, 2 * BLOCKS * block + root)
    expected[scatter(4)] = (BLOCKS + ENDS, BLOCKS * block + root)
    hold(found, expected, scalars=3)


@pytest.mark.parametrize("grad_accum_steps", [1, 3])
def test_context_parallel_gathers_keys_and_values_and_gradients_are_summed_over_all_ranks(run, grad_accum_steps):
    found = count(run(2, grad_accum_steps, parallel__strategy="ddp", parallel__cp=4), 8)
    both = grad_accum_steps * BLOCKS * (KEYS + VALUES)
    expected: Expected = {
        gather(4): (grad_accum_steps * BLOCKS, both),
        scatter(4): (grad_accum_steps * BLOCKS, both),
        total(8): (None, MODEL),
    }
    hold(found, expected, scalars=0)


@pytest.mark.parametrize("parts", [2, 4])
def test_ulysses_exchanges_heads_for_tokens_and_back(run, parts):
    changes = {"parallel__strategy": "ddp", "parallel__cp": parts, "parallel__cp_method": "ulysses"}
    found = count(run(2, **changes), 2 * parts)
    # Each rank has its part of the tokens. Fewer key heads than ranks are repeated until there is one for each.
    queries = results = ACTIVATIONS / parts
    keys_and_values = (KEYS + VALUES) / parts * max(1, parts / KEY_HEADS)
    swaps = (2 * 3 * BLOCKS, 2 * BLOCKS * (queries + keys_and_values + results))
    hold(found, {swap(parts): swaps, total(2 * parts): (None, MODEL)}, scalars=0)


def test_context_parallel_ranks_share_the_shards_of_zero3(run):
    found = count(run(2, parallel__strategy="zero3", parallel__cp=4), 8)
    both = BLOCKS * (KEYS + VALUES)
    expected: Expected = {
        gather(4): (BLOCKS, both),
        scatter(4): (BLOCKS, both),
        gather(8): (2 * BLOCKS + ENDS, 2 * BLOCKS * BLOCK + ROOT),
        scatter(8): (BLOCKS + ENDS, MODEL),
    }
    hold(found, expected, scalars=1)


def test_a_pipeline_sends_activations_over_each_border_once_each_way_and_nothing_else(run):
    grad_accum_steps, stages = 4, 4
    measured = run(1, grad_accum_steps, parallel__pp=stages)
    for stage, found in enumerate(measured.as_each_rank(stages, measured.traffic)):
        borders = (stage > 0) + (stage < stages - 1)
        through = (grad_accum_steps * borders, grad_accum_steps * borders * ACTIVATIONS)
        hold(found, {SEND: through, RECEIVE: through}, scalars=1)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_two_stages_a_device_have_more_borders_and_a_tied_embedding_is_summed_between_the_ends(run, schedule):
    grad_accum_steps, devices = 4, 2
    measured = run(1, grad_accum_steps, tied=True, parallel__pp=devices, parallel__pp_schedule=schedule)
    for found in measured.as_each_rank(devices, measured.traffic):
        # Four stages have three borders, and both devices are at all of them.
        through = (3 * grad_accum_steps, 3 * grad_accum_steps * ACTIVATIONS)
        hold(found, {SEND: through, RECEIVE: through, total(2): (1, EMBEDDING)}, scalars=1)


def test_a_sharded_stage_gathers_and_scatters_once_a_step(run):
    grad_accum_steps = 4
    measured = run(2, grad_accum_steps, parallel__pp=2, parallel__strategy="zero2")
    for rank, found in enumerate(measured.as_each_rank(4, measured.traffic)):
        # Two blocks a stage; the first has the embedding, the last the final norm and the head.
        is_last = rank >= 2
        weights = (3 + is_last, 2 * BLOCK + EMBEDDING + NORM * is_last)
        through = (grad_accum_steps, grad_accum_steps * ACTIVATIONS)
        hold(found, {SEND: through, RECEIVE: through, gather(2): weights, scatter(2): weights}, scalars=2)

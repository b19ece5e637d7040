"""The communication cost is measured: the collectives of one optimizer step on one rank, by number and bytes.

`docs/parallel-cost.md` explains each formula. Sizes are those of the full tensor: after an all-gather, and before a
reduce-scatter. `pytest -s` prints the counts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import settings, slow
from tests.parallel.measure import Amount, Collective, Measured

HIDDEN, HEADS, KEY_HEADS, CHANNELS, FFN, VOCABULARY, BLOCKS = 64, 4, 2, 16, 176, 512, 4
MICRO_BATCH, LENGTH = 2, 32
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
OUTER = 3  # embedding, head and final norm are gathered separately
MODEL = BLOCKS * BLOCK + ROOT
ACTIVATIONS = 4 * MICRO_BATCH * LENGTH * HIDDEN
KEYS = VALUES = 4 * MICRO_BATCH * LENGTH * KEY_HEADS * CHANNELS
# Only padding to equal shards may be added.
TOLERANCE = 0.02
# LoRA on all queries and values: the elements of A and B of both.
LORA = {"kind": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}
ADAPTER = 4 * 4 * BLOCKS * ((HIDDEN + HIDDEN) + (HIDDEN + KEY_HEADS * CHANNELS))

Found = tuple[dict[Collective, Amount], int]
Expected = dict[Collective, tuple[int | None, float]]  # None: any number, as long as the bytes are right


@pytest.fixture
def run(text: Path) -> Callable[..., Measured]:
    """A run with `grad_accum_steps`, on sequences of equal length."""

    def make(data_parallel: int, grad_accum_steps: int = 1, tied: bool = False, **changes: Any) -> Measured:
        options = {
            "model__shape": {**SHAPE, "tied": tied},
            "data__max_length": LENGTH,
            "data__pack": True,
            "train__deterministic": False,  # would fill new memory with NaN, which fake gathers leave there
            "train__micro_batch": MICRO_BATCH,
            "train__global_batch": MICRO_BATCH * grad_accum_steps * data_parallel,
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
    print(f"\n  {sums:3} × scalar all-reduce", end="")
    assert amounts.keys() == expected.keys()
    for collective, (number, size) in expected.items():
        assert amounts[collective].size == pytest.approx(size, rel=TOLERANCE), collective
        assert number in (None, amounts[collective].number), collective
    assert sums == scalars


def all_gather(ranks: int) -> Collective:
    return Collective("all-gather", ranks)


def reduce_scatter(ranks: int) -> Collective:
    return Collective("reduce-scatter", ranks)


def all_reduce(ranks: int) -> Collective:
    return Collective("all-reduce", ranks)


def all_to_all(ranks: int) -> Collective:
    return Collective("all-to-all", ranks)


SEND, RECEIVE = Collective("send", 2), Collective("recv", 2)


@pytest.mark.parametrize("grad_accum_steps", [slow(1), 2])
def test_ddp_all_reduces_every_gradient_once_per_step_whatever_the_accumulation(run, grad_accum_steps):
    found = count(run(4, grad_accum_steps, parallel__strategy="ddp"), 4)
    hold(found, {all_reduce(4): (None, MODEL)}, scalars=0)


def test_ddp_in_bf16_all_reduces_half_the_bytes(run):
    found = count(run(4, parallel__strategy="ddp", parallel__compress="bf16"), 4)
    hold(found, {all_reduce(4): (None, MODEL / 2)}, scalars=0)


@pytest.mark.parametrize("grad_accum_steps", [slow(1), 2])
def test_zero1_all_reduces_gradients_and_all_gathers_updated_weights_once_per_step(run, grad_accum_steps):
    found = count(run(4, grad_accum_steps, parallel__strategy="zero1"), 4)
    hold(found, {all_reduce(4): (None, MODEL), all_gather(4): (None, MODEL)}, scalars=0)


@pytest.mark.parametrize("grad_accum_steps", [slow(1), 2])
@pytest.mark.parametrize(
    ("strategy", "sharding"),
    [("zero2", "full_shard"), pytest.param("fsdp", "shard_grad_op", marks=pytest.mark.slow)],
)
def test_zero2_all_gathers_once_per_step_and_reduce_scatters_in_every_micro_batch(
    run, strategy, sharding, grad_accum_steps
):
    found = count(run(4, grad_accum_steps, parallel__strategy=strategy, parallel__sharding=sharding), 4)
    units = BLOCKS + OUTER
    hold(
        found,
        {all_gather(4): (units, MODEL), reduce_scatter(4): (grad_accum_steps * units, grad_accum_steps * MODEL)},
        scalars=1,
    )


@pytest.mark.parametrize("grad_accum_steps", [slow(1), 2])
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_zero3_all_gathers_blocks_twice_and_embedding_and_head_once_per_micro_batch(run, strategy, grad_accum_steps):
    found = count(run(4, grad_accum_steps, parallel__strategy=strategy), 4)
    gathered = (grad_accum_steps * (2 * BLOCKS + OUTER), grad_accum_steps * (2 * BLOCKS * BLOCK + ROOT))
    hold(
        found,
        {all_gather(4): gathered, reduce_scatter(4): (grad_accum_steps * (BLOCKS + OUTER), grad_accum_steps * MODEL)},
        scalars=1,
    )


def test_zero3_in_bf16_gathers_half_the_bytes_and_reduces_in_fp32(run):
    found = count(run(4, parallel__strategy="zero3", train__precision="bf16-mixed"), 4)
    norms = (2 * BLOCKS + 1) * NORM
    expected: Expected = {
        all_gather(4): (2 * BLOCKS + 2, (2 * BLOCKS * BLOCK_MATRICES + 2 * EMBEDDING) / 2),
        reduce_scatter(4): (BLOCKS + 2, MODEL - norms),
        all_reduce(4): (1, norms),  # replicated, in fp32
    }
    hold(found, expected, scalars=1)


def test_weights_resharded_to_two_ranks_are_gathered_from_two_ranks_in_the_backward_pass(run):
    found = count(run(4, parallel__strategy="fsdp", parallel__reshard=2), 4)
    expected: Expected = {
        all_gather(4): (BLOCKS + OUTER, MODEL),
        all_gather(2): (BLOCKS, BLOCKS * BLOCK),
        reduce_scatter(4): (BLOCKS + OUTER, MODEL),
    }
    hold(found, expected, scalars=1)


@pytest.mark.parametrize("grad_accum_steps", [slow(1), 2])
def test_hybrid_shard_all_reduces_its_shards_over_replicas(run, grad_accum_steps):
    hybrid = {"parallel__strategy": "fsdp", "parallel__sharding": "hybrid_shard", "parallel__replicate": 2}
    found = count(run(8, grad_accum_steps, **hybrid), 8)
    expected: Expected = {
        all_gather(4): (grad_accum_steps * (2 * BLOCKS + OUTER), grad_accum_steps * (2 * BLOCKS * BLOCK + ROOT)),
        reduce_scatter(4): (grad_accum_steps * (BLOCKS + OUTER), grad_accum_steps * MODEL),
        all_reduce(2): (BLOCKS + OUTER, MODEL / 4),  # after the last micro-batch only
    }
    hold(found, expected, scalars=1)


def tensor_parallel(grad_accum_steps: int, recomputed_gathers: int = 0, recomputed_scatters: int = 0) -> Expected:
    """Two all-gathers and two reduce-scatters per block and direction; one pair for embedding and final norm."""
    collectives = 4 * BLOCKS + 2
    gathers, scatters = collectives + recomputed_gathers * BLOCKS, collectives + recomputed_scatters * BLOCKS
    vocabulary = 3 * 4 * MICRO_BATCH * LENGTH  # per token: the largest logit, and then two sums together
    replicated = (2 * BLOCKS + 1) * NORM
    return {
        all_gather(2): (grad_accum_steps * gathers, grad_accum_steps * gathers * ACTIVATIONS),
        reduce_scatter(2): (grad_accum_steps * scatters, grad_accum_steps * scatters * ACTIVATIONS),
        all_reduce(2): (2 * grad_accum_steps + 1, grad_accum_steps * vocabulary + replicated),
    }


@pytest.mark.parametrize("grad_accum_steps", [slow(1), 2])
def test_tensor_parallel_ranks_communicate_activations_and_the_gradients_of_norms(run, grad_accum_steps):
    hold(count(run(1, grad_accum_steps, parallel__tp=2), 2), tensor_parallel(grad_accum_steps), scalars=1)


def test_selective_activation_checkpointing_repeats_no_collective(run):
    hold(count(run(1, parallel__tp=2, train__recompute="selective"), 2), tensor_parallel(1), scalars=1)


def test_full_activation_checkpointing_repeats_the_forward_collectives_but_the_last(run):
    found = count(run(1, parallel__tp=2, train__recompute="full"), 2)
    hold(found, tensor_parallel(1, recomputed_gathers=2, recomputed_scatters=1), scalars=1)


def test_the_costs_of_tensor_parallel_and_zero3_add_up(run):
    found = count(run(4, parallel__tp=2, parallel__strategy="zero3"), 8)
    block = BLOCK_MATRICES / 2 + 2 * NORM
    root = EMBEDDING + NORM
    expected = tensor_parallel(1)
    # The gradients of norms are all-reduced over tensor-parallel ranks after the reduce-scatter.
    expected[all_reduce(2)] = (3, 3 * 4 * MICRO_BATCH * LENGTH + (2 * BLOCKS + 1) * NORM / 4)
    expected[all_gather(4)] = (2 * BLOCKS + OUTER, 2 * BLOCKS * block + root)
    expected[reduce_scatter(4)] = (BLOCKS + OUTER, BLOCKS * block + root)
    hold(found, expected, scalars=3)


@pytest.mark.parametrize("grad_accum_steps", [slow(1), 2])
def test_context_parallel_all_gathers_keys_and_values_and_all_reduces_gradients(run, grad_accum_steps):
    found = count(run(2, grad_accum_steps, parallel__strategy="ddp", parallel__cp=4), 8)
    both = grad_accum_steps * BLOCKS * (KEYS + VALUES)
    expected: Expected = {
        all_gather(4): (grad_accum_steps * BLOCKS, both),
        reduce_scatter(4): (grad_accum_steps * BLOCKS, both),
        all_reduce(8): (None, MODEL),
    }
    hold(found, expected, scalars=0)


@pytest.mark.parametrize("parts", [2, 4])
def test_ulysses_is_an_all_to_all_of_heads_and_tokens_and_back(run, parts):
    changes = {"parallel__strategy": "ddp", "parallel__cp": parts, "parallel__cp_method": "ulysses"}
    found = count(run(2, **changes), 2 * parts)
    # Each rank has a shard of the tokens. If there are fewer key heads than ranks, they are repeated.
    queries = results = ACTIVATIONS / parts
    keys_and_values = (KEYS + VALUES) / parts * max(1, parts / KEY_HEADS)
    all_to_alls = (2 * 3 * BLOCKS, 2 * BLOCKS * (queries + keys_and_values + results))
    hold(found, {all_to_all(parts): all_to_alls, all_reduce(2 * parts): (None, MODEL)}, scalars=0)


def test_context_parallel_ranks_share_the_shards_of_zero3(run):
    found = count(run(2, parallel__strategy="zero3", parallel__cp=4), 8)
    both = BLOCKS * (KEYS + VALUES)
    expected: Expected = {
        all_gather(4): (BLOCKS, both),
        reduce_scatter(4): (BLOCKS, both),
        all_gather(8): (2 * BLOCKS + OUTER, 2 * BLOCKS * BLOCK + ROOT),
        reduce_scatter(8): (BLOCKS + OUTER, MODEL),
    }
    hold(found, expected, scalars=1)


def test_a_pipeline_sends_activations_and_gradients_between_adjacent_stages_and_nothing_else(run):
    grad_accum_steps, stages = 4, 4
    measured = run(1, grad_accum_steps, parallel__pp=stages)
    for stage, found in enumerate(measured.as_each_rank(stages, measured.traffic)):
        neighbours = (stage > 0) + (stage < stages - 1)
        through = (grad_accum_steps * neighbours, grad_accum_steps * neighbours * ACTIVATIONS)
        hold(found, {SEND: through, RECEIVE: through}, scalars=1)


@pytest.mark.parametrize("schedule", ["interleaved", slow("zero-bubble")])
def test_two_stages_per_device_send_more_and_all_reduce_a_tied_embedding(run, schedule):
    grad_accum_steps, devices = 4, 2
    measured = run(1, grad_accum_steps, tied=True, parallel__pp=devices, parallel__pp_schedule=schedule)
    for found in measured.as_each_rank(devices, measured.traffic):
        # Four stages have three boundaries, and both devices are at all of them.
        through = (3 * grad_accum_steps, 3 * grad_accum_steps * ACTIVATIONS)
        hold(found, {SEND: through, RECEIVE: through, all_reduce(2): (1, EMBEDDING)}, scalars=1)


def test_a_sharded_stage_all_gathers_and_reduce_scatters_once_per_step(run):
    grad_accum_steps = 4
    measured = run(2, grad_accum_steps, parallel__pp=2, parallel__strategy="zero2")
    for rank, found in enumerate(measured.as_each_rank(4, measured.traffic)):
        # Two blocks per stage; the first has the embedding, the last the final norm and the head.
        is_last = rank >= 2
        weights = (3 + is_last, 2 * BLOCK + EMBEDDING + NORM * is_last)
        through = (grad_accum_steps, grad_accum_steps * ACTIVATIONS)
        hold(found, {SEND: through, RECEIVE: through, all_gather(2): weights, reduce_scatter(2): weights}, scalars=2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_frozen_base_takes_no_part_in_gradient_communication(run, strategy):
    """To the byte: fp32 gradients of the adapter, and nothing of the base, which FSDP only all-gathers."""
    amounts, _ = count(run(2, parallel__strategy=strategy, adapter=LORA), 2)
    gathered = amounts.pop(all_gather(2), Amount(0, 0)).size
    reduced = {collective: amount.size for collective, amount in amounts.items()}
    assert reduced == {all_reduce(2) if strategy == "ddp" else reduce_scatter(2): ADAPTER}
    assert gathered == (0 if strategy == "ddp" else 2 * BLOCKS * BLOCK + ROOT + 2 * ADAPTER)

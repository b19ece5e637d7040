"""The memory of a rank is measured: between steps, at the peak of a step, and while loading.

Every allocation of torch's CPU allocator is counted, so the figures are exact; sequences of two tokens keep activations
small. `docs/parallel-cost.md` explains each formula. `pytest -s` prints the measurements.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from shoal.catalogue.shapes import shape_from_sizes
from shoal.models.families import transformers_config
from shoal.optim import zero1
from tests.harness import settings, slow, train_on
from tests.parallel.measure import Measured, Memory

HIDDEN, HEADS, KEY_HEADS, CHANNELS, FFN, VOCABULARY, BLOCKS = 256, 4, 2, 64, 704, 512, 4
SHAPE = {
    "family": "llama",
    "hidden": HIDDEN,
    "layers": BLOCKS,
    "heads": HEADS,
    "kv_heads": KEY_HEADS,
    "ffn": FFN,
    "vocab": VOCABULARY,
    "positions": 64,
    "tied": True,
}
# In bytes of fp32.
MATRIX = 4 * HIDDEN * FFN  # the largest
BLOCK = 4 * HIDDEN * (2 * HIDDEN + 2 * KEY_HEADS * CHANNELS + 3 * FFN + 2)
ROOT = 4 * HIDDEN * (VOCABULARY + 1)
MODEL = BLOCKS * BLOCK + ROOT
PREFETCH = 1  # the default of parallel.prefetch
# Activations of two tokens, the optimizer's counters, rotary frequencies: together less than this fraction.
TOLERANCE = 0.01

Measure = Callable[..., Memory]


@pytest.fixture(scope="module")
def measure(text: Path) -> Measure:
    """The memory of rank 0; each case is measured once for all tests of this file."""

    @cache
    def of(strategy: str, ranks: int, grad_accum_steps: int, prefetch: int) -> Memory:
        changes = {"parallel__strategy": strategy, "parallel__prefetch": prefetch}
        run = Measured(_settings(text, train__global_batch=ranks * grad_accum_steps, **changes), length=2)
        found: Memory = run.as_rank_zero(ranks, run.memory)
        return found

    return lambda strategy, ranks, grad_accum_steps=1, prefetch=PREFETCH: of(
        strategy, ranks, grad_accum_steps, prefetch
    )


def _settings(text: Path, **changes: Any) -> dict[str, Any]:
    options = {
        "model__shape": SHAPE,
        "data__max_length": 32,
        "data__pack": True,
        "train__micro_batch": 1,
        "train__global_batch": 4,
        "train__deterministic": False,  # would fill new memory with NaN, which fake gathers leave there
    }
    return settings(text, **{**options, **changes})


def hold(what: str, found: float, expected: float) -> None:
    print(f"\n  {what}: {found:,.0f} bytes, {found / MODEL:.3f} of the weights", end="")
    assert found == pytest.approx(expected, rel=TOLERANCE), what


RANKS = (1, 2, 4, 8)


@pytest.mark.parametrize("ranks", [*map(slow, RANKS[:-1]), 8])
def test_zero1_shards_the_optimizer_state(measure, ranks):
    found = measure("zero1", ranks)
    everything = MODEL + MODEL + 2 * MODEL / ranks
    hold("weights, gradients and moments", found.after("micro-batches"), everything)
    # DDP's gradients are views of its buckets, which persist; a single process frees them.
    hold("between steps", found.before("step"), everything - (MODEL if ranks == 1 else 0))


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        *(("zero2", 8), ("zero3", 1), ("zero3", 8)),
        *(slow("zero2", ranks) for ranks in RANKS[:-1]),
        *(slow("zero3", ranks) for ranks in RANKS[1:-1]),
    ],
)
def test_zero2_and_zero3_shard_everything_between_micro_batches(measure, strategy, ranks):
    found = measure(strategy, ranks)
    hold("weights, gradients and moments", found.after("micro-batches"), 4 * MODEL / ranks)
    hold("between steps", found.before("step"), 3 * MODEL / ranks)


def test_one_process_needs_sixteen_bytes_per_parameter_and_four_for_the_update(measure):
    found = measure("zero3", 1)
    # AdamW without a fused kernel, as on a CPU, copies its second moment.
    hold("peak of a step", found.peak("step"), 5 * MODEL)


@pytest.mark.parametrize("ranks", [slow(2), slow(4), 8])
def test_the_peak_of_zero1_is_the_all_gather_of_updated_weights(measure, ranks):
    found = measure("zero1", ranks)
    everything = (2 + 2 / ranks) * MODEL
    # A gradient is computed first and then copied into its bucket.
    assert everything <= found.peak("micro-batches") <= everything + BLOCK
    # Own rows, all ranks' rows, and one matrix of them as it is copied back: at once, since they fit one bucket.
    hold("peak of a step", found.peak("step"), everything + MODEL / ranks + MODEL + MATRIX)


def test_zero1_all_gathers_updated_weights_one_bucket_at_a_time(text, monkeypatch):
    monkeypatch.setattr(zero1, "BUCKET", 1)  # a bucket for each matrix
    ranks = 8
    run = Measured(_settings(text, parallel__strategy="zero1", train__global_batch=ranks), length=2)
    found = run.as_rank_zero(ranks, run.memory)
    all_gather = MATRIX / ranks + MATRIX + MATRIX
    hold("peak of a step", found.peak("step"), (2 + 2 / ranks) * MODEL + max(all_gather, MODEL / ranks))


def test_gradient_accumulation_with_zero1_needs_no_more_memory(measure):
    peak = measure("zero1", 4, grad_accum_steps=2).peak("micro-batches")
    print(f"\n  peak of the micro-batches: {peak:,} bytes, {peak / MODEL:.3f} of the weights", end="")
    assert peak <= (2 + 2 / 4) * MODEL + BLOCK


@pytest.mark.parametrize("ranks", [slow(2), slow(4), 8])
def test_the_peak_of_zero2_is_all_weights_gathered_and_two_blocks(measure, ranks):
    found = measure("zero2", ranks)
    # The block being copied out of its all-gather buffer, and the buffer of the previous block.
    hold("peak of a step", found.peak("step"), 3 * MODEL / ranks + MODEL + 2 * BLOCK)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_gradient_accumulation_with_zero2_holds_gradients_beside_the_gathered_weights(measure, ranks):
    found = measure("zero2", ranks, grad_accum_steps=3)
    # The gradients of a block, those of the previous block in the reduce-scatter, and the tied embedding's, which
    # is started first and completed last.
    hold("peak of a step", found.peak("step"), 4 * MODEL / ranks + MODEL + 2 * BLOCK + ROOT)


@pytest.mark.parametrize(("ranks", "prefetch"), [slow(2, 1), slow(4, 1), (8, 1), (8, 2)])
def test_the_peak_of_zero3_is_a_few_blocks(measure, ranks, prefetch):
    found = measure("zero3", ranks, prefetch=prefetch)
    # Gathered: the root, a block and those prefetched. Gradients: the root's, the block's, and those of the previous
    # block in the reduce-scatter. The other blocks have only gradient shards.
    root, blocks = 2 * ROOT, (3 + prefetch) * BLOCK
    scattered = (BLOCKS - 1 - prefetch) * BLOCK / ranks
    hold("peak of a step", found.peak("step"), 3 * MODEL / ranks + scattered + root + blocks)


@pytest.mark.parametrize("ranks", [slow(2), 4])
def test_an_embedding_and_a_head_larger_than_blocks_are_not_gathered_at_the_same_time(text, ranks):
    vocabulary = 8192
    shape = {**SHAPE, "vocab": vocabulary, "tied": False}
    run = Measured(_settings(text, model__shape=shape, parallel__strategy="zero3", train__global_batch=ranks), length=2)
    embedding = 4 * HIDDEN * vocabulary
    model = BLOCKS * BLOCK + 2 * embedding + 4 * HIDDEN
    # All gradients are sharded but the embedding's, which is there as computed and in the reduce-scatter.
    hold("peak of a step", run.as_rank_zero(ranks, run.memory).peak("step"), 4 * model / ranks + 2 * embedding)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("ranks", [slow(2), slow(4), 8])
def test_the_update_needs_one_more_shard(measure, strategy, ranks):
    found = measure(strategy, ranks)
    hold("peak of the update", found.peak("update"), 5 * MODEL / ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a model of the same shape."""
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(transformers_config(shape_from_sizes(**SHAPE))).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("ranks", "key", "value"), [slow(4, "strategy", "zero3"), (2, "strategy", "zero3"), (2, "tp", 2)]
)
def test_loading_a_folder_allocates_only_the_shard_of_a_rank(text, folder, ranks, key, value):
    model = {"from": str(folder), "tokenizer": "bytes"}
    run = Measured(_settings(text, model=model, **{f"parallel__{key}": value}), length=2)
    for found in run.as_each_rank(ranks, run.loading):
        hold("peak of loading", found.peak("set up"), MODEL / ranks)


@pytest.mark.parametrize(("before", "ranks"), [(1, 2), slow(2, 4)])
def test_loading_a_checkpoint_allocates_only_the_shard_of_a_rank(text, before, ranks, tmp_path):
    strategy = "zero1" if before > 1 else "single"
    saved = train_on(before, _settings(text, parallel__strategy=strategy, train__steps=1), tmp_path)
    newest = saved / "checkpoints" / (saved / "checkpoints" / "latest").read_text().strip()
    run = Measured(_settings(text, parallel__strategy="zero3"), length=2, start_from=newest)
    for found in run.as_each_rank(ranks, run.loading):
        hold("peak of loading", found.peak("set up"), 3 * MODEL / ranks)


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 8192])
def test_random_weights_need_one_more_block_or_everything_outside_of_blocks(text, vocabulary):
    shape = {**SHAPE, "vocab": vocabulary}
    run = Measured(_settings(text, model__shape=shape, parallel__strategy="zero3"), length=2)
    found = run.as_rank_zero(4, run.loading)
    root = 4 * HIDDEN * (vocabulary + 1)
    assert (root > BLOCK) == (vocabulary > VOCABULARY), "one case of each"
    hold("peak of initialization", found.peak("set up"), (BLOCKS * BLOCK + root) / 4 + max(BLOCK, root))

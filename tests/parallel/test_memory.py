"""Memory is measured too: what a rank has between steps, at the peak of one, and while it loads.

Every allocation of torch's CPU allocator is counted, so these are exact; activations are made small by rows of two
tokens. `docs/parallel-cost.md` gives the reasons for each formula. `pytest -s` prints what was measured.
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
from tests.harness import settings, train_on
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
# Activations of two tokens, the optimizer's counters, rotary frequencies: together less than this share.
TOLERANCE = 0.01

Measure = Callable[..., Memory]


@pytest.fixture(scope="module")
def measure(text: Path) -> Measure:
    """Rank 0 of so many; each case is measured once for all tests of this file."""

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


RANKS = pytest.mark.parametrize("ranks", [1, 2, 4, 8])


@RANKS
def test_zero1_divides_the_optimizer_state(measure, ranks):
    found = measure("zero1", ranks)
    everything = MODEL + MODEL + 2 * MODEL / ranks
    hold("weights, gradients and moments", found.after("grad_accum_steps"), everything)
    # DDP's gradients lie in its buckets, which stay; one process alone frees them.
    hold("between steps", found.before("step"), everything - (MODEL if ranks == 1 else 0))


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@RANKS
def test_zero2_and_zero3_divide_everything_between_passes(measure, strategy, ranks):
    found = measure(strategy, ranks)
    hold("weights, gradients and moments", found.after("grad_accum_steps"), 4 * MODEL / ranks)
    hold("between steps", found.before("step"), 3 * MODEL / ranks)


def test_one_process_needs_sixteen_bytes_a_parameter_and_four_for_the_update(measure):
    found = measure("zero3", 1)
    # AdamW without a fused kernel, as on a CPU, makes a copy of its second moment.
    hold("peak of a step", found.peak("step"), 5 * MODEL)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_peak_of_zero1_is_the_exchange_of_updated_rows(measure, ranks):
    found = measure("zero1", ranks)
    everything = (2 + 2 / ranks) * MODEL
    # A gradient is made by itself and then copied into its bucket.
    assert everything <= found.peak("grad_accum_steps") <= everything + BLOCK
    # Own rows, everyone's, and one of those as it is copied to its place: all at once, since a bucket holds that many.
    hold("peak of a step", found.peak("step"), everything + MODEL / ranks + MODEL + MATRIX)


def test_zero1_exchanges_updated_rows_a_bucket_at_a_time(text, monkeypatch):
    monkeypatch.setattr(zero1, "BUCKET", 1)  # a bucket for each matrix
    ranks = 8
    run = Measured(_settings(text, parallel__strategy="zero1", train__global_batch=ranks), length=2)
    found = run.as_rank_zero(ranks, run.memory)
    exchange = MATRIX / ranks + MATRIX + MATRIX
    hold("peak of a step", found.peak("step"), (2 + 2 / ranks) * MODEL + max(exchange, MODEL / ranks))


def test_zero1_with_several_passes_needs_no_more_than_with_one(measure):
    peak = measure("zero1", 4, grad_accum_steps=3).peak("grad_accum_steps")
    print(f"\n  peak of the passes: {peak:,} bytes, {peak / MODEL:.3f} of the weights", end="")
    assert peak <= (2 + 2 / 4) * MODEL + BLOCK


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_peak_of_zero2_is_all_weights_gathered_and_two_blocks(measure, ranks):
    found = measure("zero2", ranks)
    # Those being copied out of the buffer that they arrived in, and the buffer of the block before.
    hold("peak of a step", found.peak("step"), 3 * MODEL / ranks + MODEL + 2 * BLOCK)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_zero2_with_several_passes_has_gradients_beside_the_gathered_weights(measure, ranks):
    found = measure("zero2", ranks, grad_accum_steps=3)
    # The gradients of a block, those of the block before on their way, and the tied embedding's, which come first and
    # are complete last.
    hold("peak of a step", found.peak("step"), 4 * MODEL / ranks + MODEL + 2 * BLOCK + ROOT)


@pytest.mark.parametrize(("ranks", "prefetch"), [(2, 1), (4, 1), (8, 1), (8, 2)])
def test_the_peak_of_zero3_is_a_few_blocks(measure, ranks, prefetch):
    found = measure("zero3", ranks, prefetch=prefetch)
    # Gathered: the root, a block and those prefetched. Gradients: the root's, the block's, and those of the block
    # before on their way. The blocks that are neither gathered any more nor yet have left their shards.
    root, blocks = 2 * ROOT, (3 + prefetch) * BLOCK
    scattered = (BLOCKS - 1 - prefetch) * BLOCK / ranks
    hold("peak of a step", found.peak("step"), 3 * MODEL / ranks + scattered + root + blocks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ends_that_are_larger_than_blocks_are_not_gathered_at_one_time(text, ranks):
    vocabulary = 8192
    shape = {**SHAPE, "vocab": vocabulary, "tied": False}
    run = Measured(_settings(text, model__shape=shape, parallel__strategy="zero3", train__global_batch=ranks), length=2)
    end = 4 * HIDDEN * vocabulary
    model = BLOCKS * BLOCK + 2 * end + 4 * HIDDEN
    # All shards of gradients are there but the embedding's, which is whole, as computed and on its way.
    hold("peak of a step", run.as_rank_zero(ranks, run.memory).peak("step"), 4 * model / ranks + 2 * end)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_update_needs_a_shard_more(measure, strategy, ranks):
    found = measure(strategy, ranks)
    hold("peak of the update", found.peak("update"), 5 * MODEL / ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a model of the same shape."""
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(transformers_config(shape_from_sizes(**SHAPE))).save_pretrained(path)
    return path


@pytest.mark.parametrize(("ranks", "key", "value"), [(4, "strategy", "zero3"), (2, "tp", 2)])
def test_a_rank_that_loads_a_folder_never_has_more_than_its_share(text, folder, ranks, key, value):
    model = {"from": str(folder), "tokenizer": "bytes"}
    run = Measured(_settings(text, model=model, **{f"parallel__{key}": value}), length=2)
    for found in run.as_each_rank(ranks, run.loading):
        hold("peak of loading", found.peak("set up"), MODEL / ranks)


def test_a_rank_that_loads_a_checkpoint_never_has_more_than_its_share(text, tmp_path):
    before = train_on(2, _settings(text, parallel__strategy="zero1", train__steps=1), tmp_path)
    newest = before / "checkpoints" / (before / "checkpoints" / "latest").read_text().strip()
    run = Measured(_settings(text, parallel__strategy="zero3"), length=2, start_from=newest)
    for found in run.as_each_rank(4, run.loading):
        hold("peak of loading", found.peak("set up"), 3 * MODEL / 4)


@pytest.mark.parametrize("vocabulary", [VOCABULARY, 8192])
def test_random_weights_take_a_rank_one_block_more_or_all_that_is_outside_of_blocks(text, vocabulary):
    shape = {**SHAPE, "vocab": vocabulary}
    run = Measured(_settings(text, model__shape=shape, parallel__strategy="zero3"), length=2)
    found = run.as_rank_zero(4, run.loading)
    root = 4 * HIDDEN * (vocabulary + 1)
    assert (root > BLOCK) == (vocabulary > VOCABULARY), "one case of each"
    hold("peak of drawing", found.peak("set up"), (BLOCKS * BLOCK + root) / 4 + max(BLOCK, root))

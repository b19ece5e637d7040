"""What `auto` means, as arithmetic."""

import pytest

from shoal.config.schema import ParallelConfig
from shoal.mistakes import UserMistake
from shoal.plan.choose import Sizes, choose_batch, choose_strategy, count_steps

SEVEN_BILLION = Sizes(parameters=6_738_415_616, layers=32, hidden=4096, vocabulary=32000, length=2048)
SMALL = Sizes(parameters=162_322_944, layers=12, hidden=768, vocabulary=50304, length=2048)


@pytest.mark.parametrize(
    ("wanted", "sizes", "world_size", "memory", "strategy"),
    [
        ({"strategy": "auto"}, SMALL, 1, 80.0, "single"),
        ({"strategy": "auto"}, SMALL, 8, 80.0, "ddp"),
        ({"strategy": "auto"}, SEVEN_BILLION, 8, 80.0, "fsdp"),
        ({"strategy": "auto"}, SEVEN_BILLION, 4, None, "ddp"),
        ({"strategy": "fsdp"}, SMALL, 8, 80.0, "fsdp"),
        ({"strategy": "fsdp"}, SMALL, 1, 80.0, "single"),
        ({"strategy": "ddp"}, SEVEN_BILLION, 8, 80.0, "ddp"),
        ({"strategy": "fsdp", "sharding": "no_shard"}, SMALL, 8, 80.0, "ddp"),
        ({"strategy": "zero3", "tp": 8}, SMALL, 8, 80.0, "ddp"),
        ({"strategy": "zero3", "tp": 4, "cp": 2}, SMALL, 8, 80.0, "zero3"),
        ({"tp": 4, "pp": 2}, SEVEN_BILLION, 8, 80.0, "ddp"),
        ({"offload": "cpu"}, SMALL, 1, 80.0, "fsdp"),
    ],
)
def test_the_strategy_follows_from_what_fits(wanted, sizes, world_size, memory, strategy):
    assert choose_strategy(ParallelConfig(**wanted), sizes, world_size, memory)[0] == strategy


def test_single_on_several_processes_is_a_mistake():
    with pytest.raises(UserMistake, match="there are 2 processes; use ddp or fsdp"):
        choose_strategy(ParallelConfig(strategy="single"), SMALL, 2, None)


@pytest.mark.parametrize(("global_batch", "micro_batch", "ranks", "result"), [(64, 4, 4, (4, 4)), (8, 8, 1, (8, 1))])
def test_passes_follow_from_the_batch(global_batch, micro_batch, ranks, result):
    assert choose_batch(global_batch, micro_batch, ranks, SMALL, shards=1, memory_gib=None) == result


def test_a_batch_that_does_not_divide_names_the_nearest_that_do():
    with pytest.raises(UserMistake, match=r"micro_batch 4 × 4 devices = 16; the nearest that are: 48 and 64\."):
        choose_batch(60, 4, 4, SMALL, shards=1, memory_gib=None)
    with pytest.raises(UserMistake, match=r"over 3 data-parallel devices; the nearest that do are 3 and 6\."):
        choose_batch(4, "auto", 3, SMALL, shards=1, memory_gib=None)


def test_the_automatic_micro_batch_is_the_largest_divisor_that_fits():
    roomy = choose_batch(96, "auto", 1, SMALL, shards=1, memory_gib=80.0)
    tight = choose_batch(96, "auto", 1, SMALL, shards=1, memory_gib=8.0)
    assert roomy[0] * roomy[1] == tight[0] * tight[1] == 96
    assert roomy[0] > tight[0] >= 1
    assert choose_batch(96, "auto", 1, SEVEN_BILLION, shards=1, memory_gib=8.0) == (1, 96)


@pytest.mark.parametrize(
    ("length", "steps"),
    [({"epochs": 2}, 25), ({"steps": 7}, 7), ({"tokens": 8000}, 10), ({"tokens": 8001}, 11), ({"tokens": 1}, 1)],
)
def test_a_length_in_epochs_steps_or_tokens_becomes_steps(length, steps):
    # 100 rows of 100 targets in batches of 8: an epoch is 12.5 steps, a step 800 tokens.
    given = {"epochs": None, "steps": None, "tokens": None, **length}
    assert count_steps(**given, rows=100, targets=10_000, global_batch=8) == steps


def test_an_epoch_smaller_than_a_batch_is_a_mistake_that_says_what_to_do():
    with pytest.raises(
        UserMistake, match=r"1 epoch of 5 rows give no whole step of train\.global_batch 8; lower it to 5"
    ):
        count_steps(epochs=1, steps=None, tokens=None, rows=5, targets=50, global_batch=8)


def test_a_pipeline_is_given_several_passes_a_stage():
    assert choose_batch(64, "auto", 1, SMALL, shards=4, memory_gib=80.0, stages=4) == (4, 16)
    assert choose_batch(8, "auto", 1, SMALL, shards=4, memory_gib=80.0, stages=4) == (1, 8)
    assert choose_batch(64, 16, 1, SMALL, shards=4, memory_gib=80.0, stages=4) == (16, 4), "asked for"

"""Megatron-LM, as it was measured on an H200, and as its releases differ."""

import statistics

import pytest

from shoal.plan.memory.forecast import Memory, forecast_memory
from shoal.plan.memory.fragmentation import is_replayed
from shoal.plan.memory.replayed_states import ReplayedStates
from shoal.plan.memory.saved_tensors import kept_tensors
from shoal.plan.memory.segments import Allocator
from shoal.plan.terms import GIB
from tests.plan.planning import plan
from tests.plan.systems.measured import errors_of

# Llama 3.2 1B: its vocabulary's matrix, and those of a block.
TABLE, BLOCK = 128_256 * 2048, 2048 * (2048 + 1024) + 2048 * 2048 + 3 * 2048 * 8192
PARAMETERS = 1_235_814_400


def memory(system: str, *settings: str, length: int = 512, batch: int = 1, devices: int = 1) -> Memory:
    asked = ["model.shape=llama3.2-1b", "hardware.gpu=h200", f"hardware.devices={devices}", "data.pack=true"]
    asked += [f"data.max_length={length}", f"train.micro_batch={batch}", f"train.global_batch={batch}"]
    found = plan(*asked, "train.recompute=none", *settings, system=system)
    return forecast_memory(found.choice.run)


def at(found: Memory, moment: str, term: str) -> float:
    [tree] = [one.tree for one in found.worst.moments if one.name == moment]
    part = tree.find(term)
    return 0.0 if part is None else part.amount


def test_memory_and_speed_are_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirteen runs drawn at random: benchmarks/gpu/drawn_megatron.py."""
    found = errors_of("megatron_h200", monkeypatch)
    assert len(found) == 13
    assert [one.label for one in found if one.allocated > 0.021 or one.reserved > 0.075] == []
    assert statistics.median(one.reserved for one in found) < 0.02
    # Of eight the speed of the host is known.
    speeds = sorted(one.speed for one in found if one.run.host_block_ms is not None)
    assert len(speeds) == 8
    assert statistics.median(speeds) < 0.1
    assert speeds[3] < 0.08


def test_gradients_are_a_buffer_that_is_there_in_the_forward_pass() -> None:
    alone = "parallel.strategy=single"
    assert at(memory("megatron", alone), "forward pass", "gradients") == pytest.approx(4 * PARAMETERS)
    assert at(memory("nemo", alone), "forward pass", "gradients") == pytest.approx(2 * PARAMETERS)
    for others in ("train.precision=bf16-true", "adapter.kind=lora"):
        assert at(memory("megatron", alone, others), "forward pass", "gradients") == 0
    assert at(memory("huggingface", alone), "forward pass", "gradients") == 0


def test_dummy_gradients_of_every_shape_stay_since_core_0_14() -> None:
    name = "dummy weight gradients"
    assert at(memory("megatron@2026-03"), "loss", name) == 2 * (TABLE + BLOCK)
    assert at(memory("nemo", "adapter.kind=lora"), "loss", name) == 0  # nothing that is frozen has a gradient
    assert at(memory("gpt-neox"), "loss", name) == at(memory("megatron-deepspeed"), "loss", name) == 0
    before = memory("megatron@2025-06")
    assert at(before, "loss", name) == 0
    # Before, that of a tied matrix waits for the embedding's.
    assert at(before, "backward of the first block", "gradient of the head") == 2 * TABLE


def test_large_logits_are_reserved_once_more_after_the_optimizer_has_made_its_state() -> None:
    """Its state lies where the logits of the first step were; the third step's fit nowhere that the second left."""
    found = memory("megatron", "model.shape=llama3.2-3b", length=8192, batch=2)
    wide = 4 * 16_384 * 128_256
    assert found.reserved - found.allocated == pytest.approx(wide, rel=0.2)
    few = memory("megatron", length=512)
    assert few.reserved - few.allocated < GIB / 2


def test_tensor_parallel_ranks_are_replayed_with_their_parts() -> None:
    found = memory("megatron", "parallel.tp=2", length=2048, batch=8, devices=2)
    assert is_replayed(found.run)
    states = ReplayedStates(found.run, Allocator())
    held = sum(at(found, "forward pass", term) for term in ("parameters", "gradients"))
    masters = 4 / 12 * at(found, "forward pass", "optimizer state")
    assert states.memory.allocated == pytest.approx(held + masters, rel=0.01)
    # What a rank saves of a block is half of what one device saves, also tensor by tensor.
    alone = memory("megatron", length=2048, batch=8)
    both = [[size for part in kept_tensors(one.run).values() for size in part] for one in (found, alone)]
    assert both[0] == pytest.approx([size / 2 for size in both[1]], rel=0.01)


def test_sharded_gradients_are_no_buffer() -> None:
    for strategy in ("zero2", "fsdp"):
        assert not is_replayed(
            memory("megatron", f"parallel.strategy={strategy}", "train.global_batch=8", devices=8).run
        )

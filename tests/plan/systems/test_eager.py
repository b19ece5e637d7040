"""The kernels of eager blocks that differ between systems: rotary embeddings and repeated keys."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.catalogue.multiprocessors import cycles
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.run.run import FROZEN, Adapter, Run
from shoal.plan.speed.compute import block_compute, head_seconds
from shoal.plan.speed.eager import UNROLLED_RATE
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.speed.launched import ROTARY, block_operations
from shoal.plan.systems.modelled import SYSTEMS
from tests.plan.planning import make_run
from tests.plan.speed.test_launched import Operations

MEASURED = Path(__file__).parents[3] / "benchmarks" / "gpu" / "torchtune_h200" / "kernels.json"
Rotation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TORCHTUNE = SYSTEMS["torchtune"]


def eager(shape: str = "llama3.2-1b", **changes: Any) -> Run:
    return make_run(shape, compiled=False, precision="bf16-true", **{"traits": TORCHTUNE, **changes})


def elementwise(run: Run) -> float:
    return block_compute(run).elementwise.both


def address(run: Run) -> float:
    """Seconds of an element of a kernel that is not vectorized."""
    return 1 / (UNROLLED_RATE * cycles(run.gpu))


def as_pairs(states: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = states.float().reshape(*states.shape[:-1], -1, 2)
    first = pairs[..., 0] * turns[..., 0] - pairs[..., 1] * turns[..., 1]
    return torch.stack([first, pairs[..., 1] * turns[..., 0] + pairs[..., 0] * turns[..., 1]], -1).flatten(3).bfloat16()


def as_complex(states: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    numbers = torch.view_as_complex(states.float().reshape(*states.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * torch.view_as_complex(turns)).flatten(3).bfloat16()


@pytest.mark.parametrize(("rotate", "name"), [(as_pairs, "pairs"), (as_complex, "complex")])
def test_the_operations_of_rotary_embeddings_are_counted(rotate: Rotation, name: str) -> None:
    states = torch.ones(1, 4, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    turns, gradient = torch.ones(1, 4, 1, 4, 2), torch.ones_like(states)
    with Operations() as counted:
        rotate(states, turns).backward(gradient)
    assert ROTARY[name] == pytest.approx(2 * counted.count, rel=0.1)  # of queries and keys


def test_pairs_that_are_rotated_one_by_one_move_twice_what_halves_do() -> None:
    pairs, halves, numbers = (eager(traits=replace(TORCHTUNE, rotary=one)) for one in ("pairs", "halves", "complex"))
    rotated = pairs.tokens * (pairs.shape.query_width + pairs.shape.kv_width)
    streamed = 0.8 * pairs.gpu.memory_bandwidth
    # Forward: four products of half of the elements, whose memory has the others too, two sums, both joined. Backward:
    # a negation, four products, four copies into zeros, three sums.
    moved = 4 * 6 + 12 + 2 * 10 + (6 + 4 * 6 + 4 * (4 + 10) + 3 * 12)
    assert elementwise(pairs) - elementwise(numbers) == pytest.approx(rotated * (moved - 2 * 8) / streamed, rel=0.02)
    assert elementwise(numbers) < elementwise(halves) < elementwise(pairs)
    # Qwen's heads have halves in every system; LitGPT's are in fp32: test_litgpt.py.
    others = [one for one in ROTARY if one != "fp32 halves"]
    assert len({elementwise(eager("qwen2.5-0.5b", traits=replace(TORCHTUNE, rotary=one))) for one in others}) == 1


def test_repeated_keys_are_copied_and_their_gradients_added_up() -> None:
    repeated, grouped = (eager(traits=replace(TORCHTUNE, repeats_keys=one)) for one in (True, False))
    elements = 4 * repeated.tokens * repeated.shape.query_width  # of keys and of values, in either pass
    assert elementwise(repeated) - elementwise(grouped) == pytest.approx(elements * address(repeated), rel=0.01)
    assert block_operations(repeated) - block_operations(grouped) == 12
    alone = [elementwise(eager("llama2-7b", traits=replace(TORCHTUNE, repeats_keys=one))) for one in (True, False)]
    assert alone[0] == alone[1]  # with as many keys as queries


def test_a_step_of_torchtune_takes_what_was_measured_on_an_h200() -> None:
    adapter = Adapter(64, ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    trained = {"adapter": adapter, "trained": FROZEN, "loss": "chunked", "clips": False, "recompute": "none"}
    run = eager(gpu="h200", length=2048, micro_batch=6, **trained)
    measured = json.loads(MEASURED.read_text())["1b step"]["seconds"]
    assert forecast_speed(run).step_seconds == pytest.approx(measured, rel=0.05)


def test_trl_reads_the_logits_of_a_plain_loss_again_for_its_log() -> None:
    trl = SYSTEMS["trl"]
    plain, logging = (eager(traits=replace(trl, logs_entropy=one), loss="plain") for one in (False, True))
    logits = plain.head_tokens * plain.shape.vocab
    # A softmax, its exponential, their product and its sum, and the largest logit.
    more = logits * (14.5 + 8 + 12 + 4 + 4) / (0.8 * plain.gpu.memory_bandwidth)
    assert head_seconds(logging).both - head_seconds(plain).both == pytest.approx(more, rel=0.01)
    assert head_seconds(logging.with_(loss="chunked")) == head_seconds(plain.with_(loss="chunked"))


def test_a_loss_that_upcasts_chunks_frees_them_one_by_one() -> None:
    adapter = Adapter(64, ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    trained = {"adapter": adapter, "trained": FROZEN, "loss": "chunked", "clips": False, "recompute": "none"}
    earlier = replace(TORCHTUNE, chunks="upcast")
    found = forecast_memory(eager(gpu="h200", length=2048, micro_batch=6, traits=earlier, **trained))
    measured = json.loads(MEASURED.read_text())["1b step"]
    assert found.allocated == pytest.approx(measured["allocated"], rel=0.01)
    assert found.reserved == pytest.approx(measured["reserved"], rel=0.03)

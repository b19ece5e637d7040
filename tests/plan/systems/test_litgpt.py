"""LitGPT's fine-tuning, as it was measured on an H200, and as its releases differ."""

import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.catalogue.gpus import GPUS
from shoal.plan.memory.activations import block_kept
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.memory.head import head
from shoal.plan.run.run import FROZEN, Adapter, Run
from shoal.plan.speed.compute import block_compute, head_seconds
from shoal.plan.speed.host import host_seconds
from shoal.plan.speed.launched import block_operations
from shoal.plan.systems.earlier import as_of
from shoal.plan.systems.modelled import SYSTEMS
from tests.plan.planning import make_run, plan
from tests.plan.speed.test_launched import Operations
from tests.plan.systems.measured import errors_of

LITGPT = SYSTEMS["litgpt"]
QV = ("q_proj", "v_proj")


def tuned(shape: str = "llama3.1-8b", targets: tuple[str, ...] | None = QV, **settings: Any) -> Run:
    """Fine-tuning with an adapter, or without."""
    adapter = {} if targets is None else {"adapter": Adapter(8, targets), "trained": FROZEN}
    settings = {"traits": LITGPT, "precision": "bf16-true", "compiled": False, "loss": "plain", **adapter, **settings}
    return make_run(shape, "h200", **settings)


def kept(run: Run, term: str) -> float:
    """Bytes per token that a block saves."""
    found = block_kept(run).find(term)
    return 0.0 if found is None else found.amount / run.tokens


def test_memory_and_speed_are_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve runs drawn at random: benchmarks/gpu/drawn_litgpt.py."""
    found = errors_of("litgpt_h200", monkeypatch)
    assert len(found) == 12
    assert all(one.run.host_block_ms is not None for one in found)
    assert [one.label for one in found if one.allocated > 0.045 or one.reserved > 0.085] == []
    speeds = [one.speed for one in found]
    assert statistics.median(speeds) < 0.1
    assert max(speeds) < 0.18


def test_halves_rotated_in_fp32_are_as_many_operations_as_counted() -> None:
    cosines, sines = torch.ones(8, 8), torch.ones(8, 8)
    heads = [torch.ones(2, count, 8, 8, dtype=torch.bfloat16, requires_grad=True) for count in (4, 2)]

    def rotated(each: torch.Tensor) -> torch.Tensor:
        """A head whose last channels, of which there are none, are not rotated."""
        turned = each[..., :8]
        swapped = torch.cat((-turned[..., 4:], turned[..., :4]), dim=-1)
        return torch.cat(((turned * cosines + swapped * sines).to(each.dtype), each[..., 8:]), dim=-1)

    with Operations() as counted:
        found = [rotated(each) for each in heads]
        torch.autograd.grad(found, heads, [torch.ones_like(one) for one in found])
    wide, halves = (block_operations(tuned(traits=replace(LITGPT, rotary=one))) for one in ("fp32 halves", "halves"))
    # Those of transformers are 45: tests/plan/speed/test_launched.py.
    assert wide - halves == pytest.approx(counted.count - 45, abs=3)
    # As counted on blocks of LitGPT 0.5.13 in the same way.
    blocks = (tuned(shape, targets=None) for shape in ("llama3.2-1b", "qwen3-0.6b"))
    assert [block_operations(one) for one in blocks] == [pytest.approx(count, rel=0.03) for count in (181, 238)]
    # Qwen's heads are rotated so as well.
    qwen = tuned("qwen2.5-0.5b")
    assert (
        block_compute(qwen).elementwise.both
        > block_compute(qwen.with_(traits=replace(LITGPT, rotary="halves"))).elementwise.both
    )


def test_norms_save_what_they_have_normalized_in_fp32_if_their_scale_is_trained() -> None:
    full, adapted = tuned(targets=None), tuned()
    assert kept(full, "norm inputs") == 2 * (4 + 4) * 4096
    assert kept(full.with_(traits=replace(LITGPT, wide_norms=False)), "norm inputs") == 2 * (4 + 2) * 4096
    assert kept(adapted, "norm inputs") == 2 * 4 * 4096


def test_keys_and_values_are_copied_for_every_query_head_and_no_view_of_their_matmul_stays() -> None:
    grouped, alone = tuned(), tuned("llama2-7b")
    assert kept(grouped, "queries, keys, values") == 3 * 4096 * 2
    # Without groups, values are a view of the joined output.
    assert kept(alone, "queries, keys, values") == (3 + 2) * 4096 * 2


def test_adapters_of_a_part_of_a_joined_layer_are_copied_into_zeros() -> None:
    part, whole = tuned(), tuned(targets=("q_proj", "k_proj", "v_proj"))
    assert kept(part, "outputs of padded adapters") == (4096 + 1024) * 2
    assert kept(whole, "outputs of padded adapters") == 0
    # Copies by index are slow: fewer adapters take longer.
    assert block_compute(part).matmuls.forward > block_compute(whole).matmuls.forward


def test_the_head_under_an_adapter_is_applied_to_128_tokens_of_each_sequence_at_a_time() -> None:
    run = tuned(length=1024, micro_batch=4)
    logits = run.tokens * run.shape.vocab
    found = head(run).peak.find("logits and loss")
    assert found is not None
    assert found.amount == logits * (8 + 8 / 8)  # logits, log-softmax, and two gradients of one of eight parts
    full = head(tuned(targets=None, length=1024, micro_batch=4)).peak.find("logits and loss")
    assert full is not None
    assert full.amount == logits * 12
    # Also with fewer tokens, and with a last part that is not whole.
    for length, parts in ((64, 1), (200, 2)):
        few = tuned(length=length)
        found = head(few).peak.find("logits and loss")
        assert found is not None
        assert found.amount == few.tokens * few.shape.vocab * (8 + 8 / parts)
    # With one sequence, the weight is read for few rows.
    short, whole = tuned(length=1024), tuned(length=1024, traits=replace(LITGPT, adapted_head_tokens=0))
    assert head_seconds(short).both > head_seconds(whole.with_(traits=replace(whole.traits, splits_logits=False))).both


def test_a_part_of_the_channels_is_rotated_and_all_are_joined() -> None:
    quarter = tuned("pythia-160m", targets=None)
    assert quarter.shape.rotary_share == 0.25
    whole = quarter.with_(shape=replace(quarter.shape, rotary_share=1.0))
    assert block_compute(quarter).elementwise.both < 0.85 * block_compute(whole).elementwise.both


def test_logits_of_several_sequences_are_copied_without_the_last_token_of_each() -> None:
    one, four = tuned(targets=None, length=4096), tuned(targets=None, length=1024, micro_batch=4)
    assert head_seconds(four).both > head_seconds(one).both
    # Labels of pretraining, whose model is compiled, are shifted before.
    assert head_seconds(four.with_(compiled=True)).both < head_seconds(one).both


def test_layers_whose_dequantized_matrix_is_cast_take_the_host_longer() -> None:
    nf4 = tuned(adapter=Adapter(8, QV, "nf4"))
    uncast = nf4.with_(traits=replace(LITGPT, dequantizes_in_half=False))
    layers = 5  # queries, keys and values are one
    assert host_seconds(nf4, 1) - host_seconds(uncast, 1) == pytest.approx(layers * (0.41e-3 - 0.11e-3))
    # In fp16 there is nothing to cast.
    half = nf4.with_(gpu=GPUS["t4"])
    assert host_seconds(half, 1) == host_seconds(half.with_(traits=uncast.traits), 1)


def test_the_paged_adamw_of_bitsandbytes_is_no_foreach_one() -> None:
    assert tuned().foreach_step
    assert not tuned(paged_optimizer=True).foreach_step


def test_releases_of_litgpt_and_of_what_it_is_pinned_to_differ() -> None:
    def traits(year: int, month: int) -> Any:
        return as_of("litgpt", LITGPT, (year, month), gpu=GPUS["a10g"], model_type="llama")

    assert [traits(*month).wide_norms for month in ((2024, 7), (2024, 8))] == [False, True]
    assert [traits(*month).replaces_embedding for month in ((2024, 9), (2024, 10))] == [False, True]
    assert [traits(*month).quantized_keep_inputs for month in ((2024, 12), (2025, 1))] == [True, False]
    assert [traits(*month).dequantizes_in_half for month in ((2026, 8), (2026, 9))] == [True, "backward"]
    # The embedding that bitsandbytes' own replaces where layers are quantized, and a gradient of that.
    nf4 = Adapter(8, QV, "nf4", double_quantized=True)
    weights = [
        forecast_memory(tuned(adapter=nf4, traits=traits(2024, month))).worst.peak.tree.find(
            "replaced embedding, gradient of the new one"
        )
        for month in (9, 10)
    ]
    assert [0.0 if one is None else one.amount for one in weights] == [0.0, 2 * 2 * 128_256 * 4096]


def test_litgpt_fine_tunes_without_a_compiler_and_with_foreach_adamw() -> None:
    batch = ("model.shape=llama3.2-1b", "hardware.gpu=h200", "train.micro_batch=1", "train.global_batch=1")
    run = plan(*batch, "train.precision=bf16-true", system="litgpt").choice.run
    assert (run.compiled, run.loss, run.foreach_step) == (False, "plain", True)
    pretraining = plan(*batch, "train.precision=bf16-true", "train.compile=true", system="litgpt").choice.run
    assert (pretraining.compiled, pretraining.foreach_step) == (True, False)

"""The forecast of attention: where its memory grows with the square of the sequence, and the speed of its kernels."""

import pytest

from shoal.plan.speed.compute import block_compute
from tests.plan.planning import make_run, plan

GIB = 1024**3
LLAMA = ("model.shape=llama3.2-1b", "data.max_length=4096", "train.micro_batch=2", "train.global_batch=2")


def scores(*overrides: str) -> float:
    """GiB of the scores and masks that are kept."""
    kept = plan("hardware.gpu=h200", *LLAMA, *overrides).as_dict()["memory"]["terms"]["activations"]
    return float(kept.get("attention scores", 0.0) + kept.get("attention masks", 0.0))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 0.0),
        (("train.precision=32-true",), 0.0),
        (("model.dropout=0.1",), 0.0),
        # 16 layers × 2 sequences × 32 heads × 4096² scores in bf16, and their softmax, if compiled.
        (("model.attention=eager",), 16 * 2 * 32 * 4096**2 * 4 / GIB),
        # 2 × 4096² elements as booleans and in bf16, once for all layers.
        (("data.document_mask=true", "model.dropout=0.1"), 2 * 4096**2 * 3 / GIB),
        (("data.document_mask=true",), 0.0),
    ],
)
def test_scores_and_masks_are_counted_only_where_they_are_stored(overrides, expected):
    assert scores(*overrides) == pytest.approx(expected, abs=1e-3)


def test_fp32_with_grouped_keys_fits_where_its_scores_did_not():
    memory = plan("hardware.gpu=h200", *LLAMA, "train.precision=32-true").as_dict()["memory"]
    assert 34 < memory["allocated_gib"] < 40


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("model.attention=eager",), "leave model.attention at auto"),
        (("data.document_mask=true", "model.dropout=0.1"), "set model.dropout to 0, or data.pack to false"),
        (("data.document_mask=true",), None),
        (("train.precision=32-true",), None),
    ],
)
def test_a_plan_says_once_that_memory_grows_with_the_square_of_the_sequence(overrides, says):
    notes = [one for one in plan("hardware.gpu=h200", *LLAMA, *overrides).notes if "each pair of tokens" in one]
    assert len(notes) == (says is not None)
    assert all(str(says) in one for one in notes)


def test_the_time_of_a_window_is_that_of_its_kernel():
    run = make_run("mistral-7b", "h200", length=8192, precision="bf16-true")
    seconds = {path: block_compute(run.with_(attention=path)).attention.both for path in ("tiles", "window")}
    dense = block_compute(run.with_(attention="dense mask")).attention.both
    assert seconds["tiles"] < seconds["window"] < dense / 1.5
    # Measured: 4.1, 5.1 and 12.3 ms (benchmarks/gpu/attention_h200), in a step that shares the device's power.
    for path, measured in (("tiles", 4.07), ("window", 5.13)):
        assert 1000 * seconds[path] == pytest.approx(measured, rel=0.5)


def test_fp32_attention_is_as_slow_as_its_kernel():
    run = make_run("llama3.2-1b", "h200", length=4096, micro_batch=2, precision="32-true")
    assert 1000 * block_compute(run).attention.both == pytest.approx(14.7, rel=0.1)

"""What a training run computes and writes."""

import json
import math
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.layout import SliceReader
from shoal.config import load_config
from shoal.mistakes import UserMistake
from shoal.models.emulate import VARIABLE, slow_dtypes
from shoal.resilience.health import Diverged
from tests.harness import LLAMA, lines, reference_run, settings, slow, train_again_on, train_on, weights


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


def evaluations(run: Path) -> list[dict[str, Any]]:
    found = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if "eval_loss" in line]


@pytest.mark.slow
def test_the_loss_on_pythons_standard_library_falls_to_a_known_value(tmp_path):
    """Bytes of real source text: the loss of a uniform guess is 5.56; the recorded run reached 2.40."""
    library = sysconfig.get_paths()["stdlib"]
    config = settings(
        Path(f"{library}/[a-d]*.py"),
        model__shape={"family": "llama", "hidden": 96, "layers": 3, "heads": 4, "vocab": 260, "positions": 128},
        data__pack=True,
        data__max_length=128,
        data__validation=0.01,
        train__steps=160,
        train__global_batch=8,
        train__micro_batch=8,
        train__lr=5e-3,
        train__schedule={"warmup": 20},
        eval={"every": 80, "batches": 8},
        log__every=20,
    )
    run = train_again_on(1, config, tmp_path)
    assert losses(run)[0] > 3.0
    # Other Python versions have other libraries, with about the same result.
    assert losses(run)[-1] == pytest.approx(2.40, abs=0.3)
    first, last = evaluations(run)
    assert last["eval_loss"] < first["eval_loss"] < 3.0
    assert last["eval_loss"] == pytest.approx(2.40, abs=0.3)
    assert last["eval_perplexity"] == pytest.approx(math.exp(last["eval_loss"]))


def test_two_deterministic_runs_are_bitwise_equal(instructions, tmp_path):
    one = reference_run(settings(instructions))
    two = train_again_on(1, settings(instructions), tmp_path)
    assert [(line["loss"], line["grad_norm"]) for line in lines(one)] == [
        (line["loss"], line["grad_norm"]) for line in lines(two)
    ]
    first, second = weights(one), weights(two)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_seed_gives_other_losses(instructions, tmp_path):
    one = reference_run(settings(instructions))
    two = train_again_on(1, settings(instructions, name="two", seed=5), tmp_path)
    assert losses(one) != losses(two)


def test_the_micro_batch_does_not_change_what_is_trained(instructions, tmp_path):
    expected = losses(reference_run(settings(instructions)))  # with micro-batches of four
    for size in (1, 8):
        run = train_again_on(1, settings(instructions, name=f"micro{size}", train__micro_batch=size), tmp_path)
        assert losses(run) == pytest.approx(expected, rel=2e-6)


def test_auto_precision_suits_the_device_and_a_resumed_run_keeps_its_precision(instructions, tmp_path):
    short = {"train__precision": "auto", "train__steps": 2}
    begun = train_again_on(1, settings(instructions, **short), tmp_path)
    assert load_config(begun / "config.yaml").train.precision == "32-true"
    mixed = settings(instructions, **{**short, "name": "mixed", "train__precision": "bf16-mixed"})
    begun = train_again_on(1, mixed, tmp_path)
    train_on(1, settings(instructions, **{**short, "name": "mixed", "train__steps": 3}), tmp_path, resume=True)
    assert load_config(begun / "config.yaml").train.precision == "bf16-mixed"


@pytest.mark.parametrize(("precision", "times"), [("bf16-mixed", 1), ("32-true", 0)])
def test_a_precision_that_has_to_be_emulated_says_so_once(
    precision, times, instructions, tmp_path, capfd, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(VARIABLE, "emulated")
    slow_dtypes.cache_clear()
    train_on(2, settings(instructions, train__steps=1, train__precision=precision), tmp_path)
    slow_dtypes.cache_clear()
    said = " ".join(capfd.readouterr().err.split())
    assert said.count(f"train.precision {precision} is emulated: this CPU has no fast matmuls for it") == times


@pytest.mark.parametrize(("precision", "stored"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_mixed_precision_keeps_fp32_weights_and_true_precision_does_not(precision, stored, instructions, tmp_path):
    run = train_again_on(1, settings(instructions, train__precision=precision), tmp_path)
    assert {tensor.dtype for tensor in weights(run).values()} == {stored}
    exact = reference_run(settings(instructions))
    assert losses(run) == pytest.approx(losses(exact), rel=2e-3 if precision == "bf16-mixed" else 2e-2)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        pytest.param(1, {"train__compile": "aot_eager"}, marks=pytest.mark.slow),
        pytest.param(1, {"train__recompute": "full"}, marks=pytest.mark.slow),
        pytest.param(2, {"parallel__strategy": "fsdp"}, marks=pytest.mark.slow),
        slow(2, {"parallel__tp": 2}),
        slow(2, {"parallel__tp": 2, "train__fp8_head": True}),
        pytest.param(2, {"parallel__strategy": "fsdp", "train__fp8_head": True}, marks=pytest.mark.slow),
    ],
)
def test_fp8_losses_are_close_to_bf16_for_every_strategy(world_size, changes, text, tmp_path):
    """Stated in docs/performance.md: within 2% of bf16-mixed from the same weights. The sequences have one length,
    which is compiled in a third of the time."""
    sized = {"model__shape": {**LLAMA, "ffn": 96, "positions": 512, "tied": True}}
    one = reference_run(settings(text, train__precision="fp8", **sized))
    mixed = reference_run(settings(text, train__precision="bf16-mixed", **sized))
    changes = {**sized, **changes}
    assert losses(one) != losses(mixed)
    assert losses(one) == pytest.approx(losses(mixed), rel=2e-2)
    split = train_again_on(world_size, settings(text, name="split", train__precision="fp8", **changes), tmp_path)
    assert losses(split) == pytest.approx(losses(one), rel=5e-3)


@pytest.mark.parametrize(
    ("inner", "adapter", "says"),
    [(96, "none", None), (96, "lora", None), (100, "none", "fp8 applies to 24% of the weights")],
)
def test_fp8_warns_if_it_applies_to_only_a_part_of_the_model(inner, adapter, says, instructions, tmp_path, capfd):
    sized = {"model__shape": {**LLAMA, "ffn": inner, "positions": 512, "tied": True}, "train__steps": 1}
    sized |= {"adapter__kind": adapter}
    train_on(1, settings(instructions, train__precision="fp8", **sized), tmp_path)
    found = " ".join(capfd.readouterr().err.split())
    assert "fp8 applies to" not in found if says is None else says in found


@pytest.mark.parametrize(("fixed", "found"), [(False, 2.0**100), (True, 2.0**101)])
def test_the_loss_scale_starts_as_given_and_stays_if_it_is_fixed(fixed, found, instructions, tmp_path):
    """A scale at which every gradient overflows: it halves, unless it is fixed."""
    scale = {"initial": 2.0**101, "fixed": fixed}
    config = settings(instructions, train__precision="16-mixed", train__loss_scale=scale, train__steps=1)
    run = train_again_on(1, config, tmp_path)
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    assert SliceReader(newest).read_whole("control.scaler.scale") == found
    assert lines(run)[0]["skipped"] == 1


@pytest.mark.parametrize("strategy", [slow("ddp"), "fsdp"])
def test_16_mixed_scales_the_loss_and_trains_like_fp32(strategy, instructions, tmp_path):
    changes = {"train__precision": "16-mixed", "parallel__strategy": strategy}
    run = train_again_on(2, settings(instructions, **changes), tmp_path)
    exact = reference_run(settings(instructions))
    assert losses(run) == pytest.approx(losses(exact), rel=1e-3)
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    assert SliceReader(newest).read_whole("control.scaler.scale") == 2.0**16


@pytest.mark.parametrize("optimizer", [slow("sgd"), slow("lion"), "muon"])
def test_every_optimizer_learns_bitwise_the_same_on_two_sharded_ranks(optimizer, instructions, tmp_path):
    lr = {"sgd": 0.3, "lion": 1e-3, "muon": 1e-2}[optimizer]
    changes = {"train__optimizer": {"name": optimizer}, "train__lr": lr, "train__steps": 6}
    one = train_again_on(1, settings(instructions, name="one", **changes), tmp_path)
    two = train_again_on(2, settings(instructions, name="two", parallel__strategy="fsdp", **changes), tmp_path)
    assert losses(one)[-1] < 0.97 * losses(one)[0]
    assert losses(two) == losses(one)
    assert [line["grad_norm"] for line in lines(two)] == [line["grad_norm"] for line in lines(one)]


@pytest.mark.slow
def test_muon_with_offloaded_state_has_the_same_buckets_on_every_rank(instructions, tmp_path, monkeypatch):
    """Its collectives are for the matrices of a bucket, of which the last of three ranks has fewer rows."""
    monkeypatch.setattr("shoal.optim.offload.BUCKET", 1000)
    changes = {"train__optimizer": {"name": "muon"}, "train__lr": 1e-2, "train__steps": 3}
    changes |= {
        "train__micro_batch": 2,
        "train__global_batch": 6,
        "model__shape": {**LLAMA, "ffn": 40, "positions": 512},
    }
    runs = [
        train_on(3, settings(instructions, name=name, parallel={"strategy": "fsdp", **offload}, **changes), tmp_path)
        for name, offload in {"offloaded": {"offload": "optimizer"}, "kept": {}}.items()
    ]
    assert losses(runs[0]) == losses(runs[1])


@pytest.mark.slow
def test_muon_orthogonalizes_in_bf16_and_stays_close_where_sums_have_another_order(instructions, tmp_path):
    changes = {"train__optimizer": {"name": "muon"}, "train__lr": 1e-2, "train__micro_batch": 2}
    changes |= {"model__shape": {**LLAMA, "ffn": 90, "positions": 512}}  # the last rank has fewer rows
    one = reference_run(settings(instructions, **changes))
    four = train_again_on(4, settings(instructions, name="four", parallel__strategy="fsdp", **changes), tmp_path)
    assert losses(four) == pytest.approx(losses(one), rel=1e-4)
    norms = [[line["grad_norm"] for line in lines(run)] for run in (four, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "world_size", "strategy"),
    [
        pytest.param("bf16-mixed", 1, "single", marks=pytest.mark.slow),
        pytest.param("32-true", 2, "ddp", marks=pytest.mark.slow),
    ],  # in bf16 and sharded: test_mixed_precision.py
)
def test_compiled_blocks_train_like_eager_ones(precision, world_size, strategy, instructions, text, tmp_path):
    # Lengths that vary are compiled again, with dynamic shapes, which takes two thirds of the time: on one rank only.
    data = instructions if world_size == 1 else text
    changes = {"train__precision": precision, "parallel__strategy": strategy, "train__steps": 4}
    plain = train_again_on(world_size, settings(data, name="plain", **changes), tmp_path)
    traced = train_on(world_size, settings(data, name="traced", train__compile="aot_eager", **changes), tmp_path)
    assert losses(traced) == pytest.approx(losses(plain), rel=2e-6 if precision == "32-true" else 2e-3)


@pytest.mark.slow
def test_a_chunked_loss_trains_like_a_plain_one_also_when_sharded(instructions, tmp_path):
    plain = train_again_on(1, settings(instructions, name="plain", train__loss_impl="plain", train__steps=3), tmp_path)
    for world_size, strategy in ((1, "single"), (2, "fsdp")):
        changes = {"train__loss_impl": "chunked", "parallel__strategy": strategy, "name": f"chunked-{strategy}"}
        chunked = train_again_on(world_size, settings(instructions, train__steps=3, **changes), tmp_path)
        assert losses(chunked) == pytest.approx(losses(plain), rel=2e-6)


def _change(run: Path, start: Path) -> dict[str, torch.Tensor]:
    after, before = weights(run), weights(start)
    return {name: after[name] - before[name] for name in after}


@pytest.fixture
def untrained(instructions) -> Path:
    """One step with a learning rate so small that the weights stay as initialized."""
    return reference_run(settings(instructions, name="untrained", train__steps=1, train__lr=1e-30))


def test_clipping_bounds_the_step_by_the_norm_of_all_gradients_together(instructions, untrained, tmp_path):
    sgd = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    changes = {"train__optimizer": sgd, "train__steps": 1, "train__lr": 0.5, "train__clip": 0.01}
    schedule = {"train__schedule": {"name": "constant", "warmup": 0}}
    for world_size, strategy in ((1, "single"), (2, "fsdp")):
        config = settings(instructions, name=strategy, parallel__strategy=strategy, **changes, **schedule)
        change = _change(train_again_on(world_size, config, tmp_path), untrained)
        length = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in change.values()))
        assert length == pytest.approx(0.5 * 0.01, rel=1e-4)


def test_frozen_parameters_and_those_with_a_learning_rate_of_zero_do_not_change(instructions, untrained, tmp_path):
    config = settings(
        instructions, model__freeze=["model.layers.0.*"], train__lr_groups={"*.1.mlp.*": 0.0}, train__steps=2
    )
    for world_size, strategy in ((1, "single"), (2, "ddp"), (2, "fsdp")):
        config |= {"name": strategy, "parallel": {"strategy": strategy}}
        change = _change(train_again_on(world_size, config, tmp_path), untrained)
        still = {name for name, tensor in change.items() if not tensor.any()}
        expected = {n for n in change if n.startswith("model.layers.0.") or (".1.mlp." in n)}
        assert still == expected


def test_patterns_that_match_no_parameter_are_mistakes(instructions, tmp_path):
    with pytest.raises(UserMistake, match=r"model.freeze: 'layer.\*' matches no parameter"):
        train_on(1, settings(instructions, model__freeze=["layer.*"]), tmp_path)
    with pytest.raises(UserMistake, match=r"train.lr_groups: 'layer.\*' matches no trained parameter"):
        train_on(1, settings(instructions, train__lr_groups={"layer.*": 2.0}), tmp_path)


def test_weight_decay_does_not_apply_to_norms(instructions, untrained, tmp_path):
    """AdamW decays by lr × weight_decay and updates by at most lr: here only the decay is large."""
    optimizer = {"name": "adamw", "weight_decay": 1e4}
    config = settings(instructions, train__optimizer=optimizer, train__lr=5e-5, train__steps=1)
    config["train"]["schedule"] = {"name": "constant", "warmup": 0}
    change = _change(train_again_on(1, config, tmp_path), untrained)
    before = weights(untrained)
    for name, tensor in change.items():
        share = float(tensor.norm() / before[name].norm())
        if tensor.dim() == 1:
            assert share < 1e-3, name
        else:
            assert share == pytest.approx(0.5, abs=0.05), name


def test_the_schedule_advances_once_per_step_whatever_the_number_of_ranks_and_micro_batches(instructions, tmp_path):
    one = reference_run(settings(instructions))
    two = train_again_on(2, settings(instructions, name="two", train__micro_batch=2), tmp_path)
    assert [line["lr"] for line in lines(one)] == [line["lr"] for line in lines(two)]
    assert [line["lr"] for line in lines(one)][:2] == [1.5e-3, 3e-3]


def test_evaluation_is_the_same_on_one_rank_and_on_several(instructions, tmp_path):
    changes = {"data__validation": 0.1, "eval": {"every": 1, "batches": 2}, "train__steps": 2}
    found = {}
    for world_size, strategy in ((1, "single"), (2, "ddp"), (4, "fsdp")):
        name = f"{strategy}{world_size}"
        micro = 8 // world_size
        config = settings(instructions, name=name, parallel__strategy=strategy, train__micro_batch=micro, **changes)
        found[name] = [line["eval_loss"] for line in evaluations(train_again_on(world_size, config, tmp_path))]
    assert len(found["single1"]) == 2
    assert found["ddp2"] == pytest.approx(found["single1"], rel=2e-6)
    assert found["fsdp4"] == pytest.approx(found["single1"], rel=2e-6)


def test_training_stops_early_when_evaluation_no_longer_improves(instructions, tmp_path):
    config = settings(
        instructions,
        data__validation=0.1,
        eval={"every": 1, "batches": 1},
        train__steps=50,
        train__lr=1e-30,
        train__early_stop={"patience": 3},
    )
    run = train_again_on(2, config, tmp_path)
    # The first evaluation is the best so far; three more without a better one end the run.
    assert [line["step"] for line in evaluations(run)] == [1, 2, 3, 4]
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-00000004"
    # Resuming it does not train until the next evaluation; with more patience it does.
    train_on(2, config, tmp_path, resume=True)
    assert [line["step"] for line in evaluations(run)] == [1, 2, 3, 4]
    train_on(2, {**config, "train": {**config["train"], "early_stop": {"patience": 4}}}, tmp_path, resume=True)
    assert [line["step"] for line in evaluations(run)] == [1, 2, 3, 4, 5]


def test_a_non_finite_loss_stops_the_run_or_is_skipped_and_counted(instructions, tmp_path):
    broken = settings(instructions, train__lr=1e38, train__steps=4, train__clip=None)
    broken["train"]["optimizer"] = {"name": "sgd", "momentum": 0.0}
    with pytest.raises(Diverged, match="non-finite loss or gradient; no weights were updated"):
        train_on(2, broken | {"name": "stop", "train": {**broken["train"], "on_nan": "stop"}}, tmp_path)
    run = train_again_on(2, broken | {"name": "skip"}, tmp_path)
    last = lines(run)[-1]
    # After the first step all gradients are non-finite, and no weights are updated any more.
    assert last["grad_norm"] is None
    assert [line["skipped"] for line in lines(run)] == [0, 1, 2, 3]


def test_metrics_have_the_documented_fields(instructions):
    run = reference_run(settings(instructions))
    expected = ["step", "attempt", "loss", "grad_norm", "lr", "tokens", "loss_tokens", "tokens_per_second", "mfu"]
    expected += ["memory_gib", "reserved_gib", "data_seconds", "save_seconds", "communication_seconds", "seconds"]
    assert list(lines(run)[0]) == [*expected, "skipped", "time"]
    first, second, *_ = lines(run)
    assert second["tokens"] > first["tokens"] > first["loss_tokens"] > 0
    speed = (second["tokens"] - first["tokens"]) / second["seconds"]
    assert second["tokens_per_second"] == pytest.approx(speed, rel=1e-3)


def test_csv_and_tensorboard_are_written_if_configured(instructions, tmp_path):
    run = train_again_on(1, settings(instructions, train__steps=3, log__to=["csv", "tensorboard"]), tmp_path)
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    assert header.startswith("step,attempt,loss,grad_norm,lr")
    assert [row.split(",")[0] for row in rows] == ["1", "2", "3"]
    assert list((run / "logs" / "tensorboard").glob("events.*"))


def test_a_tied_head_is_not_stored_as_a_separate_tensor(instructions, tmp_path):
    tied = reference_run(settings(instructions))
    shape = {**LLAMA, "positions": 512, "tied": False}
    untied = train_again_on(1, settings(instructions, name="untied", train__steps=1, model__shape=shape), tmp_path)
    assert set(weights(untied)) - set(weights(tied)) == {"lm_head.weight"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dropout_changes_training_and_not_evaluation(family, instructions, tmp_path):
    shape = {"family": family, "hidden": 32, "layers": 2, "heads": 4, "vocab": 260, "positions": 512}
    changes = {"model__shape": shape, "train__steps": 1, "eval__every": 1, "data__validation": 0.1, "train__lr": 1e-30}
    plain = reference_run(settings(instructions, **changes))
    dropped = train_again_on(1, settings(instructions, model__dropout=0.5, **changes), tmp_path)
    assert losses(plain) != losses(dropped)
    assert [one["eval_loss"] for one in evaluations(plain)] == [one["eval_loss"] for one in evaluations(dropped)]
    described = json.loads((dropped / "model" / "config.json").read_text())
    assert described["attention_dropout" if family == "llama" else "resid_pdrop"] == 0.5

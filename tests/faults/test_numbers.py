"""Non-finite losses and loss spikes: skipped on all ranks, counted, and rolled back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shoal import api
from shoal.checkpoint import store
from shoal.checkpoint.layout import SliceReader
from shoal.checkpoint.state import read_progress
from shoal.data.order import ShuffledOrder
from shoal.resilience.health import Diverged
from tests.checkpoint.cut import hold_bitwise
from tests.harness import lines, reference_run, settings, slow, train_again_on, train_on, weights

EXAMPLES, BATCH, POISON = 96, 8, "\x07"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one token has a NaN embedding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=260,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        made.model.embed_tokens.weight[ord(POISON)] = float("nan")
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    return folder


def write_examples(path: Path, poisoned: set[int]) -> Path:
    """Text examples; those in `poisoned` contain the token with the NaN embedding."""
    with path.open("w") as file:
        for index in range(EXAMPLES):
            word = f"{index:03d}" + (POISON if index in poisoned else " ")
            file.write(json.dumps({"text": word * 4}) + "\n")
    return path


def config_of(model: Path, data: Path, **changes: Any) -> dict[str, Any]:
    settled = settings(data, train__global_batch=BATCH, data__max_length=32, checkpoint__every=2, checkpoint__keep=20)
    settled["model"] = {"from": str(model), "tokenizer": "bytes"}
    settled["train"] |= {"steps": 8, "schedule": {"name": "constant", "warmup": 0}}
    for key, value in changes.items():
        settled["train"][key] = value
    return settled


def sequences_of_steps(steps: list[int]) -> list[int]:
    """The sequences of these steps while none are skipped."""
    order = ShuffledOrder(EXAMPLES, seed=1234)
    return [int(index) for step in steps for index in order.training_sequences((step - 1) * BATCH, BATCH)]


@pytest.fixture(scope="module")
def poisoned(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data in which every sequence of steps 4, 5 and 6 is poisoned."""
    path = tmp_path_factory.mktemp("data") / "examples.jsonl"
    return write_examples(path, set(sequences_of_steps([4, 5, 6])))


@pytest.mark.parametrize(("world_size", "parallel"), [slow(2, "ddp"), (2, "fsdp")])
def test_a_non_finite_step_updates_no_weights_on_any_rank_and_is_counted(
    world_size, parallel, model, poisoned, tmp_path, capfd
):
    config = config_of(model, poisoned)
    config["parallel"] = {"strategy": parallel}
    run = train_on(world_size, config, tmp_path)
    found = lines(run)
    assert [line["step"] for line in found if line["loss"] is None] == [4, 5, 6]
    assert [line["skipped"] for line in found] == [0, 0, 0, 1, 2, 3, 3, 3]
    said = capfd.readouterr().err
    assert "non-finite loss or gradient in 1 step up to step 4" in said
    assert all(torch.isfinite(tensor).all() for name, tensor in weights(run).items() if "embed_tokens" not in name)


@pytest.mark.parametrize(("world_size", "parallel", "every"), [(1, "single", 1), slow(1, "single", 8), (2, "fsdp", 3)])
def test_after_three_in_a_row_the_run_rolls_back_and_skips_their_sequences(
    world_size, parallel, every, model, poisoned, tmp_path, capfd
):
    config = config_of(model, poisoned, on_nan="rollback")
    config["parallel"], config["log"]["every"] = {"strategy": parallel}, every
    run = train_on(world_size, config, tmp_path / "poisoned")
    said = capfd.readouterr().err
    assert "steps 4 to 6 had a non-finite loss or gradient" in said
    assert "Rolling back to" in said
    assert "step-00000002" in said
    assert str(sequences_of_steps([6])[0]) in said
    # The rest is as in a run without those sequences: steps 4, 5, … have the sequences of steps 7, 8, …
    progress = read_progress(run / "checkpoints" / "step-00000008")
    assert progress.left_out == [(3 * BATCH, BATCH), (4 * BATCH, BATCH), (5 * BATCH, BATCH)]
    assert (progress.step, progress.skipped) == (8, 3)
    assert all(line["loss"] is not None for line in lines(run))
    if every == 1:
        assert lines(run)[4]["loss"] == pytest.approx(plain_loss(run, 4, sequences_of_steps([8])), rel=1e-5)
    assert [one.step for one in store.list_complete(run / "checkpoints")] == [2, 4, 6, 8]


@pytest.mark.parametrize("reshard", [False, slow("auto")])
def test_a_rollback_right_after_an_evaluation_does_not_use_stale_gathered_weights(reshard, model, poisoned, tmp_path):
    """FSDP may keep the last all-gathered weights, and loading a checkpoint fills the shards."""
    config = config_of(model, poisoned, on_nan="rollback")
    config["log"]["every"], config["eval"] = 10, {"every": 6, "batches": 1}
    config["data"]["validation"] = str(poisoned)
    alone = reference_run({**config, "parallel": {"strategy": "single"}})
    sharded = train_again_on(2, {**config, "parallel": {"strategy": "fsdp", "reshard": reshard}}, tmp_path)
    assert lines(sharded)[-1]["loss"] == pytest.approx(lines(alone)[-1]["loss"], rel=2e-6)


def plain_loss(run: Path, step: int, examples: list[int]) -> float:
    """The loss of a checkpoint on clean examples, by transformers alone."""
    loaded = api.load_run(run, step=step, device="cpu")
    texts = [loaded.tokenizer.encode(f"{index:03d} " * 4) for index in examples]
    ids = torch.tensor([[*text, loaded.tokenizer.end] for text in texts])
    return float(loaded.model(ids, labels=ids).loss)


def test_a_run_that_rolled_back_resumes_bitwise_without_those_sequences(model, poisoned, tmp_path):
    config = config_of(model, poisoned, on_nan="rollback")
    whole = train_again_on(1, config, tmp_path / "whole")
    first = train_again_on(1, {**config, "train": {**config["train"], "steps": 6}}, tmp_path / "cut")
    train_on(1, config, tmp_path / "cut", resume=True)
    assert [line["loss"] for line in lines(first)] == [line["loss"] for line in lines(whole)]
    found, expected = weights(first), weights(whole)
    different = [
        name for name in expected if not torch.equal(found[name].nan_to_num(9.0), expected[name].nan_to_num(9.0))
    ]
    assert different == []


def test_without_a_checkpoint_to_roll_back_to_the_run_ends_with_a_message(model, poisoned, tmp_path):
    config = config_of(model, poisoned, on_nan="rollback")
    config["checkpoint"]["every"] = 100
    with pytest.raises(Diverged, match=r"steps 4 to 6 had a non-finite loss .* no checkpoint before them"):
        train_on(1, config, tmp_path)


def test_a_run_that_diverges_whatever_its_data_does_not_roll_back_forever(model, tmp_path):
    path = tmp_path / "examples.jsonl"
    write_examples(path, set(range(EXAMPLES)) - set(sequences_of_steps([1, 2])))
    with pytest.raises(Diverged, match=r"after 3 rollbacks to .*step-00000002"):
        train_on(1, config_of(model, path, on_nan="rollback", steps=40), tmp_path / "runs")


def test_stop_ends_the_run_after_so_many_in_a_row_and_names_the_sequences(model, poisoned, tmp_path):
    config = config_of(model, poisoned, on_nan={"action": "stop", "after": 2})
    with pytest.raises(Diverged, match=r"steps 4 to 5 had .* no weights were updated.* sequences \d+") as raised:
        train_on(1, config, tmp_path)
    assert str(sequences_of_steps([5])[0]) in str(raised.value)


# Spikes.

SPIKE, SPIKE_BATCH = 62, 4


@pytest.fixture(scope="module")
def spiking_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Examples that are all alike except for those of one late step, when the loss is stable."""
    path = tmp_path_factory.mktemp("spiking") / "examples.jsonl"
    count = (SPIKE + 10) * SPIKE_BATCH
    odd = set(ShuffledOrder(count, seed=1234).training_sequences((SPIKE - 1) * SPIKE_BATCH, SPIKE_BATCH).tolist())
    with path.open("w") as file:
        for index in range(count):
            text = "".join(chr(97 + (index * 7 + i * i) % 26) for i in range(24)) if index in odd else "shoal " * 4
            file.write(json.dumps({"text": text}) + "\n")
    return path


def spiking(data: Path, world_size: int = 1, **changes: Any) -> dict[str, Any]:
    config = settings(
        data, train__steps=SPIKE + 6, train__lr=3e-2, data__max_length=32, checkpoint__every=SPIKE - 4, log__every=6
    )
    config["model"]["shape"]["layers"] = 1
    config["train"] |= {"global_batch": SPIKE_BATCH, "micro_batch": SPIKE_BATCH // world_size, **changes}
    return config


@pytest.mark.parametrize(("world_size", "parallel"), [(1, "single"), slow(2, "ddp")])
def test_a_spike_is_reported_with_its_sequences_also_between_log_lines(
    world_size, parallel, spiking_data, tmp_path, capfd
):
    config = {**spiking(spiking_data, world_size), "parallel": {"strategy": parallel}}
    run = train_on(world_size, config, tmp_path / "runs")
    said = " ".join(capfd.readouterr().err.split())
    assert f"loss spike at step {SPIKE}: " in said
    assert "sigma above the recent mean. The step had sequences" in said
    assert "was skipped" not in said
    assert lines(run)[-1]["skipped"] == 0


@pytest.mark.parametrize(("world_size", "parallel"), [(1, "single"), slow(2, "fsdp")])
def test_a_spike_is_skipped_if_configured_also_after_a_resume(world_size, parallel, spiking_data, tmp_path, capfd):
    """The statistics are part of the checkpoint: four steps after it, a run that had seen no others could not know, nor
    say."""
    config = {**spiking(spiking_data, world_size, on_spike="skip"), "parallel": {"strategy": parallel}}
    whole = train_on(world_size, config, tmp_path / "whole")
    said = " ".join(capfd.readouterr().err.split())
    assert f"loss spike at step {SPIKE}: " in said
    assert "and was skipped" in said
    assert lines(whole)[-1]["skipped"] == 1
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    cut = tmp_path / "cut" / "run"
    shutil.rmtree(cut / "checkpoints" / f"step-{SPIKE + 6:08d}")
    config["checkpoint"] = {"every": 1, "keep": 10}
    train_on(world_size, config, tmp_path / "cut", resume=True)
    again = " ".join(capfd.readouterr().err.split())
    assert f"loss spike at step {SPIKE}: " in again
    assert "and was skipped" in again
    assert lines(cut)[-1]["skipped"] == 1
    hold_bitwise(cut, whole)
    before, after = (model_at(cut, number) for number in (SPIKE - 1, SPIKE))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(before[name], tensor) for name, tensor in model_at(cut, SPIKE - 2).items())


def model_at(run: Path, step: int) -> dict[str, torch.Tensor]:
    reader = SliceReader(run / "checkpoints" / f"step-{step:08d}")
    return {name: reader.read_whole("model." + name) for name in reader.shapes("model.")}

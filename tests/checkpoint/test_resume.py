"""A resumed run equals the uninterrupted run, on the same mesh or on another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from shoal.data.tokenizer import load_tokenizer
from shoal.mistakes import UserMistake
from tests.checkpoint.cut import attempts, column, cut, everything, hold_bitwise
from tests.harness import lines, reference_run, settings, slow, train_again_on, train_on, written_slices

STEPS, CUT = 3, 2


@pytest.fixture(scope="module")
def few(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve examples: with eight per step, the interruption after step 2 is in the middle of the second epoch."""
    path = tmp_path_factory.mktemp("few") / "examples.jsonl"
    path.write_text("".join(instructions.read_text().splitlines(keepends=True)[:12]))
    return path


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a GPT-2 with dropout 0.1."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 260}
    special = {"bos_token_id": 256, "eos_token_id": 257}
    config = GPT2Config(**sizes, **special, embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return folder


def config_of(data: Path, **changes: Any) -> dict[str, Any]:
    short = {"train__steps": STEPS, "data__max_length": 48, "data__train_on": "all"}
    return settings(data, **{**short, "checkpoint__every": CUT, "checkpoint__keep": 9, **changes})


def resumed(run: Path, config: dict[str, Any], into: Path, *, world_size: int, at: int = CUT) -> Path:
    """The run, interrupted after step `at` and resumed."""
    copy = cut(run, at, into)
    before = max(attempts(copy))
    train_on(world_size, config, into, resume=True)
    steps = len(lines(copy))
    assert attempts(copy)[at:] == [before + 1] * (steps - at), "the steps after the checkpoint were trained again"
    return copy


MESHES = {
    "one process": (1, {"parallel__strategy": "single"}),
    "ddp": (2, {"parallel__strategy": "ddp"}),
    "fsdp": (2, {"parallel__strategy": "fsdp"}),
    "zero1": (2, {"parallel__strategy": "zero1"}),
    "zero2": (2, {"parallel__strategy": "zero2"}),
    "offload": (2, {"parallel__strategy": "fsdp", "parallel__offload": "optimizer"}),
    "tp": (2, {"parallel__tp": 2}),
    "pp": (2, {"parallel__pp": 2}),
    "cp": (2, {"parallel__cp": 2}),
}


@pytest.mark.parametrize(
    ("mesh", "grad_accum_steps"), [slow("one process", 1), ("one process", 2), slow("ddp", 2), ("fsdp", 2)]
)
def test_resume_on_the_same_mesh_is_the_uninterrupted_run_to_the_bit(mesh, grad_accum_steps, few, tmp_path):
    world_size, changes = MESHES[mesh]
    config = config_of(few, train__micro_batch=8 // world_size // grad_accum_steps, **changes)
    run = train_again_on(world_size, config, tmp_path / "whole")
    hold_bitwise(resumed(run, config, tmp_path / "cut", world_size=world_size), run)


@pytest.mark.parametrize("mesh", [mesh if mesh == "one process" else slow(mesh) for mesh in MESHES])
def test_resume_continues_with_the_same_dropout(mesh, few, with_dropout, tmp_path):
    world_size, changes = MESHES[mesh]
    config = config_of(few, model={"from": str(with_dropout)}, **changes)
    run = train_again_on(world_size, config, tmp_path / "whole")
    hold_bitwise(resumed(run, config, tmp_path / "cut", world_size=world_size), run)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__optimizer": {"name": "adamw8bit"}, "train__precision": "bf16-mixed"},
        {"train__optimizer": {"name": "sgd"}, "model__freeze": ["*layers.0.*"], "train__lr_groups": {"*mlp*": 0.5}},
        {"train__optimizer": {"name": "lion"}, "train__lr": 3e-4, "data__pack": True, "data__max_length": 256},
        {"train__precision": "16-mixed"},
    ],
    ids=lambda changes: " ".join(str(value) for value in changes.values()),
)
def test_resume_is_exact_for_every_optimizer_and_precision(changes, few, tmp_path):
    """Muon is below, on two ranks."""
    config = config_of(few, **changes)
    run = train_again_on(1, config, tmp_path / "whole")
    if changes.get("train__precision") == "16-mixed":
        held = everything(run)
        assert float(held["control.scaler.scale"]) > 1
        assert 0 < float(held["control.scaler.streak"]) <= STEPS
    hold_bitwise(resumed(run, config, tmp_path / "cut", world_size=1), run)


def test_resume_is_exact_where_two_optimizers_share_sharded_weights(few, tmp_path):
    config = config_of(few, train__optimizer={"name": "muon"}, train__lr=1e-3, parallel__strategy="fsdp")
    config["train"]["steps"], config["checkpoint"]["every"] = 2, 1
    run = train_again_on(2, config, tmp_path / "whole")
    hold_bitwise(resumed(run, config, tmp_path / "cut", world_size=2, at=1), run)


# On other meshes, sums are taken in another order, so the comparison has tolerances.


def hold_near(run: Path, expected: Path) -> None:
    for key in ("step", "lr", "tokens"):
        assert column(run, key) == column(expected, key), key
    assert column(run, "loss") == pytest.approx(column(expected, "loss"), rel=2e-6)
    assert column(run, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-5)
    found, wanted = (
        # There is one RNG state per rank.
        {name: tensor for name, tensor in everything(one).items() if not name.startswith("random.")}
        for one in (run, expected)
    )
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=2e-5, msg=name)


def test_resume_on_four_ranks_and_then_on_one_continues_the_two_rank_run(few, tmp_path):
    config = config_of(few, train__micro_batch=2, checkpoint__every=1, parallel__strategy="fsdp")
    run = train_again_on(2, config, tmp_path / "whole")
    on_four = resumed(run, config, tmp_path / "four", world_size=4, at=1)
    hold_near(on_four, run)
    config["parallel"]["strategy"] = "single"
    on_one = resumed(on_four, config, tmp_path / "one", world_size=1, at=2)
    assert attempts(on_one) == [0, 1, 2]
    hold_near(on_one, run)


@pytest.mark.slow
def test_resume_under_another_strategy_continues_the_run(few, tmp_path):
    config = config_of(few, parallel__strategy="ddp")
    run = train_again_on(2, config, tmp_path / "whole")
    config["parallel"]["strategy"] = "fsdp"
    hold_near(resumed(run, config, tmp_path / "cut", world_size=2), run)


@pytest.mark.slow
def test_a_run_can_be_resumed_on_a_sequence_of_meshes(few, tmp_path):
    shape = {"family": "gpt2", "hidden": 32, "layers": 4, "heads": 4, "vocab": 260, "positions": 64}
    long = {"train__steps": 7, "train__micro_batch": 2, "checkpoint__every": 1}
    config = config_of(few, model__shape=shape, parallel={"strategy": "fsdp"}, **long)
    config["train"]["schedule"] = {"warmup": 0, "name": "constant"}  # which does not depend on the number of steps
    run = before = train_again_on(2, config, tmp_path / "whole")
    journey = [
        (4, {"strategy": "fsdp", "tp": 2}),
        (2, {"pp": 2, "pp_schedule": "interleaved"}),
        (2, {"strategy": "zero1", "offload": "optimizer"}),
        (4, {"strategy": "zero3", "cp": 2}),
        (4, {"pp": 2, "tp": 2}),
        (1, {"strategy": "single"}),
    ]
    for at, (world_size, parallel) in enumerate(journey, start=1):
        config["parallel"], config["train"]["steps"] = parallel, at + 1
        before = resumed(before, config, tmp_path / str(at), world_size=world_size, at=at)
        hold_near(before, cut(run, at + 1, tmp_path / f"expected {at}"))
    assert attempts(before) == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, {"tp": 2}),
        slow(4, {"strategy": "zero1", "tp": 2}),
        slow(4, {"strategy": "fsdp", "sharding": "hybrid_shard", "replicate": 2}),
        slow(4, {"strategy": "ddp", "pp": 2}),
        slow(8, {"strategy": "fsdp", "sharding": "hybrid_shard", "replicate": 2, "pp": 2, "tp": 2}),
    ],
    ids=str,
)
def test_every_element_is_written_once_however_the_model_is_sharded(world_size, parallel, few, tmp_path):
    """Also if shards are uneven: a vocabulary of 259 is split into 129 and 130."""
    shape = {"family": "gpt2", "hidden": 16, "layers": 2, "heads": 2, "vocab": 259, "positions": 64}
    config = config_of(few, model__shape=shape, parallel=parallel, train__steps=1, train__micro_batch=2)
    config["train"]["schedule"] = {"warmup": 0, "name": "constant"}
    run = train_again_on(world_size, config, tmp_path / "whole")
    written: dict[str, int] = {}
    full: dict[str, int] = {}
    for table in written_slices(run / "checkpoints" / "step-00000001"):
        for name, (here, full_size) in table.items():
            written[name] = written.get(name, 0) + here
            full[name] = full_size
    assert written == full
    config["train"]["steps"] = 2
    train_on(world_size, config, tmp_path / "whole", resume=True)
    hold_near(run, reference_run({**config, "parallel": {"strategy": "single"}}))


@pytest.mark.slow
def test_a_run_can_be_resumed_on_one_rank_and_on_two_again(few, tmp_path):
    config = config_of(few, checkpoint__every=1)
    run = train_again_on(2, config, tmp_path / "whole")
    on_one = resumed(run, config, tmp_path / "one", world_size=1, at=1)
    hold_near(resumed(on_one, config, tmp_path / "two", world_size=2, at=2), run)


def test_after_a_change_of_world_size_resume_is_exact_again(few, with_dropout, tmp_path):
    config = config_of(few, checkpoint__every=1, model={"from": str(with_dropout)})
    begun = train_again_on(1, config, tmp_path / "one")
    run = resumed(begun, config, tmp_path / "two", world_size=2, at=1)
    hold_bitwise(resumed(run, config, tmp_path / "again", world_size=2, at=2), run)


# Starting from a checkpoint, and resuming with a changed config.


@pytest.fixture(scope="module")
def finished(few: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_again_on(1, config_of(few), tmp_path_factory.mktemp("finished"))


def test_a_new_run_from_a_checkpoint_continues_it(finished, few, tmp_path):
    start = finished / "checkpoints" / f"step-{CUT:08d}"
    other = train_on(1, config_of(few, name="other"), tmp_path / "second", start_from=start)
    assert column(other, "step") == [3]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert column(other, key) == column(finished, key)[CUT:]
    found, wanted = everything(other), everything(finished)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_new_run_from_a_damaged_checkpoint_is_refused(finished, few, tmp_path):
    start = cut(finished, CUT, tmp_path / "first") / "checkpoints" / f"step-{CUT:08d}"
    file = start / "rank-00000.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    with pytest.raises(UserMistake, match=r"rank-00000\.safetensors"):
        train_on(1, config_of(few, name="other"), tmp_path / "second", start_from=start)


def test_a_new_run_from_something_else_is_refused(few, tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserMistake, match="is not a complete checkpoint"):
        train_on(1, config_of(few), tmp_path / "runs", start_from=tmp_path / "nothing")


def test_a_new_run_from_a_checkpoint_of_another_model_is_refused(finished, few, tmp_path):
    other = config_of(few, name="other")
    other["model"]["shape"] = {**other["model"]["shape"], "ffn": 96}
    with pytest.raises(
        UserMistake, match=r"holds model\.layers\.0\.mlp.* with shape \(88, 32\), but the model has \(96, 32\)"
    ):
        train_on(1, other, tmp_path / "second", start_from=finished / "checkpoints" / f"step-{CUT:08d}")


def test_a_run_that_died_before_its_first_checkpoint_starts_again(finished, few, tmp_path):
    copy = cut(finished, CUT, tmp_path)
    for file in (copy / "checkpoints" / f"step-{CUT:08d}").iterdir():
        file.unlink()
    train_on(1, config_of(few), tmp_path, resume=True)
    assert attempts(copy) == [1] * STEPS
    hold_bitwise(copy, finished)


def test_resuming_a_finished_run_changes_nothing(finished, few, tmp_path):
    copy = cut(finished, STEPS, tmp_path)
    train_on(1, config_of(few), tmp_path, resume=True)
    assert attempts(copy) == [0] * STEPS
    hold_bitwise(copy, finished)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 5}, r"seed was 1234 .* and is 5 now"),
        ({"data__max_length": 64}, r"data\.max_length was 48"),
        ({"data__pack": True}, r"data\.pack was False"),
        ({"model__freeze": ["*embed*"]}, r"model\.freeze"),
        ({"train__global_batch": 16}, r"train\.global_batch was 8"),
    ],
)
def test_resume_as_another_run_is_refused_and_leaves_the_run_alone(changes, named, finished, few, tmp_path):
    copy = cut(finished, CUT, tmp_path)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(UserMistake, match=f"--resume: {named}"):
        train_on(1, config_of(few, **changes), tmp_path, resume=True)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_resume_with_another_model_or_other_data_is_refused(finished, few, instructions, tmp_path):
    cut(finished, CUT, tmp_path)
    other = config_of(few)
    other["model"]["shape"] = {**other["model"]["shape"], "layers": 3}
    with pytest.raises(UserMistake, match=r"--resume: model\.shape\.layers was 2"):
        train_on(1, other, tmp_path, resume=True)
    with pytest.raises(UserMistake, match="--resume: the data has changed since the run started"):
        train_on(1, config_of(instructions), tmp_path, resume=True)


def test_resume_with_another_learning_rate_says_so_and_uses_it(finished, few, tmp_path, capfd):
    copy = cut(finished, CUT, tmp_path)
    train_on(1, config_of(few, train__lr=1e-3), tmp_path, resume=True)
    said = " ".join("".join(capfd.readouterr()).split())
    assert "Changed since the run started: train.lr was 0.003 and is 0.001 now." in said
    assert column(copy, "lr")[:CUT] == column(finished, "lr")[:CUT]
    assert column(copy, "lr")[CUT:] == pytest.approx([lr / 3 for lr in column(finished, "lr")[CUT:]])


def test_the_number_of_data_workers_can_be_changed_on_resume(finished, few, tmp_path):
    copy = cut(finished, CUT, tmp_path)
    train_on(1, config_of(few, data__workers=1), tmp_path, resume=True)
    hold_bitwise(copy, finished)


def test_a_run_never_starts_over_an_existing_one_and_resume_needs_one(finished, few, tmp_path):
    cut(finished, CUT, tmp_path)
    with pytest.raises(UserMistake, match="already holds a run; add --resume"):
        train_on(1, config_of(few), tmp_path)
    with pytest.raises(UserMistake, match="there is no run in"):
        train_on(1, config_of(few, name="nobody"), tmp_path, resume=True)


def test_evaluation_state_is_restored_on_resume(instructions, tmp_path):
    config = config_of(
        instructions, data__validation=0.1, eval={"every": 1, "batches": 1}, train__early_stop={"patience": 50}
    )
    run = train_again_on(1, config, tmp_path / "whole")
    copy = resumed(run, config, tmp_path / "cut", world_size=1)

    def evaluations(folder: Path) -> list[tuple[int, float]]:
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line["eval_loss"]) for line in found if "eval_loss" in line]

    assert evaluations(copy) == evaluations(run)
    newest = f"checkpoints/step-{STEPS:08d}/progress.json"
    assert json.loads((copy / newest).read_text()) == json.loads((run / newest).read_text())

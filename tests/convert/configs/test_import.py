"""`shoal import` with configs: what it prints and writes, what it refuses, and that the file trains the same."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import api
from shoal.cli.app import app
from shoal.config.load import load_config
from shoal.mistakes import UserMistake
from tests.convert.configs.translated import holds, translated
from tests.harness import lines, settings, train_again_on

ZERO_1 = {
    "zero_optimization": {"stage": 1, "overlap_comm": True, "bogus": 1},
    "train_batch_size": 8,
    "gradient_clipping": 1.0,
}


def run(folder: Path, *arguments: str):
    """The command in this process, which has no need of torch."""
    return CliRunner().invoke(app, ["import", *arguments], catch_exceptions=True)


def write(folder: Path, name: str = "ds.json", content: object = ZERO_1) -> Path:
    file = folder / name
    folder.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_the_report_names_every_outcome_and_the_file_is_beside(tmp_path):
    file = write(tmp_path)
    done = run(tmp_path, str(file))
    assert done.exit_code == 0, done.output
    heads = [line for line in done.output.splitlines() if line and not line.startswith(" ")]
    assert heads[:4] == [f"{file}: a DeepSpeed config", "became", "has no meaning here", "could not be carried"]
    assert f"wrote {tmp_path / 'ds.shoal.yaml'}" in done.output
    assert load_config(tmp_path / "ds.shoal.yaml", ["model.shape=pythia-1b"]).parallel.strategy == "zero1"


def test_json_is_one_object_with_the_same(tmp_path):
    file = write(tmp_path)
    said = json.loads(run(tmp_path, str(file), "--json").stdout)
    assert said["output"] == str(tmp_path / "ds.shoal.yaml")
    assert {line["key"]: line["ours"] for line in said["became"]}["train_batch_size"] == {"train.global_batch": 8}
    assert [line["key"] for line in said["not_carried"]] == ["zero_optimization.bogus"]
    assert [line["key"] for line in said["no_meaning"]] == ["zero_optimization.overlap_comm"]
    assert said["missing"] == ["model.from", "data.path"]


def test_an_existing_file_is_kept_unless_overwrite_is_given(tmp_path):
    file, output = write(tmp_path), tmp_path / "mine.yaml"
    output.write_text("name: mine\n")
    refused = run(tmp_path, str(file), "--output", str(output))
    assert "already exists" in str(refused.exception)
    assert output.read_text() == "name: mine\n"
    assert run(tmp_path, str(file), "--output", str(output), "--overwrite").exit_code == 0
    assert "zero1" in output.read_text()


def test_a_command_follows_two_dashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(tmp_path, "--json", "--", "litgpt", "finetune_lora", "m/x", "--devices", "2", "--out_dir", "out/tiny")
    said = json.loads(done.stdout)
    assert (said["output"], said["config"]["hardware"]) == ("tiny.yaml", {"devices": 2})
    assert (tmp_path / "tiny.yaml").is_file()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", "{broken", "is not valid JSON"),
        ("a.yaml", "a: [1\nb: 2", "a.yaml:"),
        ("a.json", {"hidden_size": 64, "model_type": "llama"}, "is not a config that shoal recognises. It looked for"),
        ("a.yaml", "model: {from: x}\ntrain: {lr: 1.0}\n", "looks like a config of shoal itself"),
        ("a.yaml", "n_layer: 2\nn_embd: 32\n", "describes the model of a LitGPT checkpoint"),
        ("a.json", {"zero_optimization": {"stage": 1}, "sample_packing": True}, "is a mixture: "),
        ("a.json", {"model": {"type": "BPE", "vocab": {"a": 0}}}, "is not a config that shoal recognises"),
        ("a.yaml", "model: {_component_: a.llama}\nbatch_size: 8\ntasks: [x]\n", "is a torchtune config of evaluating"),
        ("a.yaml", "- 1\n- 2\n", "holds no keys with values"),
        ("a.yaml", "", "holds no keys with values"),
        ("a.sh", "#!/bin/bash\necho hello\n", "is a script without a command that shoal translates: litgpt,"),
        ("a.sh", "#!/bin/bash\n#SBATCH --nodes=2\nmake all\n", None),
    ],
)
def test_bad_input_is_a_sentence(name, content, sentence, tmp_path):
    file = write(tmp_path, name, content)
    if sentence is None:  # the options of sbatch are translated all the same
        holds(translated(tmp_path, content), hardware__nodes=2)
        return
    with pytest.raises(UserMistake) as refused:
        api.import_config([file])
    assert sentence in str(refused.value)
    assert not list(tmp_path.glob("*.shoal.yaml"))


@pytest.mark.parametrize("output", [[], ["--output", "hf"]])
def test_a_file_that_does_not_exist_is_not_taken_for_weights(output, tmp_path):
    done = run(tmp_path, str(tmp_path / "nope.json"), *output)
    assert isinstance(done.exception, UserMistake)
    assert str(done.exception).startswith(f"{tmp_path / 'nope.json'} does not exist")


def test_mistakes_of_the_command_itself(tmp_path):
    file = write(tmp_path)
    for arguments, sentence in (
        ((), "Give a FILE, or a command behind two dashes"),
        ((str(file), str(tmp_path / "gone.json")), "gone.json does not exist"),
        ((str(file), "--dtype", "bf16"), "--model and --dtype are for weights"),
        ((str(tmp_path),), "is not a config, so it is taken for a checkpoint: give --output"),
        ((str(write(tmp_path, "chats.jsonl")), "--output", "out"), "chats.jsonl is data, which needs no import"),
        ((str(write(tmp_path / "runs", "metrics.jsonl").parent),), "runs is a run of shoal: shoal export"),
        ((str(write(tmp_path, "llama3_8b.toml")),), "llama3_8b.toml is TOML, which is not translated"),
        ((str(write(tmp_path, "train.py")), "--output", "out"), "train.py is a Python script, which is neither read"),
        (("--", "make", "all"), "make, which is not a command that shoal translates"),
        (("--", "shoal", "train", "x"), "is a command of shoal already"),
    ):
        assert sentence in str(run(tmp_path, *arguments).exception), arguments


def test_two_files_that_disagree_are_named_and_the_later_counts(tmp_path):
    found = translated(
        tmp_path, {"train_batch_size": 8, "steps_per_print": 5}, {"train_batch_size": 16, "steps_per_print": 5}
    )
    assert found.config["train"]["global_batch"] == 16
    assert len(found.contradictions) == 1
    assert "train_batch_size: 8" in found.contradictions[0]
    assert "train_batch_size: 16" in found.contradictions[0]


def test_a_value_cannot_leave_its_comment_or_run_anything(tmp_path):
    found = translated(
        tmp_path, {"zero_optimization": {"stage": 1}, "bogus\nname: evil": "${oc.env:HOME}", "wandb": {"enabled": True}}
    )
    text = (tmp_path / "run.yaml").read_text()
    assert load_config(tmp_path / "run.yaml", needs_model=False).name == "run", text
    assert "bogus\nname: evil" in {line.key for line in found.lines}


@pytest.mark.slow
def test_the_translated_file_trains_with_the_same_numbers_as_one_written_by_hand(instructions, tmp_path):
    deepspeed = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 1, "reduce_scatter": True},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.99], "weight_decay": 0.05}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 6}},
        "steps_per_print": 1,
    }
    command = (
        f"torchrun --nproc_per_node 2 train.py --train_file {instructions} --max_length 144 "
        "--packing false --max_steps 3 "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --eval_strategy no --dataloader_num_workers 0 "
        "--bf16 false --seed 1234 --full_determinism --report_to none"
    )
    found = translated(tmp_path, deepspeed, command=command)
    shape = settings(instructions)["model"]
    translation = {**found.config, "name": "theirs", "model": shape}
    by_hand = settings(
        instructions,
        name="ours",
        train__steps=3,
        train__micro_batch=2,
        train__clip=0.5,
        train__optimizer={"betas": [0.9, 0.99], "weight_decay": 0.05},
        train__schedule={"name": "linear", "warmup": 2, "total_steps": 6, "min_ratio": 0.0},
        parallel__strategy="zero1",
    )
    theirs, ours = (lines(train_again_on(2, config, tmp_path)) for config in (translation, by_hand))
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    assert [[line[key] for key in keys] for line in theirs] == [[line[key] for key in keys] for line in ours]
    assert len(theirs) == 3

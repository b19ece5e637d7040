"""The command line: fast help, and one sentence for a mistake in the config, without importing torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import shoal as package
from shoal.config import Config, config_from_mapping, load_config
from tests.harness import slow
from tests.launch.command import Command, environment, forked_shoal, run_within, shoal

# Fractions of the CPU time of importing torch on this machine.
ANSWERS_WITHIN = 0.35
MISTAKE_WITHIN = 0.4
PLAN_WITHIN = 0.5

GOOD = """\
name: example
model: {shape: gpt2}
data: {path: data.json, validation: 0}
train:
  steps: 10
  lr: 1e-4
"""


@pytest.fixture(scope="module")
def importing_torch(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds of CPU time. A fast command does not import torch."""
    with Command(tmp_path_factory.mktemp("torch"), [sys.executable, "-c", "import torch"]) as command:
        return command.wait().work


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        *(slow(one) for one in (["config", "--help"], ["export", "-h"], ["bench", "-h"])),
    ],
)
def test_help_is_fast(arguments: list[str], importing_torch: float, tmp_path: Path) -> None:
    limit = ANSWERS_WITHIN * importing_torch
    answer = run_within(limit, lambda: shoal(tmp_path, *arguments))
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith("Usage: shoal")
    assert answer.work < limit


def test_a_plan_is_fast(importing_torch: float, tmp_path: Path) -> None:
    asked = ["model.shape=llama3-70b", "hardware.gpu=h100-80gb", "hardware.devices=8", "hardware.nodes=4", "--json"]
    limit = PLAN_WITHIN * importing_torch
    answer = run_within(limit, lambda: shoal(tmp_path, "plan", *asked))
    assert answer.status == 0, answer.err
    json.loads(answer.out)
    assert answer.work < limit


def test_help_names_the_commands_and_the_options_of_train(tmp_path: Path) -> None:
    commands = forked_shoal(tmp_path, "--help").out
    for name in ("train", "export", "config"):
        assert f"\n  {name} " in commands
    options = forked_shoal(tmp_path, "train", "--help").out
    for name in ("--resume", "--from", "--overwrite", "--max-restarts", "--json"):
        assert name in options


def test_torch_is_not_imported_to_answer_or_to_refuse_a_config(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    commands = [
        ["train", "--help"],
        ["--version"],
        ["config", "show", "run.yaml"],
        ["train", "run.yaml", "lr=1"],
        ["bench", "collectives", "--largest", "many"],
    ]
    program = f"""
import contextlib, sys
from shoal.cli import main
for arguments in {commands!r}:
    sys.argv = ["shoal", *arguments]
    with contextlib.suppress(SystemExit):
        main()
    print("imported:", sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True
    )
    imported = [line for line in answer.stdout.splitlines() if line.startswith("imported:")]
    assert imported == ["imported: []"] * len(commands), answer.stderr


def test_version_is_the_packages(tmp_path: Path) -> None:
    answer = forked_shoal(tmp_path, "--version")
    assert (answer.status, answer.out, answer.err) == (0, f"shoal {package.__version__}\n", "")


def test_python_dash_m_shoal_is_the_same_command(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "shoal", "train", "run.yaml"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (2, "", "shoal: run.yaml does not exist.\n")


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        (GOOD + "  lrr: 1\n", [], "run.yaml:7: train.lrr is not a key shoal knows. Did you mean lr?"),
        (
            GOOD + "  learning_rate: 1\n",
            [],
            "run.yaml:7: train.learning_rate is not a key shoal knows: train.lr sets the peak learning rate.",
        ),
        (GOOD, ["train.stepz=3"], "override train.stepz=3: train.stepz is not a key shoal knows. Did you mean steps?"),
        (GOOD.replace("1e-4", "fast"), [], 'run.yaml:6: train.lr is "fast", but must be a number.'),
        (GOOD, ["train.steps=0"], "override train.steps=0: must be at least 1."),
        (None, [], "run.yaml does not exist. Did you mean runs.yaml?"),
        (
            "model: [1\n",
            [],
            "run.yaml:2: this is not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'.",
        ),
        (
            GOOD,
            ["train.compile=thunder"],
            "override train.compile=thunder: train.compile thunder is not built yet. Use auto: lightning-thunder 0.2.6 "
            "cannot be imported with torch 2.13, which has no Tensor.align_as.",
        ),
    ],
    ids=[
        "unknown key",
        "key of another tool",
        "unknown override",
        "wrong type",
        "zero steps",
        "missing file",
        "broken YAML",
        "not built",
    ],
)
def test_a_mistake_in_the_config_is_one_sentence(
    text: str | None, overrides: list[str], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / ("runs.yaml" if text is None else "run.yaml")).write_text(text or GOOD)
    forked_shoal(tmp_path, "train", "run.yaml", *overrides).hold_mistake(sentence)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("override", ["train.stepz=3", "parallel={engine: deepspeed, tp: 2}"])
def test_a_mistake_in_the_config_is_found_at_once(override: str, importing_torch: float, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    limit = MISTAKE_WITHIN * importing_torch
    answer = run_within(limit, lambda: shoal(tmp_path, "train", "run.yaml", override))
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert answer.work < limit


def test_an_unknown_shape_is_answered_at_once_with_the_nearest_names(importing_torch: float, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD.replace("gpt2", "lama3-8b"))
    limit = MISTAKE_WITHIN * importing_torch
    answer = run_within(limit, lambda: shoal(tmp_path, "train", "run.yaml"))
    assert (answer.status, answer.out) == (2, "")
    beginning = "shoal: run.yaml:2: No model shape is called 'lama3-8b'. Did you mean llama3-8b or "
    assert answer.err.startswith(beginning)
    assert answer.err.count("\n") == 1
    assert answer.work < limit


def test_every_mistake_of_a_config_is_on_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD + "  lrr: 1\n  clip: x\n")
    answer = forked_shoal(tmp_path, "train", "run.yaml", "--json")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.removeprefix("shoal: ").splitlines() == [
        "run.yaml:7: train.lrr is not a key shoal knows. Did you mean lr?",
        'run.yaml:8: train.clip is "x", but must be a number or null.',
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument 'FILE'"),
        (["train", "run.yaml", "--resum"], "No such option: --resum"),
        (["train", "run.yaml", "--max-restarts", "-1"], "'--max-restarts'"),
        (["generate", "runs/x", "hi", "--tokens", "ten"], "'--tokens': it must be an integer; "),
        (["data", "previw"], "Did you mean 'preview'?"),
        (["export", "runs/x", "--to", "gguf"], "'gguf' is not one of 'hf', 'litgpt'; llama.cpp's convert_hf_to_gguf"),
    ],
)
def test_a_mistyped_command_is_status_2_with_one_sentence(arguments: list[str], says: str, tmp_path: Path) -> None:
    answer = forked_shoal(tmp_path, *arguments)
    assert (answer.status, answer.out) == (2, "")
    assert says in answer.err
    assert answer.err.startswith("shoal: ")
    assert answer.err.count("\n") == 1


def test_config_show_prints_yaml_that_loads_as_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    overrides = ["train.lr=3e-4", "train.schedule=linear", "train.lr_groups[lm_head.*]=0.5"]
    answer = forked_shoal(tmp_path, "config", "show", "run.yaml", *overrides)
    assert (answer.status, answer.err) == (0, "")
    expected = load_config(tmp_path / "run.yaml", overrides)
    (tmp_path / "shown.yaml").write_text(answer.out)
    assert load_config(tmp_path / "shown.yaml") == expected
    again = forked_shoal(tmp_path, "config", "show", "shown.yaml")
    assert again.out == answer.out
    shown = yaml.safe_load(answer.out)
    assert shown["train"]["schedule"]["name"] == "linear"
    assert shown["checkpoint"]["keep"] == Config.model_fields["checkpoint"].default_factory().keep  # defaults too


def test_config_show_json_is_one_object_that_is_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    answer = forked_shoal(tmp_path, "config", "show", "run.yaml", "train.lr=3e-4", "--json")
    assert (answer.status, answer.err) == (0, "")
    assert config_from_mapping(json.loads(answer.out)) == load_config(tmp_path / "run.yaml", ["train.lr=3e-4"])


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_config_schema_describes_every_property(arguments: list[str], tmp_path: Path) -> None:
    answer = forked_shoal(tmp_path, "config", "schema", *arguments)
    assert (answer.status, answer.err) == (0, "")
    schema = json.loads(answer.out)
    assert schema["type"] == "object"
    assert set(schema["properties"]) == {
        "name", "run_dir", "seed", "include", "model", "adapter", "data", "train", "eval",
        "parallel", "hardware", "checkpoint", "log", "slurm",
    }  # fmt: skip
    properties = dict(_properties(schema))
    assert "TrainConfig.lr" in properties
    assert "ModelConfig.from" in properties
    # The description of a block is with the block that the property refers to.
    described = {
        name: one.get("description") or _follow(schema, one["$ref"])["description"] for name, one in properties.items()
    }
    assert [name for name, sentence in described.items() if not sentence.endswith(".")] == []
    missing = [reference for reference in _references(schema) if _follow(schema, reference) is None]
    assert missing == []


def test_config_schema_refuses_unknown_keys_as_the_command_does(tmp_path: Path) -> None:
    schema = json.loads(forked_shoal(tmp_path, "config", "schema").out)
    blocks = [schema, *schema["$defs"].values()]
    assert [one.get("title") for one in blocks if one.get("type") == "object" and one["additionalProperties"]] == []


def _properties(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    blocks = {"Config": schema, **schema["$defs"]}
    return [
        (f"{block}.{name}", value) for block, one in blocks.items() for name, value in one.get("properties", {}).items()
    ]


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [found for value in node.values() for found in _references(value)]
    if isinstance(node, list):
        return [found for value in node for found in _references(value)]
    return []


def _follow(schema: Any, reference: str) -> Any:
    assert reference.startswith("#/")
    for part in reference[2:].split("/"):
        if not isinstance(schema, dict) or part not in schema:
            return None
        schema = schema[part]
    return schema


def test_ctrl_c_while_the_command_starts_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-m", "shoal", "--version"], env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")

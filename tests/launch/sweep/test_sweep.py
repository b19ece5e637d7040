"""`shoal sweep` from its command line to its files. What a member trains is replaced by a program that writes metrics
at once: importing torch takes longer than everything else here."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from shoal import api
from shoal.cli.app import app
from shoal.config.load import load_config
from shoal.mistakes import UserMistake
from tests.launch.command import descendants, environment

# Trains as `shoal train` does, as far as a sweep can see: the loss is (lr - 0.003)² · 1000 + 1 / step.
TRAINED = """
import json, os, signal, sys, time
from pathlib import Path
file, *overrides = sys.argv[1:sys.argv.index("--runs")]
run = Path(sys.argv[sys.argv.index("--runs") + 1])
values = dict(one.split("=", 1) for one in overrides)
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
run = run / values["name"]
run.mkdir(exist_ok=True)
print(json.dumps(values))
if values.get("seed") == "13" and not (run.parent / "mended").exists():
    sys.exit("shoal: The data is gone.")
first = len((run / "metrics.jsonl").read_text().splitlines()) + 1 if (run / "metrics.jsonl").exists() else 1
with (run / "metrics.jsonl").open("a", buffering=1) as file:
    for step in range(first, 9):
        speed = 100.0 * step
        loss = (float(values.get("train.lr", 0)) - 0.003) ** 2 * 1000 + 1 / step
        file.write(json.dumps({"step": step, "attempt": 0, "eval_loss": loss, "tokens_per_second": speed}) + "\\n")
        wait = float(os.environ.get("STEP_SECONDS", "0"))
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and not stopped:
            time.sleep(0.01)
        if stopped:
            sys.exit(75)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config in the current folder, and the program that trains it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("word " * 1000)
    (tmp_path / "trained.py").write_text(TRAINED)
    shape = {"family": "llama", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 88, "vocab": 260}
    written = {
        "name": "tiny",
        "model": {"shape": {**shape, "positions": 512, "tied": True}, "tokenizer": "bytes"},
        "data": {"source": "text", "path": "text.txt", "max_length": 96, "validation": 0.1},
        "train": {"steps": 8, "global_batch": 8, "micro_batch": 4, "lr": 1e-3},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written))
    stand_in(monkeypatch)
    # Drawing takes longer than the rest of a test.
    monkeypatch.setattr("shoal.launch.sweep.run.can_plot", lambda: False)
    return tmp_path


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.launch.sweep import local

    real = local.train_command

    def command(*arguments: Any) -> list[str]:
        python, _, module, train, *others = real(*arguments)
        assert (module, train) == ("shoal", "train")
        return [python, "-S", "trained.py", *others]

    monkeypatch.setattr(local, "train_command", command)


def states(folder: Path) -> dict[str, str]:
    return {one["name"]: one["state"] for one in json.loads((folder / "sweep.json").read_text())["members"]}


def test_members_run_once_and_the_best_config_can_be_trained(config: Path) -> None:
    found = api.sweep("run.yaml", ["train.lr=1e-3,3e-3", "seed=1"])
    folder = config / "runs" / "tiny-sweep"
    assert [one.entry.name for one in found.table.results] == ["01-lr-3e-3", "00-lr-1e-3"], "the best first"
    assert found.table.best is not None
    assert found.table.best.value == pytest.approx(1 / 8), "of the last evaluation"
    best = load_config(folder / "best.yaml")
    assert (best.train.lr, best.seed, best.name) == (3e-3, 1, "tiny-sweep-best")
    assert "01-lr-3e-3  done" in found.text()
    again = api.sweep("run.yaml", ["train.lr=1e-3,3e-3,5e-3", "seed=1"])
    attempts = {one.entry.name: one.entry.attempts for one in again.table.results}
    assert attempts == {"00-lr-1e-3": 1, "01-lr-3e-3": 1, "02-lr-5e-3": 1}, "only the new one has run"
    pruned = (folder / "sweep.json").read_text().replace('"state": "done"', '"state": "pruned"')
    (folder / "sweep.json").write_text(pruned)
    assert api.sweep("run.yaml", ["train.lr=1e-3,3e-3", "seed=1"]).table.best is None, "none was trained to its end"


def test_a_failed_member_is_retried_alone_and_says_why(config: Path) -> None:
    found = api.sweep("run.yaml", ["seed=12,13,14"])
    folder = config / "runs" / "tiny-sweep"
    assert states(folder) == {"00-seed-12": "done", "01-seed-13": "failed", "02-seed-14": "done"}
    assert "01-seed-13: The data is gone." in found.text()
    assert api.sweep("run.yaml", ["seed=12,13,14"]).table.count("failed") == 1, "not without --retry-failed"
    (folder / "mended").touch()
    again = api.sweep("run.yaml", ["seed=12,13,14"], retry_failed=True)
    assert {one.entry.name: (one.entry.state, one.entry.attempts) for one in again.table.results} == {
        "00-seed-12": ("done", 1),
        "01-seed-13": ("done", 2),
        "02-seed-14": ("done", 1),
    }


def test_members_are_compared_by_another_metric_and_plotted(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.sweep.run.can_plot", lambda: True)
    found = api.sweep("run.yaml", ["train.lr=1e-3,3e-3"], metric="tokens_per_second", plot="chart.svg")
    assert found.table.metric.maximized
    assert [one.value for one in found.table.results] == [500.0, 500.0], "the median without the first step"
    assert "<svg" in (config / "chart.svg").read_text()
    with pytest.raises(UserMistake, match=r"--metric eval_los is not in .* Did you mean eval_loss"):
        api.sweep("run.yaml", ["train.lr=1e-3,3e-3"], metric="eval_los")


def test_the_command_prints_json_and_fails_with_its_members(config: Path) -> None:
    done = CliRunner().invoke(app, ["sweep", "run.yaml", "seed=12,13", "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["best"] == "00-seed-12"
    assert [(one["name"], one["state"]) for one in found["members"]] == [
        ("00-seed-12", "done"),
        ("01-seed-13", "failed"),
    ]


@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        (["train.lr=1e-3,fast"], ["override train.lr=fast: "]),
        (["train.lrr=1e-3,3e-3"], ["train.lrr is not a key shoal knows. Did you mean lr?"]),
        (["train.lr=0.001,-1", "train.stepz=1,2"], ["stepz"]),
        (["data.path=text.txt,gone.txt,lost.txt"], ["gone.txt", "lost.txt"]),
        (["hardware.gpu=h200", "model.shape=gpt2,llama3-70b"], ["model.shape=llama3-70b: this does not fit"]),
    ],
)
def test_mistakes_in_any_member_are_found_before_the_first_starts(
    arguments: list[str], sentences: list[str], config: Path
) -> None:
    with pytest.raises(UserMistake) as mistake:
        api.sweep("run.yaml", arguments)
    lines = str(mistake.value).splitlines()
    assert all(any(sentence in line for line in lines) for sentence in sentences), lines
    assert not (config / "runs" / "tiny-sweep").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"overrides": ["train.steps=4"]}, "Nothing varies"),
        ({"overrides": ["seed=1,2"], "random": 2, "trials": 2}, "--random and --optuna are different ways"),
        ({"overrides": ["seed=1,2"], "trials": 2, "on": "slurm"}, "for a job array use --random N"),
        ({"overrides": ["seed=1,2"], "name": "../x"}, "must be the name of one folder"),
        ({"overrides": ["seed=1,2"], "listed": "a.yaml"}, "--list has the members, so seed must have one value"),
    ],
)
def test_contradictory_requests_are_refused(options: dict[str, Any], sentence: str, config: Path) -> None:
    with pytest.raises(UserMistake, match=sentence):
        api.sweep("run.yaml", **options)


def test_a_sweep_does_not_mix_with_other_runs_or_another_config(config: Path) -> None:
    api.sweep("run.yaml", ["seed=1,2"], name="mixed")
    with pytest.raises(UserMistake, match="00-seed-1 was started with another config"):
        api.sweep("run.yaml", ["seed=1,2", "train.lr=5e-3"], name="mixed")
    (config / "runs" / "single").mkdir()
    (config / "runs" / "single" / "config.yaml").touch()
    with pytest.raises(UserMistake, match="holds a run, not a sweep"):
        api.sweep("run.yaml", ["seed=1,2"], name="single")
    (config / "runs" / "mixed" / "sweep.json").write_text('{"format": 1, "members": [{"name": "/etc"}]}')
    with pytest.raises(UserMistake, match="cannot be read"):
        api.sweep("run.yaml", ["seed=1,2"], name="mixed")


@pytest.mark.parametrize(
    ("key", "option", "sentence"),
    [("name", {"name": "one"}, "different names, .+; give a --name"), ("run_dir", {"runs": "one"}, "give --runs")],
)
def test_members_whose_folders_would_differ_are_refused_also_in_the_middle(
    key: str, option: dict[str, Any], sentence: str, config: Path
) -> None:
    written = yaml.safe_load((config / "run.yaml").read_text())
    (config / "run.yaml").write_text(yaml.safe_dump({**written, key: "of-${seed}"}))
    (config / "members.yaml").write_text("[{seed: 1}, {seed: 2}, {seed: 1, train.lr: 0.1}]")
    with pytest.raises(UserMistake, match=sentence):
        api.sweep("run.yaml", listed="members.yaml", dry_run=True)
    assert len(api.sweep("run.yaml", listed="members.yaml", dry_run=True, **option).table.results) == 3


def test_a_dry_run_lists_members_and_writes_nothing(config: Path) -> None:
    found = api.sweep("run.yaml", ["train.lr=log(1e-4,1e-2)"], random=3, dry_run=True)
    assert len(found.table.results) == 3
    assert not (config / "runs").exists()


def test_optuna_prunes_what_does_worse_and_continues(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.05")
    monkeypatch.setattr("shoal.launch.sweep.local._LOOK_EVERY", 0.02)
    good = ["train.lr=0.003", "train.lr=0.0031", "train.lr=0.0032", "train.lr=0.0033"]
    (config / "good.yaml").write_text(json.dumps(good))
    api.sweep("run.yaml", listed="good.yaml")
    # All values but one are known, so that this is what Optuna proposes.
    space = ["train.lr=0.003,0.0031,0.0032,0.0033,0.5"]
    found = api.sweep("run.yaml", space, trials=5)
    assert [entry.attempts for entry in found.table.sweep.entries] == [1] * 5, "those that there were count"
    worst = found.table.sweep.entries[-1]
    assert (worst.member.overrides, worst.state) == (("train.lr=0.5",), "pruned")
    logged = (found.table.sweep.run_of(worst) / "metrics.jsonl").read_text().count("eval_loss")
    assert logged < 8, "it was asked to stop"
    assert found.table.best is not None
    assert found.table.best.entry.member.overrides == ("train.lr=0.003",)
    with pytest.raises(UserMistake, match="was started with another config"):
        api.sweep("run.yaml", [*space, "train.steps=9"], trials=6)
    with pytest.raises(UserMistake, match="Optuna finds no members but the 5"):
        api.sweep("run.yaml", space, trials=6)


def test_a_proposal_of_optuna_that_cannot_be_trained_is_a_failed_member(config: Path) -> None:
    found = api.sweep("run.yaml", ["train.lr=-1,0.003"], trials=2)
    assert {entry.member.overrides[0]: entry.state for entry in found.table.sweep.entries} == {
        "train.lr=-1": "failed",
        "train.lr=0.003": "done",
    }
    assert "must be" in found.text()


PROGRAM = """
import sys
from shoal.cli import main
from shoal.launch.sweep import local, run
real = local.train_command
local.train_command = lambda *arguments: [sys.executable, "-S", "trained.py", *real(*arguments)[4:]]
run.can_plot = lambda: False
try:
    main()
finally:
    print("imported" if "torch" in sys.modules else "not imported", file=sys.stderr)
"""


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_stops_its_member_and_the_same_command_continues(number: signal.Signals, config: Path) -> None:
    (config / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", "sweep", "run.yaml", "train.lr=1e-3,3e-3"]
    folder = config / "runs" / "tiny-sweep"
    slow = {**environment(config), "STEP_SECONDS": "60"}
    with subprocess.Popen(command, env=slow, stderr=subprocess.PIPE, text=True, start_new_session=True) as sweep:
        until((folder / "00-lr-1e-3" / "metrics.jsonl").exists)
        (member,) = descendants(sweep.pid)
        os.kill(sweep.pid, number)
        _, said = sweep.communicate(timeout=60)
    until(lambda: not Path(f"/proc/{member}").exists())
    if number is signal.SIGINT:
        assert sweep.returncode == 75, said
        assert "Stopped early; the same command continues." in said
        assert "not imported" in said, "torch is for the members"
        assert states(folder) == {"00-lr-1e-3": "stopped", "01-lr-3e-3": "waiting"}
    found = api.sweep("run.yaml", ["train.lr=1e-3,3e-3"])
    assert {one.entry.name: one.entry.attempts for one in found.table.results} == {"00-lr-1e-3": 2, "01-lr-3e-3": 1}
    steps = [json.loads(line)["step"] for line in (folder / "00-lr-1e-3" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9)), "it was continued"

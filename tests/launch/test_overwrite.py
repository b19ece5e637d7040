"""`--overwrite` keeps the old run until the new one has a checkpoint, and one process at a time has a run's folder."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.launch import rank as launch_rank
from shoal.mistakes import UserMistake
from shoal.train.hooks import Hook, RunStart, StepEnd
from tests.harness import PATIENCE, lines, run_ranks, settings, train_again_on, train_on
from tests.launch.command import forked_shoal, write_config

STEPS = 4


@pytest.fixture(scope="module")
def trained(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs: `run`, and `wide`, whose shapes are others."""
    folder = tmp_path_factory.mktemp("trained")
    train_again_on(1, config_of(instructions), folder / "runs")
    train_again_on(1, config_of(instructions, name="wide", model__shape__hidden=64), folder / "runs")
    return folder


@pytest.fixture
def folder(trained: Path, instructions: Path, tmp_path: Path) -> Path:
    write_config(tmp_path, config_of(instructions))
    shutil.copytree(trained / "runs", tmp_path / "runs")
    return tmp_path


def config_of(data: Path, **changes: Any) -> dict[str, Any]:
    short = {"train__steps": STEPS, "checkpoint__every": 2, "data__max_length": 64, "data__train_on": "all"}
    return settings(data, **{**short, **changes})


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs").iterdir())


def killed(function: Callable[[], Any]) -> None:
    """Call `function` in a rank, which kills itself meanwhile."""
    with pytest.raises(AssertionError, match="a rank ended without an answer"):
        run_ranks(1, function)


class Kill(Hook):
    """Kills the process as `kill -9` does: before the step after `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_run_start(self, start: RunStart) -> None:
        self._kill_at(0)

    def on_step_end(self, end: StepEnd) -> None:
        self._kill_at(end.step)

    def _kill_at(self, step: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def overwrite(folder: Path, config: dict[str, Any], **options: Any) -> Callable[[], Any]:
    loaded = api.config_from_mapping(config)
    return lambda: api.train(loaded, runs=folder / "runs", overwrite=True, **options).as_dict()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_that_does_not_fit_leaves_the_run_that_it_was_to_replace(
    world_size: int, instructions: Path, folder: Path
) -> None:
    before = files(folder / "runs")
    checkpoint = folder / "runs" / "wide" / "checkpoints" / f"step-{STEPS:08d}"
    with pytest.raises(UserMistake, match=r"holds .+ with shape .+, but the model has"):
        run_ranks(world_size, overwrite(folder, config_of(instructions), start_from=checkpoint))
    assert files(folder / "runs") == before
    assert names(folder) == ["run", "wide"]


def test_the_command_says_that_it_has_restored_the_run(folder: Path) -> None:
    checkpoint = f"runs/wide/checkpoints/step-{STEPS:08d}"
    ended = forked_shoal(folder, "train", "run.yaml", "--overwrite", "--from", checkpoint)
    assert ended.status == 2, ended.err
    *_, restored, mistake = ended.err.splitlines()
    assert "The old run is in runs/run~replaced until this one has a complete checkpoint." in ended.err
    assert restored == "runs/run was restored: the run that was to replace it ended before its first step."
    assert "with shape" in mistake
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_our_launcher_restores_the_run_too(folder: Path) -> None:
    before = files(folder / "runs")
    checkpoint = f"runs/wide/checkpoints/step-{STEPS:08d}"
    ended = forked_shoal(folder, "train", "run.yaml", "--overwrite", "--from", checkpoint, "hardware.devices=2")
    assert ended.status == 2, ended.err
    assert "runs/run was restored" in ended.err
    assert files(folder / "runs") == before


def test_the_old_run_is_deleted_when_the_new_one_has_its_first_checkpoint(instructions: Path, folder: Path) -> None:
    before = files(folder / "runs" / "run")
    aside = folder / "runs" / "run~replaced"

    class Look(Hook):
        def on_step_end(self, end: StepEnd) -> None:
            if end.step == 1:
                assert files(aside) == before

        def on_save(self, saved: Any) -> None:
            assert not aside.exists()

    config = config_of(instructions, checkpoint__async=False, seed=5)
    run_ranks(1, overwrite(folder, config, hooks=[Look()]))
    assert names(folder) == ["run", "wide"]
    assert len(lines(folder / "runs" / "run")) == STEPS
    assert files(folder / "runs" / "run")["metrics.jsonl"] != before["metrics.jsonl"]


def test_what_a_start_that_was_killed_at_once_has_left_is_no_obstacle(folder: Path) -> None:
    shutil.rmtree(folder / "runs" / "run")
    for name in ("checkpoints", "logs", "model"):
        (folder / "runs" / "run" / name).mkdir(parents=True)
    (folder / "runs" / "run" / "config.yaml.tmp").write_text("half a con")
    (folder / "runs" / ".run.lock").touch()
    (folder / "runs" / ".run.removed" / "checkpoints").mkdir(parents=True)  # while it deleted the run it replaced
    ended = forked_shoal(folder, "train", "run.yaml")
    assert ended.status == 0, ended.err
    assert names(folder) == ["run", "wide"]


def test_the_old_run_is_not_restored_over_files_of_somebody_else(folder: Path) -> None:
    (folder / "runs" / "run").rename(folder / "runs" / "run~replaced")
    (folder / "runs" / "run").mkdir()
    (folder / "runs" / "run" / "thesis.tex").write_text("precious")
    before = files(folder / "runs")
    ended = forked_shoal(folder, "train", "run.yaml")
    assert ended.status == 2, ended.err
    assert "runs/run exists and is not a shoal run" in ended.err
    assert files(folder / "runs") == before


@pytest.mark.parametrize("resume", [False, True])
def test_after_a_kill_before_the_first_step_the_old_run_is_back(resume: bool, instructions: Path, folder: Path) -> None:
    before = files(folder / "runs" / "run")
    killed(overwrite(folder, config_of(instructions, seed=5), hooks=[Kill(0)]))
    assert files(folder / "runs" / "run~replaced") == before
    if resume:
        train_on(1, config_of(instructions), folder / "runs", resume=True)
        assert lines(folder / "runs" / "run")[-1]["step"] == STEPS
    else:
        with pytest.raises(UserMistake, match="already holds a run"):
            train_on(1, config_of(instructions, seed=5), folder / "runs")
        assert files(folder / "runs" / "run") == before
    assert names(folder) == ["run", "wide"]


def test_a_run_is_kept_through_kills_until_one_that_replaces_it_has_a_checkpoint(
    instructions: Path, folder: Path
) -> None:
    before = files(folder / "runs" / "run")
    config = config_of(instructions, seed=5, checkpoint__every=3)
    for step in (2, 2, 0, 2):  # after a line of metrics was written, or before
        killed(overwrite(folder, config, hooks=[Kill(step)]))
        assert files(folder / "runs" / "run~replaced") == before
    # What was begun can be resumed, and the old run is still there.
    killed(lambda: api.train(api.config_from_mapping(config), runs=folder / "runs", resume=True, hooks=[Kill(2)]))
    assert files(folder / "runs" / "run~replaced") == before
    run_ranks(1, overwrite(folder, config))
    assert names(folder) == ["run", "wide"]
    assert lines(folder / "runs" / "run")[-1]["step"] == STEPS


def test_a_run_without_a_checkpoint_says_where_the_one_it_replaced_is(folder: Path) -> None:
    before = files(folder / "runs" / "run")
    never = ["checkpoint.every=100", "checkpoint.at_end=false"]
    ended = forked_shoal(folder, "train", "run.yaml", *never, "--overwrite")
    assert ended.status == 0, ended.err
    assert ended.err.splitlines()[-1] == (
        "warning: the run that this one replaced is still in runs/run~replaced: this one has no complete checkpoint."
    )
    assert files(folder / "runs" / "run~replaced") == before


def test_a_folder_of_the_name_that_the_old_run_would_get_is_left_alone(folder: Path) -> None:
    (folder / "runs" / "run~replaced").mkdir()
    (folder / "runs" / "run~replaced" / "thesis.tex").write_text("precious")
    before = files(folder / "runs")
    ended = forked_shoal(folder, "train", "run.yaml", "--overwrite")
    assert ended.status == 2, ended.err
    assert ended.err.splitlines()[-1] == (
        "shoal: runs/run~replaced is not a run that --overwrite moved there; move it, or choose another name=…"
    )
    assert files(folder / "runs") == before


def test_a_run_folder_that_is_a_link_stays_one(instructions: Path, folder: Path) -> None:
    (folder / "disk").mkdir()
    (folder / "runs" / "run").rename(folder / "disk" / "run")
    (folder / "runs" / "run").symlink_to(folder / "disk" / "run")
    run_ranks(1, overwrite(folder, config_of(instructions, seed=5)))
    assert (folder / "runs" / "run").is_symlink()
    assert [path.name for path in (folder / "disk").iterdir()] == ["run"]
    assert lines(folder / "disk" / "run")[-1]["step"] == STEPS


def test_overwriting_what_the_new_run_reads_is_refused(folder: Path) -> None:
    before = files(folder / "runs")
    shutil.copy(folder / "run.yaml", folder / "runs" / "run" / "text.txt")
    for name, arguments in {
        "--from": ["--from", f"runs/run/checkpoints/step-{STEPS:08d}"],
        "data.path": ["data.path=runs/run/text.txt", "data.source=text"],
        "which data.path": ["data.path=[run.yaml, runs/run/text.txt]", "data.source=text"],
        "model.from": ["model.shape=null", "model.from=runs/run/model"],
    }.items():
        ended = forked_shoal(folder, "train", "run.yaml", "--overwrite", *arguments)
        assert ended.status == 2, ended.err
        assert ended.err.splitlines()[-1].startswith("shoal: --overwrite would delete ")
        assert name in ended.err.splitlines()[-1]
    (folder / "runs" / "run" / "text.txt").unlink()
    assert files(folder / "runs") == before


@pytest.mark.parametrize("overwrites", [False, True])
def test_of_two_starts_at_once_one_trains_and_the_other_changes_nothing(
    overwrites: bool, instructions: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has found no error and is about to write when the first begins to train."""
    if not overwrites:
        shutil.rmtree(folder / "runs" / "run")
    training, refused = folder / "training", folder / "refused"
    preflight = launch_rank.preflight
    first = api.config_from_mapping(config_of(instructions, train__lr=1e-3))
    second = api.config_from_mapping(config_of(instructions, train__lr=5e-3))

    class WaitForTheOther(Hook):
        def on_run_start(self, start: RunStart) -> None:
            training.touch()
            wait_until(refused.exists)

    def train_another(*arguments: Any, **options: Any) -> Any:
        checked = preflight(*arguments, **options)
        monkeypatch.setattr(launch_rank, "preflight", preflight)
        if os.fork() == 0:
            try:
                api.train(first, runs=folder / "runs", overwrite=overwrites, hooks=[WaitForTheOther()])
                (folder / "ended").touch()
            finally:
                os._exit(0)
        wait_until(training.exists)
        return checked

    def start_second() -> None:
        try:
            api.train(second, runs=folder / "runs", overwrite=overwrites)
        finally:
            refused.touch()
            wait_until((folder / "ended").exists)

    monkeypatch.setattr(launch_rank, "preflight", train_another)
    with pytest.raises(UserMistake, match="Another process is training in"):
        run_ranks(1, start_second)
    run = folder / "runs" / "run"
    assert api.load_config(run / "config.yaml").train.lr == 1e-3
    assert [line["attempt"] for line in lines(run)] == [0] * STEPS
    assert names(folder) == ["run", "wide"]


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)

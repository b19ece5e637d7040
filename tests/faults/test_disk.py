"""A disk that is full, read-only or removed: no partial checkpoint stays, and nothing that can be saved is lost."""

import contextlib
import errno
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.checkpoint import store
from shoal.checkpoint.store import list_complete
from shoal.train.save import CannotSave
from tests.checkpoint.cut import hold_bitwise
from tests.harness import LLAMA, PATIENCE, lines, run_ranks, settings, train_on
from tests.launch.command import forked_shoal, write_config

STEPS, SAVE_EVERY = 60, 5
FILLER = "somebody-elses"
ROOM = 4 * 2**20  # of the small disk; a checkpoint here takes about 300 KiB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of a few megabytes."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(mount_point)]
    if os.geteuid() != 0 or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("only root can mount a file system")
    yield mount_point
    subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


def config_of(data: Path, world_size: int = 1, **changes: Any) -> dict[str, Any]:
    long = {"train__steps": STEPS, "checkpoint__every": SAVE_EVERY, "data__max_length": 32, "data__train_on": "all"}
    batch = {"train__global_batch": 2, "train__micro_batch": 2 // world_size}
    return settings(data, model__shape={**LLAMA, "layers": 1}, **{**long, **batch, **changes})


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Run `act` in another process."""
    other = multiprocessing.get_context("fork").Process(target=act)
    other.start()
    try:
        yield
    finally:
        other.join(PATIENCE)
        other.kill()
        assert other.exitcode == 0


@contextlib.contextmanager
def at_save(*acts: tuple[int, Callable[[], Any]]) -> Iterator[None]:
    """Runs within: each act happens in the run that saves, just before the first save of its step or a later one."""
    begin, left = store.begin, list(acts)

    def act_and_begin(checkpoints: Path, step: int) -> Path:
        while left and step >= left[0][0]:
            left.pop(0)[1]()
        return begin(checkpoints, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "begin", act_and_begin)
        yield


def wait_for_step(run: Path, step: int) -> None:
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + PATIENCE
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < step:  # every step has a line
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fill(disk: Path) -> None:
    """Fill the disk, as other files would."""
    with (disk / FILLER).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 1024):
            pass


def steps_in(checkpoints: Path) -> list[int]:
    whole = [one.step for one in list_complete(checkpoints)]
    there = [path.name for path in checkpoints.glob("step-*")]
    assert len(whole) == len(there), "something half-written was left behind"
    return whole


@pytest.mark.parametrize(
    ("world_size", "asynchronous"),
    [(1, True), pytest.param(1, False, marks=pytest.mark.slow), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_a_save_to_a_full_disk_is_abandoned_with_a_warning_and_the_next_with_space_is_complete(
    world_size, asynchronous, instructions, small_disk, tmp_path, capfd
):
    config = config_of(instructions, world_size, checkpoint__async=asynchronous)
    reference = train_on(world_size, config, tmp_path / "reference")

    # Full for thirty steps, whose lines need more than one page.
    filler = small_disk / FILLER
    with at_save((4 * SAVE_EVERY, lambda: fill(small_disk)), (10 * SAVE_EVERY, filler.unlink)):
        run = train_on(world_size, config, small_disk)
    said = capfd.readouterr().err
    assert "COULD NOT BE SAVED" in said
    assert "No space left on device" in said
    assert steps_in(run / "checkpoints")[-1] == STEPS
    # Lines that found no space were kept and written later.
    assert [line["step"] for line in lines(run)] == list(range(1, STEPS + 1))
    hold_bitwise(run, reference)


def test_a_run_whose_last_save_failed_does_not_end_with_success(instructions, small_disk, capfd):
    filled = at_save((2 * SAVE_EVERY, lambda: fill(small_disk)))
    with filled, pytest.raises(CannotSave, match=r"No space left on device.* newest checkpoint is"):
        train_on(1, config_of(instructions, train__steps=3 * SAVE_EVERY), small_disk)
    assert SAVE_EVERY in steps_in(small_disk / "run" / "checkpoints")


def test_a_full_disk_makes_the_run_save_in_the_fallback(instructions, small_disk, tmp_path, capfd):
    steps = 4 * SAVE_EVERY
    config = config_of(instructions, train__steps=steps, checkpoint__fallback=str(tmp_path / "elsewhere"))

    def train() -> str:
        return api.train(api.config_from_mapping(config), runs=small_disk).text()

    with at_save((2 * SAVE_EVERY, lambda: fill(small_disk))):
        (summary,) = run_ranks(1, train)
    run = small_disk / "run"
    assert "was saved in" in capfd.readouterr().err
    assert steps_in(run / "checkpoints")[-1] < steps
    spare = tmp_path / "elsewhere" / "run"
    assert steps_in(spare / "checkpoints")[-1] == steps
    # The fallback can be used like any run; the run's own folder would export an older checkpoint.
    assert f"shoal export {spare} --to hf" in summary
    train_on(1, config | {"name": "again"}, tmp_path / "others", start_from=spare)
    assert f"Resuming after step {steps} from {spare}" in " ".join(capfd.readouterr().err.split())
    assert (api.export(spare, tmp_path / "exported") / "model.safetensors").is_file()
    (small_disk / FILLER).unlink()
    config["train"]["steps"] = steps + 2
    train_on(1, config, small_disk, resume=True)
    assert f"Resuming after step {steps} from {spare}" in " ".join(capfd.readouterr().err.split())
    assert steps_in(run / "checkpoints")[-1] == steps + 2


def test_a_new_run_of_the_same_name_does_not_resume_from_another_runs_fallback(
    instructions, small_disk, tmp_path, capfd
):
    fallback = str(tmp_path / "elsewhere")
    config = config_of(instructions, train__steps=4 * SAVE_EVERY, checkpoint__fallback=fallback)

    with at_save((2 * SAVE_EVERY, lambda: fill(small_disk))):
        train_on(1, config, small_disk)
    (small_disk / FILLER).unlink()
    other = {**config, "seed": 7, "train": {**config["train"], "steps": 8}}
    train_on(1, other, small_disk, overwrite=True)
    other["train"]["steps"] = 10
    capfd.readouterr()
    train_on(1, other, small_disk, resume=True)
    assert "Resuming after step 8" in capfd.readouterr().err
    spare = tmp_path / "elsewhere" / "run" / "checkpoints"
    assert steps_in(spare) == []
    assert list(spare.glob("abandoned-*")), "the other run's checkpoints were deleted"


def test_a_disk_that_failed_once_is_used_again(instructions, tmp_path, monkeypatch):
    begin, failed = store.begin, []

    def fail_once(checkpoints: Path, step: int) -> Path:
        if not failed:
            failed.append(step)
            raise OSError(errno.EIO, "not now")
        return begin(checkpoints, step)

    monkeypatch.setattr(store, "begin", fail_once)
    run = train_on(1, config_of(instructions, train__steps=30, checkpoint__every=4, checkpoint__keep=40), tmp_path)
    saved = steps_in(run / "checkpoints")
    # The failed save is repeated within two steps; later ones are on schedule.
    assert [step for step in saved if step > 8] == [12, 16, 20, 24, 28, 30]
    assert 1 <= len([step for step in saved if step < 8]) <= 2


def vanish(run: Path) -> None:
    run.rename(run.with_name("gone"))


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_folder_that_vanished_ends_the_run_with_its_state_in_the_fallback(
    world_size, instructions, tmp_path, capfd
):
    config = config_of(instructions, world_size, checkpoint__fallback=str(tmp_path / "elsewhere"), train__steps=3000)
    config["train"]["schedule"] = {"name": "constant", "warmup": 0}
    run = tmp_path / "runs" / "run"

    def take_it_away() -> None:
        wait_for_step(run, SAVE_EVERY + 5)
        vanish(run)

    with meanwhile(take_it_away), pytest.raises(CannotSave) as raised:
        train_on(world_size, config, tmp_path / "runs")
    said = str(raised.value)
    assert "cannot be written any more" in said
    assert "No such file or directory" in said
    assert not run.exists(), "the run folder was created again"
    spare = tmp_path / "elsewhere" / "run" / "checkpoints"
    last = steps_in(spare)[-1]
    assert f"--from {spare / f'step-{last:08d}'}" in said
    config["train"]["steps"] = last + 2
    again = train_on(world_size, config, tmp_path / "runs", start_from=spare / f"step-{last:08d}")
    assert [line["step"] for line in lines(again)] == [last + 1, last + 2]
    undisturbed = train_on(world_size, config, tmp_path / "undisturbed")
    assert lines(again)[-1]["loss"] == lines(undisturbed)[-1]["loss"]


def test_without_a_fallback_it_is_one_sentence_and_status_1(instructions, tmp_path):
    write_config(tmp_path, config_of(instructions, train__steps=3000))
    run = tmp_path / "runs" / "run"

    def take_it_away() -> None:
        wait_for_step(run, SAVE_EVERY + 5)
        run.rename(tmp_path / "gone")  # at once: a save meanwhile would put files into a folder that is being removed

    with meanwhile(take_it_away):
        ended = forked_shoal(tmp_path, "train", "run.yaml", "--json")
    assert (ended.status, ended.out) == (1, "")
    assert "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith("shoal: runs/run cannot be written any more")


def test_a_read_only_run_folder_ends_the_run_with_a_sentence(instructions, small_disk, tmp_path):
    config = config_of(instructions, train__steps=3000, checkpoint__fallback=str(tmp_path / "elsewhere"))

    def protect() -> None:
        wait_for_step(small_disk / "run", SAVE_EVERY + 5)
        # Mounted over the folder, because open files keep the file system below writable.
        mount_point = small_disk / "run" / "checkpoints"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(mount_point)], check=True)

    with meanwhile(protect), pytest.raises(CannotSave, match="Read-only file system"):
        train_on(1, config, small_disk)
    subprocess.run(["umount", str(small_disk / "run" / "checkpoints")], check=True)
    assert steps_in(tmp_path / "elsewhere" / "run" / "checkpoints")


@pytest.mark.parametrize("arguments", [("--resume",), ("--overwrite",), ("--resume", "train.steps=3")])
def test_a_run_on_a_disk_that_became_read_only_is_not_touched(arguments, instructions, small_disk, tmp_path):
    train_on(1, config_of(instructions, train__steps=2), small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    write_config(tmp_path, config_of(instructions, train__steps=2, run_dir=str(small_disk)))
    ended = forked_shoal(tmp_path, "train", "run.yaml", *arguments)
    assert ended.status == 2
    assert f"{small_disk}/run cannot be written: Read-only file system. Set run_dir" in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err


def test_a_disk_that_is_full_from_the_start_is_a_mistake_said_at_once(instructions, small_disk, tmp_path):
    write_config(tmp_path, config_of(instructions, run_dir=str(small_disk)))
    fill(small_disk)
    for left in (0, 12 * 1024):  # nothing can be written, or the config alone
        os.truncate(small_disk / FILLER, (small_disk / FILLER).stat().st_size - left)
        ended = forked_shoal(tmp_path, "train", "run.yaml")
        assert ended.status == 2, ended.err
        assert "Traceback" not in ended.err
        assert f"{small_disk}/run cannot be written: No space left on device. Set run_dir" in ended.err.splitlines()[-1]


def test_a_folder_that_cannot_be_written_from_the_start_is_a_mistake_said_at_once(instructions, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    write_config(small_disk.parent, config_of(instructions))
    (small_disk.parent / "runs").symlink_to(small_disk)
    ended = forked_shoal(small_disk.parent, "train", "run.yaml")
    assert ended.status == 2
    assert "Traceback" not in ended.err
    assert "Read-only file system" in ended.err.splitlines()[-1]

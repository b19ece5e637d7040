"""`kill -9` of any rank, at any time: the restarted run ends with bitwise the weights of an undisturbed run."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.store import damaged_file, list_complete
from shoal.observe.events import read_events
from tests.harness import reference_run, settings, weights
from tests.launch.command import (
    PATIENCE,
    SHOAL,
    Command,
    ForkedCommand,
    losses,
    rank_process,
    training_lines,
    write_config,
)

pytestmark = pytest.mark.slow
STEPS, SAVE_EVERY, KILLS = 45, 5, 3


def config(data: Path, steps: int) -> dict[str, Any]:
    return settings(
        data,
        train__steps=steps,
        checkpoint__every=SAVE_EVERY,
        parallel__strategy="fsdp",
        hardware__devices=2,
        data__max_length=64,
        data__train_on="all",
    )


def hold_undisturbed(run: Path, undisturbed: Path) -> None:
    """Metrics of every step and the last weights are equal; every checkpoint is complete, and nothing else is there."""
    assert losses(run) == losses(undisturbed)
    found, expected = weights(run), weights(undisturbed)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    whole = list_complete(run / "checkpoints")
    assert [one.path.name for one in whole if damaged_file(one) is not None] == []
    assert {one.path.name for one in whole} == {path.name for path in (run / "checkpoints").glob("*-*")}


def half_written(run: Path) -> bool:
    """Whether a save is in progress."""
    return any(not (folder / "MANIFEST.json").exists() for folder in (run / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_save_costs_a_restart_and_nothing_else(
    rank: int, instructions: Path, tmp_path: Path
) -> None:
    undisturbed = reference_run(config(instructions, STEPS), 2)
    write_config(tmp_path, config(instructions, STEPS))
    run = tmp_path / "runs" / "run"
    with ForkedCommand(tmp_path, ["train", "run.yaml", "--max-restarts", "1", "--json"]) as command:
        command.wait_until(lambda: bool(list_complete(run / "checkpoints")))
        victim = rank_process(command.process.pid, rank)
        deadline = time.perf_counter() + PATIENCE
        while not half_written(run):
            assert time.perf_counter() < deadline, "no save in progress was seen"
        os.kill(victim, signal.SIGKILL)
        ended = command.wait()
    assert ended.status == 0, ended.err
    assert "All processes were restarted (restart 1 of " in ended.err
    hold_undisturbed(run, undisturbed)
    attempts = [json.loads(line)["attempt"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(attempts) == {0, 1}
    again = [step for step, line in training_lines(run).items() if line["attempt"] == 1]
    assert again == list(range(again[0], STEPS + 1))
    assert again[0] > 1, "it restarted from step 1"
    assert again[0] % SAVE_EVERY == 1, "it did not restart from a checkpoint"
    # The end of the first attempt is there if rank 0 lived to write it.
    happened = [one for one in read_events(run) if one["event"] in ("start", "restart")]
    assert [(one["event"], one["attempt"]) for one in happened] == [("start", 0), ("restart", 0), ("start", 1)]
    assert "All processes were restarted (restart 1 of 1)" in happened[1]["text"]
    assert read_events(run)[-1]["error"] is None
    assert [one["command"][:2] for one in happened if one["event"] == "start"] == [["shoal", "train"]] * 2


def test_a_run_begun_from_another_checkpoint_and_killed_before_its_first_save_restarts_there(
    instructions: Path, tmp_path: Path
) -> None:
    first = reference_run(config(instructions, 5), 2)
    settled = config(instructions, 25)
    settled["checkpoint"]["every"] = 1000
    write_config(tmp_path, settled)
    run = tmp_path / "runs" / "run"
    start = ["--from", str(first / "checkpoints" / "step-00000005")]
    with ForkedCommand(tmp_path, ["train", "run.yaml", *start, "--max-restarts", "1", "--json"]) as command:
        command.wait_until(lambda: len(training_lines(run)) > 2)
        os.kill(rank_process(command.process.pid, 1), signal.SIGKILL)
        ended = command.wait()
    assert ended.status == 0, ended.err
    assert sorted(training_lines(run)) == list(range(6, 26))


def test_one_process_can_be_restarted_too(instructions: Path, tmp_path: Path) -> None:
    settled = config(instructions, 30)
    settled["hardware"]["devices"], settled["parallel"]["strategy"] = 1, "single"
    undisturbed = reference_run(settled)
    write_config(tmp_path, settled)
    run = tmp_path / "runs" / "run"
    # The real command: the other runs here are forks.
    with Command(tmp_path, [str(SHOAL), "train", "run.yaml", "--max-restarts", "1", "--json"]) as command:
        command.wait_until(lambda: bool(list_complete(run / "checkpoints")))
        os.kill(rank_process(command.process.pid, 0), signal.SIGKILL)
        ended = command.wait()
    assert ended.status == 0, ended.err
    assert "All processes were restarted (restart 1 of " in ended.err
    hold_undisturbed(run, undisturbed)


def test_a_user_mistake_found_after_a_restart_is_one_sentence_too(instructions: Path, tmp_path: Path) -> None:
    """The data is changed while the run is down, so it cannot be resumed."""
    data = tmp_path / "rows.jsonl"
    data.write_bytes(instructions.read_bytes())
    settled = config(data, 100_000)
    settled["hardware"]["devices"], settled["parallel"]["strategy"] = 1, "single"
    write_config(tmp_path, settled)
    run = tmp_path / "runs" / "run"
    with ForkedCommand(tmp_path, ["train", "run.yaml", "--max-restarts", "3", "--json"]) as command:
        command.wait_until(lambda: bool(list_complete(run / "checkpoints")))
        data.write_bytes(b"".join(data.read_bytes().splitlines(keepends=True)[:200]))
        os.kill(rank_process(command.process.pid, 0), signal.SIGKILL)
        ended = command.wait()
    assert ended.status == 2, ended.err
    assert "the data has changed since the run started" in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err


def test_kills_at_random_moments_change_nothing(instructions: Path, tmp_path: Path) -> None:
    undisturbed = reference_run(config(instructions, STEPS), 2)
    write_config(tmp_path, config(instructions, STEPS))
    run = tmp_path / "runs" / "run"
    chance = random.Random(11)
    with ForkedCommand(tmp_path, ["train", "run.yaml", "--max-restarts", str(KILLS), "--json"]) as command:
        killed: set[int] = set()
        for _ in range(KILLS):
            command.wait_until(lambda: bool(new_rank(command.process.pid, killed)))  # noqa: B023
            # Most of them while it trains, after some more steps; the others while it starts.
            if chance.random() < 0.7:
                logged = lines_of(run) + chance.randint(1, 9)
                command.wait_until(lambda: lines_of(run) >= logged)  # noqa: B023
                time.sleep(chance.uniform(0, 0.1))
            else:
                time.sleep(chance.uniform(0, 0.6))
            if command.process.poll() is not None:
                break
            both = new_rank(command.process.pid, killed)
            victim = chance.choice(both)
            killed |= set(both)
            os.kill(victim, signal.SIGKILL)
        ended = command.wait(120)
    assert ended.status == 0, ended.err
    assert len(killed) == 2 * KILLS, "it finished before it was killed often enough"
    hold_undisturbed(run, undisturbed)
    first: dict[int, int] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        first.setdefault(line["attempt"], line["step"])
    assert any(step > SAVE_EVERY for step in first.values()), "it never continued from a checkpoint"


def lines_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def new_rank(launcher: int, killed: set[int]) -> list[int]:
    """The two running ranks, if both run and neither was killed."""
    try:
        both = [rank_process(launcher, rank) for rank in (0, 1)]
    except (AssertionError, OSError):
        return []
    return [] if killed & set(both) else both

"""Tasks of srun that watch their processes: restarts, a smaller micro-batch and failures as under our own launcher."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.store import list_complete
from shoal.launch import board, nodes
from shoal.train.step import TrainStep
from tests.faults.test_kills import hold_undisturbed
from tests.faults.test_signals import is_dead
from tests.harness import reference_run, settings
from tests.launch.command import Ended, ForkedCommand, descendants, environment, rank_process, write_config
from tests.launch.test_join import srun

pytestmark = pytest.mark.slow


def config(data: Path, **changes: Any) -> dict[str, Any]:
    wanted = {"train__steps": 40, "checkpoint__every": 10, "data__max_length": 64, "data__train_on": "all", **changes}
    return settings(data, parallel__strategy="fsdp", **wanted)


def per_node(rank: int) -> dict[str, str]:
    """Of two nodes with one task each."""
    nodes = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": str(rank)}
    return {**srun(rank), **nodes, "SLURM_LOCALID": "0"}


@contextmanager
def tasks(folder: Path, *arguments: str, kind: Any = srun) -> Iterator[list[ForkedCommand]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                ForkedCommand(folder, ["train", "run.yaml", "--json", *arguments], environment(folder, **kind(rank)))
            )
            for rank in range(2)
        ]


def ends(commands: list[ForkedCommand]) -> list[Ended]:
    return [command.wait(120) for command in commands]


def nothing_left(folder: Path) -> bool:
    return not list((folder / "runs").glob(".run.*"))


def test_a_killed_rank_of_one_task_restarts_all_tasks_and_nothing_is_lost(instructions: Path, tmp_path: Path) -> None:
    undisturbed = reference_run(config(instructions), 2)
    write_config(tmp_path, config(instructions))
    run = tmp_path / "runs" / "run"
    with tasks(tmp_path, "--max-restarts", "1") as commands:
        commands[0].wait_until(lambda: bool(list_complete(run / "checkpoints")))
        os.kill(rank_process(commands[1].process.pid, 1), signal.SIGKILL)
        ended = ends(commands)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert "Rank 1 on " in ended[0].err
    assert "was killed by SIGKILL. All processes were restarted (restart 1 of 1)." in ended[0].err
    assert json.loads(ended[0].out)["step"] == 40
    assert ended[1].out == ""
    hold_undisturbed(run, undisturbed)
    assert nothing_left(tmp_path)


def test_one_task_per_node_starts_the_processes_of_its_devices(instructions: Path, tmp_path: Path) -> None:
    wanted = config(instructions, train__steps=3, train__micro_batch=2)
    write_config(tmp_path, {**wanted, "hardware": {"devices": 2, "nodes": 2}})
    with tasks(tmp_path, kind=per_node) as commands:
        ended = ends(commands)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert "Starting 4 processes in 2 tasks" in ended[0].err
    assert len(list((tmp_path / "runs" / "run" / "checkpoints" / "step-00000003").glob("rank-*"))) == 4
    assert nothing_left(tmp_path)


def test_a_rank_without_memory_shrinks_the_micro_batch_of_all_tasks(
    instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = TrainStep.__call__

    def step(self: TrainStep, batch: Any, lr: float) -> Any:
        if batch.micro_batches[0].inputs.shape[0] > 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return call(self, batch, lr)

    monkeypatch.setattr(TrainStep, "__call__", step)
    write_config(tmp_path, config(instructions, train__steps=3, train__on_oom="shrink"))
    with tasks(tmp_path) as commands:
        ended = ends(commands)
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert "Rank 1 ran out of memory in step 1, with micro-batch 4: " in ended[0].err
    assert "Restarting all processes with train.micro_batch 2 and 2 gradient accumulation steps" in ended[0].err
    assert json.loads((tmp_path / "runs" / "run" / "plan.json").read_text())["chosen"]["micro_batch"] == 2


def test_a_task_that_is_gone_is_named_and_its_ranks_with_it(
    instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, seconds in (
        *((nodes, "LATE", 2.0), (nodes, "GRACE", 1.0)),
        *((board, "LATE", 2.0), (board, "GRACE", 1.0), (board, "SIGN", 0.3), (board, "SILENT", 2.0)),
    ):
        monkeypatch.setattr(module, name, seconds)
    write_config(tmp_path, config(instructions, train__steps=100_000))
    run = tmp_path / "runs" / "run"
    with tasks(tmp_path, "--max-restarts", "3") as commands:
        commands[0].wait_until(lambda: bool(list_complete(run / "checkpoints")))
        ranks = descendants(commands[1].process.pid)
        os.kill(commands[1].process.pid, signal.SIGKILL)
        ended = ends(commands)
    assert ranks
    assert all(map(is_dead, ranks)), "a rank has outlived its task"
    assert ended[0].status == 1
    assert "(rank 1) does not answer: it or its node is gone.\n" in ended[0].err
    assert ended[0].err.splitlines()[-1].startswith("shoal: Task 1 on ")


def test_a_signal_to_one_task_stops_all_with_everything_saved(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, config(instructions, train__steps=100_000))
    run = tmp_path / "runs" / "run"
    with tasks(tmp_path, "--max-restarts", "3") as commands:
        commands[0].wait_until(lambda: bool(list_complete(run / "checkpoints")))
        os.kill(commands[1].process.pid, signal.SIGTERM)
        ended = ends(commands)
    assert [one.status for one in ended] == [75, 75], ended[0].err + ended[1].err
    assert list_complete(run / "checkpoints")[-1].step == json.loads(ended[0].out)["step"]
    assert nothing_left(tmp_path)


def test_a_mistake_found_by_the_first_task_ends_all_of_them(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, config(instructions, train__global_batch=7))
    with tasks(tmp_path, "--max-restarts", "3") as commands:
        ended = ends(commands)
    assert [one.status for one in ended] == [2, 2], ended[0].err + ended[1].err
    assert ended[0].err.splitlines()[-1] == ended[1].err.splitlines()[-1]
    assert "global_batch 7" in ended[1].err

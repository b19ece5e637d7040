"""A task of srun is a rank, whose rank and world size come from Slurm's variables."""

import json
import os
from pathlib import Path

import pytest

from shoal.launch.join import adopt_srun, first_node
from tests.harness import reference_run, settings
from tests.launch.command import ForkedCommand, environment, losses, write_config

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}


def test_a_task_of_srun_gets_the_variables_of_torchrun():
    found = dict(TASK)
    adopt_srun(found)
    assert (found["RANK"], found["WORLD_SIZE"]) == ("5", "8")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "4")
    assert found["MASTER_ADDR"] == "gpu03"
    other = {**TASK, "SLURM_STEP_ID": "1", "SLURM_PROCID": "0"}
    adopt_srun(other)
    assert 15_000 <= int(other["MASTER_PORT"]) < 30_000
    assert other["MASTER_PORT"] != found["MASTER_PORT"]


@pytest.mark.parametrize(
    "given",
    [
        {**TASK, "RANK": "0", "WORLD_SIZE": "2"},  # torchrun, started by srun
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},  # one task, which starts its own processes
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # the batch script itself
    ],
)
def test_other_processes_of_a_job_are_left_alone(given):
    found = dict(given)
    adopt_srun(found)
    assert found == given


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("localhost", "localhost"),
        ("a1,a2", "a1"),
        ("gpu[03-05,07]", "gpu03"),
        ("rack1-n[1,3]-ib,login", "rack1-n1-ib"),
        ("login,gpu[1-2]", "login"),
    ],
)
def test_the_first_node_of_slurms_list(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.slow
def test_tasks_of_srun_train_together(instructions: Path, tmp_path: Path):
    """As srun starts them: the same command in each, other variables."""
    write_config(tmp_path, settings(instructions, train__steps=3))
    alone = reference_run(settings(instructions, name="alone", train__steps=3))
    job = {**TASK, "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    job |= {"SLURM_STEP_NODELIST": "localhost"}
    arguments = ["train", "run.yaml", "--json"]
    tasks = [{**job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    with (
        ForkedCommand(tmp_path, arguments, environment(tmp_path, **tasks[0])) as first,
        ForkedCommand(tmp_path, arguments, environment(tmp_path, **tasks[1])) as second,
    ):
        ended = [first.wait(), second.wait()]
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert json.loads(ended[0].out)["step"] == 3
    together, one = ([loss for _, loss, _ in losses(run)] for run in (tmp_path / "runs" / "run", alone))
    assert together == pytest.approx(one, rel=2e-6)

"""The rank of a process, from the variables of whatever started it. Contradictions are refused with what was seen."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.launch.environment import Placement, adopt, first_node, read_placement
from shoal.mistakes import UserMistake

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu03",
    "MASTER_PORT": "29400",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "gpu03",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "gpu03",
}
INTEL = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "gpu03"}
BY_HAND = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu03"}


def placed(environment: dict[str, str]) -> Placement:
    found = read_placement(environment)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("given", "started_by"),
    [
        (TORCHRUN, "torchrun"),
        (OPEN_MPI, "Open MPI"),
        (MVAPICH, "MVAPICH"),
        (INTEL, "MPICH or Intel MPI"),
        (BY_HAND, "the environment"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_every_launcher_gives_a_process_its_rank(given: dict[str, str], started_by: str) -> None:
    found = placed(given)
    assert (found.started_by, found.rank, found.world_size) == (started_by, 3, 4)
    assert (found.local_rank, found.local_world_size) == (1, 2)
    assert found.master_addr == "gpu03"


def test_a_task_of_srun_gets_the_variables_of_torchrun() -> None:
    found = dict(TASK)
    adopt(found)
    assert (found["RANK"], found["WORLD_SIZE"]) == ("5", "8")
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "4")
    assert found["MASTER_ADDR"] == "gpu03"
    other = {**TASK, "SLURM_STEP_ID": "1", "SLURM_PROCID": "0"}
    adopt(other)
    assert 15_000 <= int(other["MASTER_PORT"]) < 30_000
    assert other["MASTER_PORT"] != found["MASTER_PORT"], "two steps would meet"
    again = dict(found)
    assert adopt(again) == placed(found), "a second look finds the same"
    assert again == found


def test_uneven_nodes_know_their_own_number_of_tasks() -> None:
    uneven = {**TASK, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "3(x2),1"}
    for node, tasks in enumerate((3, 3, 1)):
        local = {"SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
        assert placed({**uneven, **local}).local_world_size == tasks


@pytest.mark.parametrize(
    "given",
    [
        {},
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},  # one task, which starts its own processes
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # the batch script itself
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
    ],
)
def test_a_process_alone_starts_its_own(given: dict[str, str]) -> None:
    found = dict(given)
    assert adopt(found) is None
    assert found == given


@pytest.mark.parametrize("inner", [TORCHRUN, OPEN_MPI, INTEL], ids=["torchrun", "Open MPI", "Intel"])
def test_the_innermost_launcher_counts(inner: dict[str, str]) -> None:
    """mpirun under Slurm, and torchrun, are tasks of srun themselves, and their processes inherit Slurm's variables."""
    outer = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    assert placed({**outer, **inner}).rank == 3


def test_tasks_of_srun_on_one_node_and_one_per_node_are_told_apart() -> None:
    per_node = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    assert placed({**per_node, "SLURM_LOCALID": "0"}).one_per_node
    assert not placed(TASK).one_per_node
    on_one = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}
    alone = placed({**TASK, **on_one})
    assert (alone.local_world_size, alone.several_nodes) == (8, False)


def test_ranks_of_mpi_on_one_node_need_no_address_and_under_slurm_its_list_names_the_first() -> None:
    bare = {key: value for key, value in OPEN_MPI.items() if key != "MASTER_ADDR"}
    assert placed({**bare, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).master_addr == "127.0.0.1"
    assert placed({**bare, "SLURM_JOB_NODELIST": "gpu[07-08]"}).master_addr == "gpu07"


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({"RANK": "1"}, "RANK is '1', but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but nothing gives this process its rank"),
        ({**BY_HAND, "RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4, but ranks count from 0"),
        ({**BY_HAND, "RANK": "one"}, "RANK is 'one', which is not a whole number"),
        ({**BY_HAND, "LOCAL_RANK": "2"}, "Rank 3 of 4 has local rank 2 of 2 processes on its node"),
        ({**BY_HAND, "MASTER_ADDR": "localhost"}, "MASTER_ADDR is localhost, which is this node, but rank 0 of 4"),
        ({**BY_HAND, "MASTER_ADDR": ""}, "the environment started 4 processes, 2 on this node, but MASTER_ADDR is not"),
        ({**TASK, "RANK": "0", "WORLD_SIZE": "8"}, "RANK is 0, but this is task 5 of srun (SLURM_PROCID)"),
        ({**TASK, "RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but srun started 8 tasks (SLURM_STEP_NUM_TASKS)"),
        ({**TASK, "WORLD_SIZE": "16"}, "WORLD_SIZE is 16, but srun started 8 processes"),
        ({**OPEN_MPI, "WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but Open MPI started 4 processes"),
        ({**TASK, "SLURM_PROCID": ""}, "SLURM_PROCID is not set, but other variables of its launcher are"),
        ({**TASK, "MASTER_PORT": "http"}, "MASTER_PORT is 'http', which is not a whole number"),
    ],
)
def test_what_contradicts_is_refused_with_what_was_seen(given: dict[str, str], seen: str) -> None:
    with pytest.raises(UserMistake, match=re.escape(seen)):
        read_placement(given)


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
def test_the_first_node_of_slurms_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_a_mistake_that_all_tasks_of_srun_find_is_said_by_the_first_of_each_node(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {shape: gpt2}\ntrain: {step: 3}\n")
    code = (
        "import os, sys; from shoal.cli import main\n"
        "step = {'SLURM_STEP_NUM_TASKS': '4', 'SLURM_STEP_NUM_NODES': '2', 'SLURM_STEP_TASKS_PER_NODE': '2(x2)'}\n"
        "os.environ.update(step, SLURM_STEP_NODELIST='node[1-2]', SLURM_JOB_ID='7')\n"
        "for task in range(4):\n"
        "    os.environ.update(SLURM_PROCID=str(task), SLURM_LOCALID=str(task % 2), SLURM_NODEID=str(task // 2))\n"
        "    print('task', task, file=sys.stderr)\n"
        "    sys.argv = ['shoal', 'train', 'run.yaml']\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert ended.code == 2\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    says = "shoal: run.yaml:2: train.step is not a key shoal knows. Did you mean steps?"
    assert ended.stderr.splitlines() == ["task 0", says, "task 1", "task 2", says, "task 3"]

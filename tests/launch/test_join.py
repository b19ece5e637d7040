"""The same command as a rank of srun, MPI or RANK set by hand, and what keeps ranks from joining."""

import json
import os
import re
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.launch.environment import read_placement
from shoal.launch.interfaces import GLOO, NCCL, interface_to, means_any
from shoal.launch.join import choose_device
from shoal.launch.rendezvous import Meeting, Member, check_devices
from shoal.mistakes import RunFailed, UserMistake
from tests.harness import reference_run, settings
from tests.launch.command import Ended, ForkedCommand, environment, forked_shoal, losses, write_config


def srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def mpi(rank: int) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (str(rank), "2", str(rank), "2")
    own = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, values, strict=True)}
    return {**own, "PMIX_NAMESPACE": f"prterun-{os.getpid()}"}


def by_hand(rank: int, **more: str) -> dict[str, str]:
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    return {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_tasks(folder: Path, tasks: list[Mapping[str, str]], *arguments: str) -> list[Ended]:
    """The same command once per task, each with its own variables."""
    with ExitStack() as stack:
        commands = [
            stack.enter_context(ForkedCommand(folder, ["train", "run.yaml", *arguments], environment(folder, **task)))
            for task in tasks
        ]
        return [command.wait(120) for command in commands]


@pytest.mark.slow
@pytest.mark.parametrize("started_by", [srun, mpi])
def test_tasks_train_together(started_by: Any, instructions: Path, tmp_path: Path) -> None:
    """As srun and mpirun start them: the same command in each, other variables."""
    write_config(tmp_path, settings(instructions, train__steps=3))
    alone = reference_run(settings(instructions, name="alone", train__steps=3))
    ended = run_tasks(tmp_path, [started_by(0), started_by(1)], "--json")
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert json.loads(ended[0].out)["step"] == 3
    together, one = ([loss for _, loss, _ in losses(run)] for run in (tmp_path / "runs" / "run", alone))
    assert together == pytest.approx(one, rel=2e-6)


def test_a_config_for_other_devices_is_refused(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, settings(instructions, hardware__devices=4))
    task = environment(tmp_path, **srun(1))
    forked_shoal(tmp_path, "train", "run.yaml", env=task).hold_mistake(
        "hardware.devices is 4, but srun started 2 processes on this node; start one per device, or leave "
        "hardware.devices out."
    )


def test_a_rank_that_cannot_reach_rank_0_names_its_address_and_the_seconds(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, settings(instructions))
    port = free_port()
    alone = by_hand(1, MASTER_PORT=str(port), SHOAL_JOIN_TIMEOUT="0.3")
    ended = forked_shoal(tmp_path, "train", "run.yaml", env=environment(tmp_path, **alone))
    assert (ended.status, ended.out) == (2, ""), ended.err
    assert re.fullmatch(
        rf"shoal: Rank 1 on \S+ could not reach rank 0 at 127\.0\.0\.1, port {port}, within 0 s "
        r"\(Connection refused\); check MASTER_ADDR, and that rank 0 runs and no firewall is between them\.\n",
        ended.err,
    )


def meet(rank: int, port: int, attempt: int = 0) -> Meeting:
    place = read_placement(by_hand(rank, MASTER_PORT=str(port)))
    assert place is not None
    return Meeting(place, attempt)


def test_a_port_in_use_is_left_for_another_which_the_others_find() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        first = meet(0, port)
        second = meet(1, port)
        assert first.port == second.port != port
        second.store.set("word", "heard")
        assert first.store.get("word") == b"heard"


def test_ranks_of_another_attempt_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    first = meet(0, port, attempt=0)
    monkeypatch.setenv("SHOAL_JOIN_TIMEOUT", "0.1")
    with pytest.raises(UserMistake, match="another program answers there"):
        meet(1, port, attempt=1)
    del first


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match=r"Waited 0 s, but of 2 ranks only 1 have joined; missing: rank 1\."):
        meet(0, free_port()).gather(Member(0, "here"), patience=0.2)


def test_a_rank_that_fails_first_tells_the_others_why() -> None:
    port = free_port()
    first, second = meet(0, port), meet(1, port)
    second.fail("data.path is gone.")
    with pytest.raises(RunFailed, match=r"Rank 1 failed before all ranks had joined: data\.path is gone\."):
        first.gather(Member(0, "here"), patience=60)


@pytest.mark.parametrize(("visible", "local_rank", "used"), [(1, 0, 0), (1, 3, 0), (4, 3, 3)])
def test_a_task_that_sees_one_gpu_uses_it_whatever_its_local_rank(
    visible: int, local_rank: int, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    assert [choose_device(local_rank)] == chosen == [torch.device("cuda", used)]
    if visible > 1:
        with pytest.raises(UserMistake, match="This is process 5 on this node, which has 4 CUDA devices"):
            choose_device(4)


def test_two_ranks_on_one_gpu_are_refused_also_if_each_sees_only_that_one() -> None:
    members = [
        Member(0, "a", "GPU-1"),
        Member(1, "b", "GPU-1"),
        Member(2, "a", "GPU-2"),
        Member(3, "c"),
        Member(4, "c"),
    ]
    check_devices(members)
    with pytest.raises(UserMistake, match="Ranks 0 and 5 on a both use the GPU GPU-1; start one process per GPU"):
        check_devices([*members, Member(5, "a", "GPU-1")])


@pytest.mark.parametrize(
    "said",
    [
        "[pair.cc:537] Read error [10.0.0.2]:41187: Connection reset by peer. This is typically caused by",
        "[pair.cc:547] Connection closed by peer [10.0.0.2]:41187. This is typically caused by",
    ],
)
def test_a_lost_connection_names_the_rank_at_its_other_end(said: str) -> None:
    meeting = meet(0, free_port())
    meeting.members = [Member(0, "a", address="10.0.0.1"), Member(1, "b", address="10.0.0.2")]
    lost = meeting.explain_loss(RuntimeError(said))
    assert lost is not None
    assert str(lost).startswith("Rank 1 on b is gone: rank 0 on ")
    assert meeting.explain_loss(RuntimeError("shape [2]:3 is wrong")) is None


def test_the_interface_to_this_node_itself_is_not_loopback() -> None:
    assert interface_to("127.0.0.1") in [None, *(name for _, name in socket.if_nameindex() if name != "lo")]


@pytest.mark.parametrize("value", ["nope", "lo,nope"])
def test_an_interface_that_does_not_exist_is_said_before_ranks_are_started(
    value: str, text: Path, tmp_path: Path
) -> None:
    write_config(tmp_path, settings(text, hardware__devices=2))
    ended = forked_shoal(tmp_path, "train", "run.yaml", env=environment(tmp_path, **{GLOO: value}))
    names = ", ".join(name for _, name in socket.if_nameindex())
    said = f"shoal: {GLOO} is {value}, but the network interfaces of {socket.gethostname()} are {names}; unset {GLOO}"
    assert ended.status == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_task_whose_node_lacks_the_interface_says_so_before_the_rendezvous(
    rank: int, text: Path, tmp_path: Path
) -> None:
    write_config(tmp_path, settings(text))
    tasks = [{**by_hand(0)}, {}]
    tasks[1] = {**tasks[0], "RANK": "1", "LOCAL_RANK": "1"}
    tasks[rank] = {**tasks[rank], GLOO: "nope"}
    ended = run_tasks(tmp_path, tasks)
    assert ended[rank].status == 2
    assert f"{GLOO} is nope, but the network interfaces of " in ended[rank].err
    assert ended[1 - rank].status != 0
    # Rank 0 may be gone, with the rendezvous, before the other one has read why.
    said = f"Rank {rank} failed before all ranks had joined", f"the output of rank {rank} says why"
    assert any(sentence in ended[1 - rank].err for sentence in said)


def test_the_lists_of_interfaces_are_read_as_gloo_and_nccl_read_them() -> None:
    here = ["lo", "eth0", "eth1"]
    assert all(means_any(NCCL, value, here) for value in ("eth", "=eth0", "^lo", "^=lo,eth0", "ib,eth1", "eth0:1"))
    assert not any(means_any(NCCL, value, here) for value in ("ib", "=eth", "^lo,eth", "^=lo,eth0,eth1"))
    assert means_any(GLOO, "eth0,lo", here)
    assert not any(means_any(GLOO, value, here) for value in ("eth", "^lo", "eth0,ib0"))

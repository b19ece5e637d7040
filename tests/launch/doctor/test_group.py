"""`shoal doctor` with several processes, and with two nodes: ranks with names of two nodes, clocks and mounts of their
own."""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import shoal.bench.doctor as group
import shoal.bench.doctor_launch as launch
from shoal import api
from shoal.launch.doctor.finding import Diagnosis, Finding
from tests.harness import run_ranks
from tests.launch.command import Ended, forked_shoal
from tests.launch.doctor.test_node import by_name

NEW_MOUNTS, PRIVATE = 0x20000, 1 << 18 | 1 << 14


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two processes whose config says that they are connected by a link of 5,000 GB/s."""
    folder = tmp_path_factory.mktemp("group")
    config = {
        "name": "run",
        "model": {"shape": "gpt2"},
        "data": {"path": "x.txt"},
        "hardware": {"devices": 2, "link": {"gb_per_second": 5000, "latency_us": 5}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return forked_shoal(folder, "doctor", "run.yaml", "--json")


def test_a_link_at_a_tenth_of_what_the_plan_expects_is_a_failure(examined: Ended) -> None:
    assert examined.status == 3
    found = by_name(examined.out)
    assert found["ranks"].found == "2 joined, on 1 node"
    assert found["same versions"].status == "ok"
    assert found["all-reduce"].status == "failure"
    assert " at 16 MiB, 0% of what the plan expects of as given; " in found["all-reduce"].found
    assert "set hardware.link" in found["all-reduce"].remedy
    assert "a checkpoint has 1.5 GB" in found["run directory"].found


def test_progress_of_a_group_is_on_standard_error(examined: Ended) -> None:
    begun, started, *sizes = examined.err.splitlines()
    assert (begun, started) == ("Importing torch …", "Starting 2 processes …")
    assert [line.split()[0] for line in sizes] == ["all-reduce"] * 7


def examine_two_nodes(folder: Path, act: Callable[[], None]) -> list[dict[str, Finding]]:
    """`act` is called on the second node. Nodes are not examined one by one here."""

    def be_rank() -> dict[str, Finding]:
        node, local = divmod(int(os.environ["RANK"]), 2)
        os.environ.update(SLURMD_NODENAME="ab"[node], LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="2", MASTER_ADDR="a")
        if node == 1:
            act()
        return by_name(api.doctor(runs=folder))

    return run_ranks(4, be_rank)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Diagnosis((Finding("warning", "none of these", "wait", "GPUs"),))
    monkeypatch.setattr(launch, "examine_node", lambda *_, **__: slow)
    monkeypatch.setattr(group, "LARGEST_ON_CPU", 2**16)
    monkeypatch.setattr(group, "SEEN_WITHIN", 0.1)


@pytest.mark.usefixtures("quick")
def test_clocks_and_versions_of_two_nodes_are_compared(tmp_path: Path) -> None:
    def differ() -> None:
        now, installed = time.time, group.versions()
        group.time.time = lambda: now() + 42
        group.versions = lambda: {**installed, "torch": "2.11.0"}

    first, *others = examine_two_nodes(tmp_path, differ)
    assert all(one["ranks"] == first["ranks"] for one in others)
    assert first["ranks"].found == "4 joined, on 2 nodes"
    assert first["clock skew"].status == "failure"
    assert first["clock skew"].found == "b is 42.0 s ahead of a"
    assert first["same versions"].status == "failure"
    assert first["same versions"].found.endswith(" on a, but 2.11.0 on b")
    assert first["shared folder"].found == f"{tmp_path} is the same on all nodes"
    assert first["within nodes"].found.split()[0] in ("a:", "b:")
    assert first["all-reduce"].status == "ok"
    assert first["GPUs"].found == "b: none of these"  # of the other node, only what is not ok


@pytest.mark.usefixtures("quick")
def test_a_run_directory_that_is_not_shared_is_a_failure(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")

    def mount_another() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(NEW_MOUNTS) == 0
        assert libc.mount(b"none", b"/", None, PRIVATE, None) == 0
        assert libc.mount(b"tmpfs", str(tmp_path).encode(), b"tmpfs", 0, None) == 0

    found = examine_two_nodes(tmp_path, mount_another)[0]
    assert found["shared folder"].status == "failure"
    assert found["shared folder"].found == f"b does not see {tmp_path} of a"
    assert found["clock skew"].status == "ok"


@pytest.mark.usefixtures("quick")
def test_ranks_that_do_not_meet_are_a_failure_that_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MEET_WITHIN", 0.3)

    def be_rank() -> Finding:
        del os.environ["SHOAL_LAUNCH"]
        os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
        return api.doctor().findings[-1]

    found = run_ranks(1, be_rank)[0]
    assert (found.check, found.status) == ("first rank", "failure")
    assert found.found == "127.0.0.1:9 cannot be reached: nothing listens there (0 s)"


def test_a_wrong_sum_is_a_failure() -> None:
    report = {"device": "cpu", "backend": "gloo", "torch": "2", "cores": 1, "ranks": 2, "nodes": 1, "dtype": "fp32"}
    measured = group.Measured(**report, timings=[], faults=["all-reduce of 4 KiB gave a wrong result on rank 1"])
    machine = group.machine_at_hand(None, None, 2)
    found = group.judge(measured, machine, guessed=True)
    assert found.status == "failure"
    assert found.found == "the results are wrong: all-reduce of 4 KiB gave a wrong result on rank 1"

"""`shoal doctor` on one node: real limits, mounts, interfaces and ports, and what a driver reports."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.launch.doctor import disk, host, network, probe
from shoal.launch.doctor.checks import CHECKS
from shoal.launch.doctor.finding import Diagnosis, Finding
from shoal.launch.doctor.setting import Setting
from shoal.mistakes import UserMistake
from tests.harness import run_ranks
from tests.launch.command import Ended, environment, forked_shoal

# As nvidia-smi of driver 580 prints them for two H200, of which one has lost pages of memory.
TWO_GPUS = """\
0, GPU-11111111-0000-0000-0000-000000000000, NVIDIA H200, 143771, 4, 580.95.05, 0, 16, 16
1, GPU-22222222-0000-0000-0000-000000000000, NVIDIA H200, 143771, {used}, 580.95.05, {errors}, {lanes}, 16
"""
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \t{link}\tPIX\t0-47\t0\t\tN/A\nGPU1\t{link}\t X \tSYS\t48-95\t1\t\tN/A\nNIC0\tPIX\tSYS\t X\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
)


def by_name(found: Diagnosis | str) -> dict[str, Finding]:
    findings = found.findings if isinstance(found, Diagnosis) else map(Finding.from_dict, json.loads(found)["findings"])
    return {one.check: one for one in findings}


def in_fork(act: Callable[[], Any]) -> Any:
    return run_ranks(1, act)[0]


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return forked_shoal(tmp_path_factory.mktemp("doctor"), "doctor", "--json")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Write the program nvidia-smi."""

    def write(*, used: int = 4, errors: str = "0", lanes: int = 16, link: str = "NV18", reasons: str = "0x0") -> None:
        listed = TWO_GPUS.format(used=used, errors=errors, lanes=lanes)
        (tmp_path / "gpus").write_text(listed)
        (tmp_path / "topo").write_text(TOPOLOGY.format(link=link))
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncase "$1" in\ntopo) cat {tmp_path}/topo ;;\n*reasons*) echo "0, 0x0"; echo "1, {reasons}" ;;\n'
            f"*) cat {tmp_path}/gpus ;;\nesac\n"
        )
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return write


def test_a_plain_examination_runs_every_check_and_prints_one_json_object(examined: Ended) -> None:
    found = json.loads(examined.out)
    assert [one["check"] for one in found["findings"]] == [check.name for check in CHECKS]
    assert found["healthy"] == (found["failures"] == 0) == (examined.status == 0)
    assert examined.err == "Importing torch …\n"
    assert all(one["remedy"] for one in found["findings"] if one["status"] != "ok")


def test_the_versions_are_those_that_python_imports(examined: Ended) -> None:
    import torch
    import transformers

    found = by_name(examined.out)
    assert f"torch {torch.__version__}," in found["libraries"].found
    assert f"transformers {transformers.__version__}," in found["libraries"].found
    assert found["torch"].found.startswith(f"torch {torch.__version__}, built for ")
    assert "Gloo" in found["NCCL"].found or found["NCCL"].found[0].isdigit()


def test_text_has_a_line_per_check_with_remedies_and_a_failure_is_status_3(tmp_path: Path) -> None:
    ended = forked_shoal(tmp_path, "doctor", "--runs", "/proc/here", env=environment(tmp_path))
    assert ended.status == 3
    lines = ended.out.splitlines()
    index = next(index for index, line in enumerate(lines) if line.startswith("failure  run directory"))
    assert "/proc/here cannot be written: " in lines[index]
    assert lines[index + 1].startswith("         → use another folder")
    assert lines[-1].startswith(f"{len(CHECKS)} checks: 1 failure")


def test_low_limits_are_found_with_the_command_that_raises_them() -> None:
    def examine() -> tuple[Finding, Finding]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        few = host.check_open_files(Setting(Path("runs")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
        return few, host.check_open_files(Setting(Path("runs")))

    failed, warned = in_fork(examine)
    assert (failed.status, failed.found) == ("failure", "ulimit -n 200 (hard 300)")
    assert failed.remedy.startswith("ulimit -n 300, before shoal train; 1028 needs a higher hard limit")
    assert warned.status == "warning"


def test_a_full_shared_memory_and_a_node_without_loopback_are_found(tmp_path: Path) -> None:
    """In namespaces of their own: a /dev/shm of 1 MiB, and a loopback interface that is down."""
    program = (
        "import json; from pathlib import Path; from shoal.launch.doctor.checks import examine_node; "
        "from shoal.launch.doctor.setting import Setting; "
        "print(json.dumps(examine_node(Setting(Path('runs'), processes=2), with_torch=False).as_dict()))"
    )
    shell = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    ended = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", shell, sys.executable, program],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    if "not permitted" in ended.stderr:
        pytest.skip("needs root to make namespaces")
    assert ended.returncode == 0, ended.stderr
    found = by_name(ended.stdout)
    assert (found["/dev/shm"].status, found["/dev/shm"].found) == ("failure", "1 MiB free of 1 MiB")
    assert "--shm-size" in found["/dev/shm"].remedy
    assert found["network"].status == found["ports"].status == "failure"
    assert "ip link set lo up" in found["network"].remedy
    assert found["ports"].found.startswith("this node cannot reach itself at 127.0.0.1")


def test_a_port_is_reached_if_and_only_if_something_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert network.reach(address).found.startswith(f"{address} answers in ")
    closed = network.reach(address, seconds=0.3)
    assert closed.status == "failure"
    assert closed.found.startswith(f"{address} cannot be reached: nothing listens there (0 s)")
    unknown = network.reach("no.such.host.invalid:80")
    assert (unknown.status, unknown.found) == ("failure", "no.such.host.invalid has no address")


def test_an_address_without_a_port_is_a_mistake() -> None:
    with pytest.raises(UserMistake, match="--reach node01: give an address as HOST:PORT"):
        api.doctor(reach=["node01"])


@pytest.mark.parametrize("value", ["nosuch0", "=l", "^lo,e"])
def test_a_variable_that_names_no_interface_is_a_failure(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [network.Interface("lo", "127.0.0.1", True, None), network.Interface("eth0", "10.0.0.1", False, 100.0)]
    monkeypatch.setattr(network, "interfaces", lambda: here)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    found = network.check_interface(Setting(Path("runs")))
    assert found.status == "failure"
    assert found.found == f"NCCL_SOCKET_IFNAME is {value}, but the interfaces that are up are lo, eth0"
    for valid in ("eth", "=eth0", "^lo"):
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", valid)
        assert network.check_interface(Setting(Path("runs"))).status == "ok"


def test_a_node_whose_own_name_is_loopback_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [network.Interface("lo", "127.0.0.1", True, None), network.Interface("eth0", "10.0.0.1", False, 100.0)]
    monkeypatch.setattr(network, "interfaces", lambda: here)
    monkeypatch.setattr(network, "resolve", lambda host: "127.0.1.1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = network.check_interface(Setting(Path("runs")))
    assert found.status == "warning"
    assert found.remedy == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0 on every node"


def test_a_slow_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(disk, "BLOCK", 2**18)
    monkeypatch.setattr(disk, "SECONDS", 0.1)
    monkeypatch.setattr(disk, "flush", lambda descriptor: time.sleep(0.1))
    found = disk.check_disk_speed(Setting(tmp_path / "run"))
    assert found.status == "failure"
    assert found.found in ("2 MB/s written and flushed", "3 MB/s written and flushed")
    assert not list(tmp_path.iterdir())


def test_a_run_directory_needs_room_for_the_checkpoints_of_its_config(tmp_path: Path) -> None:
    config = api.config_from_mapping(
        {"name": "big", "model": {"shape": "llama3.1-405b"}, "data": {"path": "x.txt"}, "run_dir": str(tmp_path)}
    )
    found = disk.check_run_folder(Setting(tmp_path / "big", config))
    assert found.status == "failure"
    assert "a checkpoint has 4.9e+03 GB, up to 6 at a time" in found.found


@pytest.mark.parametrize(
    ("state", "check", "status", "said"),
    [
        ({}, "GPUs", "ok", "2 × NVIDIA H200, 140 GiB each"),
        ({"errors": "3"}, "GPUs", "failure", "GPU 1 has 3 uncorrected memory errors"),
        ({"errors": "[N/A]", "used": 60_000}, "GPUs", "warning", "58.6 GiB of GPU 1 are in use by others"),
        ({"lanes": 4}, "GPUs", "warning", "GPU 1 uses 4 of 16 PCIe lanes"),
        ({"reasons": "0x0000000000000044"}, "GPUs", "warning", "reduced by temperature (hardware)"),
        ({"reasons": "0x0000000000000004"}, "GPUs", "ok", "2 × NVIDIA H200"),
        ({}, "topology", "ok", "NV18 (1 pairs)"),
        ({"link": "SYS"}, "topology", "warning", "the plan assumes nvlink4 for h200, but GPU 0 and 1 have SYS"),
    ],
)
def test_the_health_and_links_of_gpus_are_judged(
    state: dict[str, Any], check: str, status: str, said: str, smi: Callable[..., None], tmp_path: Path
) -> None:
    smi(**state)
    run = {one.name: one.run for one in CHECKS}[check]
    found = run(Setting(tmp_path))
    assert (found.status, said in found.found) == (status, True), found


def test_only_visible_gpus_are_examined(
    smi: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(errors="3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = {one.name: one.run for one in CHECKS}["GPUs"](Setting(tmp_path))
    assert (found.status, found.found) == ("ok", "1 × NVIDIA H200, 140 GiB each")


def test_a_torch_that_does_not_see_the_gpus_is_a_failure(smi: Callable[..., None], tmp_path: Path) -> None:
    smi()
    found = by_name(forked_shoal(tmp_path, "doctor", "--json", env=environment(tmp_path)).out)
    assert found["torch"].status == "failure"
    assert found["torch"].found.endswith(", built for the CPU, but there are 2 GPUs")


def test_a_driver_that_does_not_answer_is_a_failure_with_its_words(tmp_path: Path, monkeypatch: Any) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    setting = Setting(tmp_path)
    found = {one.name: one.run for one in CHECKS}["driver"](setting)
    assert found.status == "failure"
    assert found.found == "nvidia-smi fails: Failed to initialize NVML: Driver/library version mismatch"
    assert found.remedy.startswith("restart the node")


@pytest.mark.parametrize(
    ("report", "check", "status"),
    [
        ({"peers": ((True, False), (False, True))}, "peer-to-peer", "failure"),
        ({"peers": ((True, True), (True, True))}, "peer-to-peer", "ok"),
        ({"names": ("NVIDIA H200",) * 2, "tflops": (750.0, 740.0)}, "matmul", "ok"),
        ({"names": ("NVIDIA H200",) * 2, "tflops": (750.0, 350.0)}, "matmul", "warning"),
        ({"names": ("NVIDIA H200",) * 2, "tflops": (750.0, 75.0)}, "matmul", "failure"),
        ({"cuda": "13.0", "nccl": "2.28.9"}, "driver", "ok"),
        ({"cuda": "99.0"}, "driver", "ok"),
    ],
)
def test_what_torch_finds_is_judged(
    report: dict[str, Any], check: str, status: str, smi: Callable[..., None], tmp_path: Path
) -> None:
    smi()
    setting = Setting(tmp_path)
    vars(setting)["torch"] = probe.TorchReport(version="2.13.0", **report)
    found = {one.name: one.run for one in CHECKS}[check](setting)
    assert found.status == status, found


def test_a_probe_that_crashes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.sys, "executable", "/bin/false")
    assert probe.ask_torch().error == "the process that imports torch ended with status 1: -"


def test_a_config_for_gpus_fails_on_a_node_without(tmp_path: Path) -> None:
    config = api.config_from_mapping(
        {"model": {"shape": "gpt2"}, "data": {"path": "x.txt"}, "hardware": {"gpu": "h200", "devices": 8}}
    )
    found = {one.name: one.run for one in CHECKS}["GPUs"](Setting(tmp_path, config))
    assert (found.status, found.found) == ("failure", "the config is for h200, and this node has no GPU")

"""`shoal bench collectives` on two processes of this machine, and on ranks that another launcher has started."""

import contextlib
import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.bench.collectives_measure as measuring
from shoal import api
from shoal.cli import main
from shoal.mistakes import UserMistake
from shoal.plan.speed.ring import OPERATIONS
from tests.harness import run_ranks
from tests.launch.command import SHOAL, Command, Ended, descendants, environment, forked_shoal

QUICK: dict[str, Any] = {"repeat": 3, "seconds": 0.05}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Path]:
    """The command, run once for several tests."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--largest", "256KiB", "--repeat", "3", "--seconds", "0.05", "--output", "found/here", "--json"]
    return forked_shoal(folder, "bench", "collectives", *options), folder / "found" / "here"


def test_the_command_starts_two_processes_and_prints_one_json_object(measured: tuple[Ended, Path]) -> None:
    ended, _ = measured
    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    assert found.keys() == {
        "bench", "date", "machine", "config", "rows", "caveats", "correct", "faults", "link", "operations"
    }  # fmt: skip
    assert found["machine"] == {
        "device": "cpu", "backend": "gloo", "torch": torch.__version__, "cores": found["machine"]["cores"]
    }  # fmt: skip
    assert (found["bench"], found["config"]) == ("collectives", {"ranks": 2, "nodes": 1, "dtype": "fp32"})
    assert (found["correct"], found["faults"]) == (True, [])
    assert found["operations"].keys() == set(OPERATIONS)


def test_every_figure_of_a_report_follows_from_the_sizes_and_times(measured: tuple[Ended, Path]) -> None:
    found = json.loads(measured[0].out)
    speeds = []
    for name, operation in found["operations"].items():
        assert operation["ring_factor"] == (1.0 if name == "all-reduce" else 0.5)
        rows = [one for one in found["rows"] if one["operation"] == name]
        assert [one["bytes"] for one in rows] == [4096, 16384, 65536, 262144]
        for one in rows:
            assert 0 < one["seconds_low"] <= one["seconds"] <= one["seconds_high"]
            assert one["samples"] == 3
            assert one["algorithm_bandwidth"] == pytest.approx(one["bytes"] / one["seconds"])
            assert one["bus_bandwidth"] == pytest.approx(operation["ring_factor"] * one["algorithm_bandwidth"])
            assert one["share"] == pytest.approx(one["formula_seconds"] / one["seconds"])
            speeds.append(one["bus_bandwidth"])
    assert found["link"] == {"name": "measured", "bytes_per_second": max(speeds)}


def test_progress_is_on_standard_error_and_libraries_print_nothing(measured: tuple[Ended, Path]) -> None:
    begun, *steps = measured[0].err.splitlines()
    assert begun == "Starting 2 processes …"
    assert [step.split("  ")[0].strip() for step in steps] == list(OPERATIONS) * 4


def test_output_has_the_same_json_and_a_plot(measured: tuple[Ended, Path]) -> None:
    ended, folder = measured
    assert sorted(path.name for path in folder.iterdir()) == ["collectives.json", "collectives.png"]
    assert json.loads((folder / "collectives.json").read_text()) == json.loads(ended.out)
    assert (folder / "collectives.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
def test_a_command_that_is_stopped_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    with Command(tmp_path, [str(SHOAL), "bench", "collectives", "--json"], environment(tmp_path)) as command:
        command.wait_until(lambda: "KiB" in command.read(1))
        started = descendants(command.process.pid)
        command.process.send_signal(signal.SIGTERM)
        ended = command.wait()
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.endswith("shoal: Interrupted before all measurements were done.\n")
    assert not [process for process in started if (Path("/proc") / str(process)).exists()]


def test_ranks_of_another_launcher_form_a_group_and_agree_on_the_report() -> None:
    one, two, three = run_ranks(
        3, lambda: api.bench_collectives(largest="16KiB", dtype="bf16", link="loopback", **QUICK).as_dict()
    )
    assert one == two == three
    assert (one["config"], one["correct"]) == ({"ranks": 3, "nodes": 1, "dtype": "bf16"}, True)
    reduced = one["operations"]["all-reduce"]
    assert reduced["ring_factor"] == pytest.approx(4 / 3)
    sizes = [row["bytes"] for row in one["rows"] if row["operation"] == "all-reduce"]
    assert sizes == [4080, 16368]  # divisible by three ranks and by 16 bytes
    assert one["link"] == {"name": "loopback", "bytes_per_second": 2e9}


def _command(*arguments: str) -> tuple[int, str, str]:
    """Run `shoal bench collectives` in this process, which is a rank."""
    sys.argv = ["shoal", "bench", "collectives", "--largest", "4KiB", "--repeat", "3", *arguments]
    status: Any = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as end:
            status = end.code
    return status or 0, out.getvalue(), err.getvalue()


def test_only_rank_0_prints(tmp_path: Path) -> None:
    first, second = run_ranks(2, lambda: _command("--devices", "4", "--output", str(tmp_path)))
    assert (first[0], second[0]) == (0, 0)
    assert first[1].startswith("2 × cpu (gloo, fp32, ")
    assert "warning: --devices has no effect: the processes are already running." in first[2]
    assert second[1:] == ("", "")
    assert (tmp_path / "collectives.json").is_file()


def test_a_wrong_result_is_status_3_and_names_the_operation_and_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    right = measuring.reduce_scatter

    def wrong(part: torch.Tensor, whole: torch.Tensor) -> None:
        right(part, whole)
        if torch.distributed.get_rank() == 1:
            part[3] += 1

    monkeypatch.setattr(measuring, "reduce_scatter", wrong)
    first, second = run_ranks(2, lambda: _command("--json"))
    assert (first[0], second[0]) == (3, 3)
    assert "shoal: The results are wrong: reduce-scatter of 4 KiB gave a wrong result on rank 1." in first[2]
    found = json.loads(first[1])
    assert not found["correct"]
    assert [one["operation"] for one in found["rows"]].count("all-reduce") == 1  # correct results are still reported
    assert found["operations"]["reduce-scatter"] == {"ring_factor": 0.5, "fit": None}
    assert "reduce-scatter" not in [one["operation"] for one in found["rows"]]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_swapped_chunks_are_detected(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(call: Any) -> Any:
        def act(result: torch.Tensor, *given: torch.Tensor, **options: Any) -> None:
            call(result, *given, **options)
            if result.numel() in (512, 1024):  # not the collectives by which ranks agree
                result.copy_(torch.cat(tuple(reversed(result.chunk(2)))))

        return act

    name = {"all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}.get(operation)
    if name is not None:
        monkeypatch.setattr(measuring, name, swapped(getattr(measuring, name)))
    else:
        monkeypatch.setattr(torch.distributed, "all_reduce", swapped(torch.distributed.all_reduce))
    faults = run_ranks(2, lambda: api.bench_collectives(largest=4096, **QUICK).measured.faults)
    assert faults == [[f"{operation} of 4 KiB gave a wrong result on rank 0, 1"]] * 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--largest", "64Q"],
            "--largest '64Q' is not a size; give bytes, or a number with a unit such as 64MiB.",
        ),
        (["--largest", "1KiB"], "--largest is 1 KiB, but must be at least 4 KiB."),
        (["--repeat", "0"], "--repeat is 0, but must be at least 1."),
        (["--seconds", "0"], "--seconds is 0, but must be more than 0."),
        (["--devices", "1"], "Collectives need at least two processes; use --devices 2."),
        (["--devices", "-2"], "--devices is -2, but must be at least 2."),
        (["--output", "file"], "--output file: the folder cannot be created: File exists."),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    forked_shoal(tmp_path, "bench", "collectives", *arguments).hold_mistake(sentence)


def test_an_unknown_link_names_the_nearest(tmp_path: Path) -> None:
    ended = forked_shoal(tmp_path, "bench", "collectives", "--link", "nvlnk4")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("shoal: No link is called 'nvlnk4'. Did you mean nvlink4")


def test_sizes_that_do_not_fit_into_memory_are_a_mistake_before_anything_starts(tmp_path: Path) -> None:
    ended = forked_shoal(tmp_path, "bench", "collectives", "--largest", "900TiB")
    assert (ended.status, ended.out) == (2, "")
    assert "--largest is 900 TiB, which needs 3600 TiB per process, but this node has " in ended.err


def test_too_many_processes_for_the_cores_are_a_mistake(tmp_path: Path) -> None:
    ended = forked_shoal(tmp_path, "bench", "collectives", "--devices", "5000")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("shoal: --devices is 5000, but this machine has no CUDA device and ")


def test_a_single_rank_is_a_mistake_that_asks_for_more(tmp_path: Path) -> None:
    alone = environment(tmp_path, RANK="0", WORLD_SIZE="1")
    forked_shoal(tmp_path, "bench", "collectives", env=alone).hold_mistake(
        "Collectives need at least two processes; start two or more."
    )


def test_devices_are_compared_with_the_gpus_that_are_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UserMistake, match=r"^--devices is 8, but this machine has 4 CUDA devices\.$"):
        api.bench_collectives(devices=8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserMistake, match="this node has one CUDA device; for two processes on the CPU"):
        api.bench_collectives()

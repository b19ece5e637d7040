"""`shoal train` as a user and other programs see it: its output, its files, and the failures it survives.

The disturbed runs train the same model on the same sequences, so that one undisturbed run is the reference for them:
for two processes (bitwise, since each has one micro-batch), for runs stopped by signals, for runs with killed ranks.
"""

import json
import math
import os
import re
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.store import damaged_file, read_manifest
from shoal.launch.run import how_to_resume
from shoal.train.step import TrainStep
from tests.harness import reference_run, settings, weights
from tests.launch.command import (
    SHOAL,
    Command,
    Ended,
    ForkedCommand,
    ForkedTorchrun,
    descendants,
    environment,
    forked_shoal,
    losses,
    rank_process,
    shoal,
    training_lines,
    write_config,
)

STEPS, SAVE_EVERY = 45, 15
FEW = 20  # steps of the run that nothing disturbs
TRAINING_KEYS = {
    "step", "attempt", "loss", "grad_norm", "lr", "tokens", "loss_tokens", "tokens_per_second", "mfu", "memory_gib",
    "reserved_gib", "data_seconds", "seconds", "skipped", "time", "save_seconds", "communication_seconds",
}  # fmt: skip
SUMMARY_KEYS = {
    "adapter",
    "run", "step", "steps", "tokens", "loss_tokens", "loss", "eval_loss", "skipped", "seconds", "save_seconds",
    "checkpoint", "stopped",
}  # fmt: skip


def config(data: Path, **changes: Any) -> dict[str, Any]:
    return settings(data, **{"train__steps": STEPS, "checkpoint__every": SAVE_EVERY, **changes})


@pytest.fixture
def folder(instructions: Path, tmp_path: Path) -> Path:
    """A folder with the config that every run here trains."""
    write_config(tmp_path, config(instructions))
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """An undisturbed run, started as a user starts it, in a folder of its own."""
    folder_of_run = tmp_path_factory.mktemp("undisturbed")
    write_config(folder_of_run, config(instructions, train__steps=FEW))
    ended = shoal(folder_of_run, "train", "run.yaml", "train.lr=3e-3", "--json")
    assert ended.status == 0, ended.err
    return folder_of_run, ended


@pytest.fixture(scope="module")
def expected(instructions: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every step of an undisturbed run of the config that the others train."""
    found = losses(reference_run(config(instructions)))
    assert [step for step, _, _ in found] == list(range(1, STEPS + 1))
    assert found[-1][1] < 0.7 * found[0][1]
    return found


def hold_whole(run: Path) -> int:
    """`latest` names a whole checkpoint, undamaged and the newest there is; returns its step."""
    name = (run / "checkpoints" / "latest").read_text().strip()
    checkpoint = read_manifest(run / "checkpoints" / name)
    assert checkpoint is not None
    assert damaged_file(checkpoint) is None
    assert name == f"step-{checkpoint.step:08d}" == max(path.name for path in (run / "checkpoints").glob("step-*"))
    return checkpoint.step


def test_train_json_prints_one_object_with_how_it_ended(undisturbed: tuple[Path, Ended]) -> None:
    folder_of_run, ended = undisturbed
    summary = json.loads(ended.out)
    assert summary.keys() == SUMMARY_KEYS
    last = training_lines(folder_of_run / "runs" / "run")[FEW]
    assert summary["run"] == "runs/run"
    assert (summary["step"], summary["steps"], summary["stopped"], summary["skipped"]) == (FEW, FEW, None, 0)
    assert (summary["loss"], summary["tokens"], summary["eval_loss"]) == (last["loss"], last["tokens"], None)
    assert summary["checkpoint"] == f"runs/run/checkpoints/step-{FEW:08d}"
    assert 0 < summary["seconds"] < ended.wall


def test_the_run_folder_holds_what_other_programs_rely_on(undisturbed: tuple[Path, Ended]) -> None:
    run = undisturbed[0] / "runs" / "run"
    assert {path.name for path in run.iterdir()} >= {"config.yaml", "plan.json", "metrics.jsonl", "checkpoints", "logs"}
    assert hold_whole(run) == FEW
    chosen = json.loads((run / "plan.json").read_text())["chosen"]
    assert (chosen["strategy"], chosen["world_size"]) == ("single", 1)
    assert (chosen["micro_batch"], chosen["grad_accum_steps"], chosen["global_batch"]) == (4, 2, 8)
    assert not list(undisturbed[0].rglob("*.tmp"))


def test_a_line_of_the_metrics_has_the_documented_keys_and_no_others(undisturbed: tuple[Path, Ended]) -> None:
    lines = training_lines(undisturbed[0] / "runs" / "run")
    assert {frozenset(line) for line in lines.values()} == {frozenset(TRAINING_KEYS)}
    tokens = [line["tokens"] for line in lines.values()]
    assert tokens == sorted(set(tokens))
    assert all(0 < line["loss_tokens"] < line["tokens"] for line in lines.values())  # prompts are no loss tokens
    assert {line["attempt"] for line in lines.values()} == {0}
    assert {line["mfu"] for line in lines.values()} == {None}  # a CPU has no peak to compare with
    assert max(line["lr"] for line in lines.values()) == 3e-3
    for line in lines.values():
        assert line["memory_gib"] > 0
        assert 0 <= line["data_seconds"] <= line["seconds"]


def test_progress_is_on_standard_error_and_has_no_repeated_lines(undisturbed: tuple[Path, Ended]) -> None:
    said = undisturbed[1].err.splitlines()
    assert [line for line in said if re.match(rf"step \d+/{FEW}  loss ", line)] != []
    assert sorted({line for line in said if said.count(line) > 1}) == []
    # On a busy machine training may wait for data, and say so.
    others = [line for line in said if not line.startswith("warning: training waits for data")]
    assert [line for line in others if "warning" in line.lower()] == []


def test_running_from_the_saved_config_repeats_the_run_bitwise(undisturbed: tuple[Path, Ended]) -> None:
    folder_of_run = undisturbed[0]
    ended = forked_shoal(folder_of_run, "train", "runs/run/config.yaml", "name=again", "data.workers=2")
    assert ended.status == 0, ended.err
    assert ended.out.startswith(f"step        {FEW} of {FEW}, ")
    assert "next        shoal export runs/again --to hf" in ended.out
    assert losses(folder_of_run / "runs" / "again") == losses(folder_of_run / "runs" / "run")
    one, other = weights(folder_of_run / "runs" / "run"), weights(folder_of_run / "runs" / "again")
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_an_export_is_a_folder_that_plain_transformers_loads(undisturbed: tuple[Path, Ended], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "model"
    ended = forked_shoal(undisturbed[0], "export", "runs/run", "--to", "hf", "--output", str(output), "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out) == {"output": str(output), "format": "hf"}
    model = AutoModelForCausalLM.from_pretrained(output)
    trained = weights(undisturbed[0] / "runs" / "run")
    loaded = dict(model.named_parameters())
    assert trained.keys() == loaded.keys()
    assert [name for name in trained if not torch.equal(trained[name], loaded[name])] == []
    tokenizer = AutoTokenizer.from_pretrained(output)
    text = "the shoal turns"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    # The trained weights and the buffers that no checkpoint holds are there: the training data has a low loss.
    words = tokenizer("the shoal turns as one and every swimmer follows", return_tensors="pt")
    assert model(**words, labels=words["input_ids"]).loss < 0.8 * math.log(model.config.vocab_size)


@pytest.mark.slow
def test_two_processes_train_like_one_and_listen_on_loopback_only(
    folder: Path, expected: list[tuple[int, float, float]]
) -> None:
    run = folder / "runs" / "run"
    arguments = ["train", "run.yaml", "hardware.devices=2", "parallel.strategy=fsdp", "--json"]
    with Command(folder, [str(SHOAL), *arguments]) as command:
        command.wait_until(lambda: len(training_lines(run)) > 2)
        processes = [command.process.pid, *descendants(command.process.pid)]
        open_to = {address for process in processes for address in listening(process)}
        ended = command.wait()
    assert len(processes) >= 3
    # Not empty: gloo uses sockets, and a check of none would prove nothing.
    assert open_to
    assert {address for address in open_to if not address.startswith(("127.", "::1"))} == set()
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["checkpoint"] == f"runs/run/checkpoints/step-{STEPS:08d}"
    assert losses(run) == expected
    assert hold_whole(run) == STEPS
    assert (run / "logs" / "rank-1.log").is_file()
    chosen = json.loads((run / "plan.json").read_text())["chosen"]
    assert (chosen["strategy"], chosen["world_size"], chosen["grad_accum_steps"]) == ("fsdp", 2, 1)
    said = ended.err + (run / "logs" / "rank-1.log").read_text()
    assert [word for word in ("Traceback", "Warning") if word in said] == []
    assert sorted({line for line in ended.err.splitlines() if ended.err.splitlines().count(line) > 1}) == []


def listening(process: int) -> set[str]:
    """The addresses on which a process waits for TCP connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(socket.inet_ntop(family, in_network_order(bytes.fromhex(fields[1].partition(":")[0]))))
    return found


def in_network_order(words: bytes) -> bytes:
    """The kernel writes each word of an address in the machine's order."""
    values = [int.from_bytes(words[at : at + 4], "big") for at in range(0, len(words), 4)]
    return b"".join(struct.pack("=I", value) for value in values)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_stopped_by_each_signal_in_turn_ends_as_if_undisturbed(
    devices: int, folder: Path, expected: list[tuple[int, float, float]]
) -> None:
    run = folder / "runs" / "run"
    start = ["train", "run.yaml", f"hardware.devices={devices}", "--json"]
    saved = 0
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        arguments = [*start, "--resume"] if saved else start
        with ForkedCommand(folder, arguments) as command:
            command.wait_until(lambda: max(training_lines(run), default=0) > saved + 2)  # noqa: B023
            if number == signal.SIGINT:
                os.killpg(
                    command.process.pid, number
                )  # as a terminal does with Ctrl-C: to the foreground process group
            else:
                os.kill(command.process.pid, number)
            ended = command.wait()
        assert ended.status == 75, f"{number.name}: {ended.err}"
        assert "Traceback" not in ended.err
        summary = json.loads(ended.out)
        assert saved < summary["step"] < STEPS
        assert (summary["stopped"], hold_whole(run)) == ("signal", summary["step"])
        # The current step is finished and logged, and none after it.
        assert max(training_lines(run)) == summary["step"]
        assert "--resume" in ended.err.splitlines()[-1]
        assert ended.err.count("shoal: Stopping after this step, and saving a checkpoint.") == 1
        saved = summary["step"]
    ended = forked_shoal(folder, *start, "--resume")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["stopped"] is None
    assert losses(run) == expected
    assert {line["attempt"] for line in training_lines(run).values()} == {0, 1, 2, 3, 4}


@pytest.mark.slow
def test_a_stop_waits_for_a_slow_save(folder: Path) -> None:
    """A large checkpoint takes minutes to write. Here a rank is stopped for longer than torch's agent would wait, which
    is 30 seconds unless the variable is set."""
    run = folder / "runs" / "run"
    env = environment(folder, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="2")
    with ForkedCommand(folder, ["train", "run.yaml", "hardware.devices=2", "--json"], env) as command:
        command.wait_until(lambda: len(training_lines(run)) > 2)
        slow = rank_process(command.process.pid, 1)
        os.kill(slow, signal.SIGSTOP)
        os.kill(command.process.pid, signal.SIGTERM)
        time.sleep(5)
        still_there = Path(f"/proc/{slow}").exists()
        if still_there:
            os.kill(slow, signal.SIGCONT)
        ended = command.wait(30)
    assert ended.status == 75, ended.err
    assert 2 < hold_whole(run) < STEPS


@pytest.mark.slow
def test_a_killed_rank_without_restarts_is_named_with_its_signal(
    folder: Path, expected: list[tuple[int, float, float]]
) -> None:
    run = folder / "runs" / "run"
    with ForkedCommand(folder, ["train", "run.yaml", "hardware.devices=2", "--json"]) as command:
        # The checkpoint is written while training goes on.
        latest = run / "checkpoints" / "latest"
        command.wait_until(lambda: max(training_lines(run), default=0) > SAVE_EVERY + 2 and latest.exists())
        os.kill(rank_process(command.process.pid, 1), signal.SIGKILL)
        ended = command.wait(60)
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.splitlines()[-1] == (
        "shoal: Rank 1 was killed by SIGKILL (by the system, if the memory was full). "
        "Resume with: shoal train run.yaml hardware.devices=2 --json --resume"
    )
    assert "Traceback" not in ended.err
    assert hold_whole(run) >= SAVE_EVERY
    resumed = forked_shoal(folder, "train", "run.yaml", "hardware.devices=1", "--resume", "--json")
    assert resumed.status == 0, resumed.err
    assert losses(run) == expected  # on one process too


@pytest.mark.slow
def test_torchrun_starts_and_restarts_the_same_training(folder: Path, expected: list[tuple[int, float, float]]) -> None:
    """The real torchrun, in a process of its own, is in test_torchrun.py."""
    run = folder / "runs" / "run"
    started = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    arguments = [*started, "-m", "shoal", "train", "run.yaml", "--json"]
    with ForkedTorchrun(folder, arguments) as command:
        command.wait_until(lambda: max(training_lines(run), default=0) > SAVE_EVERY + 2)
        os.kill(rank_process(command.process.pid, 1), signal.SIGKILL)
        ended = command.wait()
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["step"] == STEPS  # one object, from the first rank alone
    assert losses(run) == expected
    assert hold_whole(run) == STEPS
    assert {line["attempt"] for line in training_lines(run).values()} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_crash_is_status_1_with_one_sentence_and_a_file_with_the_traceback(
    devices: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, seen = TrainStep.__call__, [0]

    def step(self: TrainStep, batch: Any, lr: float) -> Any:
        seen[0] += 1
        if seen[0] == 3 and os.environ.get("RANK", "0") == "0":
            raise ZeroDivisionError
        return call(self, batch, lr)

    monkeypatch.setattr(TrainStep, "__call__", step)
    run = folder / "runs" / "run"
    ended = forked_shoal(folder, "train", "run.yaml", f"hardware.devices={devices}", "--json")
    assert (ended.status, ended.out) == (1, "")
    assert "Traceback" not in ended.err
    who = "Rank 0 failed with an error" if devices == 2 else "An error"
    (file,) = (run / "logs").glob("crash-*.txt")
    said = f"shoal: {who} that shoal did not expect: ZeroDivisionError"
    assert [line for line in ended.err.splitlines() if line.startswith(said) and f"is in {file}; " in line]
    trace = file.read_text()
    assert trace.count("Traceback (most recent call last)") == 1
    assert trace.splitlines()[-1].startswith("ZeroDivisionError")


def test_evaluations_are_in_the_metrics_and_the_last_is_in_the_summary(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, config(instructions, data__validation=0.1))
    ended = forked_shoal(tmp_path, "train", "run.yaml", "train.steps=4", "eval.every=2", "--json")
    assert ended.status == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4]
    assert all("loss" not in line for line in evaluations)
    assert json.loads(ended.out)["eval_loss"] == evaluations[-1]["eval_loss"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("shoal train run.yaml", " Resume with: shoal train run.yaml --resume"),
        ("shoal train run.yaml --overwrite name=b", " Resume with: shoal train run.yaml name=b --resume"),
        (
            "shoal train run.yaml --from runs/a/checkpoints/step-00000002 --runs x",
            " Resume with: shoal train run.yaml --runs x --resume",
        ),
        ("shoal train run.yaml --from=x --resume=auto", " Resume with: shoal train run.yaml --resume=auto"),
        ("python mine.py", ""),
    ],
)
def test_a_run_whose_ranks_are_lost_says_how_to_resume_it(typed: str, said: str) -> None:
    assert how_to_resume(typed.split()) == said

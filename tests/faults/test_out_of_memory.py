"""Out of memory: a report with the memory in use and settings to change, or a restart with a smaller micro-batch.

On a CPU the allocator's error is injected: the training step raises it when a micro-batch is larger than allowed.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import api
from shoal.checkpoint import store
from shoal.checkpoint.store import list_complete
from shoal.plan.decide import choose
from shoal.plan.machine import machine_at_hand
from shoal.plan.models import read_shape
from shoal.resilience import out_of_memory
from shoal.resilience.out_of_memory import OutOfMemory, smaller_batch
from shoal.train import build
from shoal.train.step import TrainStep
from tests.harness import settings, train_on
from tests.launch.command import Ended, forked_shoal, losses, training_lines, write_config

ERROR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB."


def config(data: Path, **changes: Any) -> dict[str, Any]:
    return settings(data, **{"train__steps": 6, "train__micro_batch": 8, "checkpoint__every": 2, **changes})


@pytest.fixture
def shoal_with_little_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ended]:
    """The command, in which micro-batches larger than `most` run out of memory, after step `after`, on `rank`."""

    def run(*arguments: str, most: int, after: int = 0, rank: int = -1) -> Ended:
        call, seen = TrainStep.__call__, [0]

        def step(self: TrainStep, batch: Any, lr: float) -> Any:
            seen[0] += 1
            size = batch.micro_batches[0].inputs.shape[0]
            if size > most and seen[0] > after and rank in (-1, int(os.environ.get("RANK", 0))):
                raise torch.OutOfMemoryError(ERROR)
            return call(self, batch, lr)

        with monkeypatch.context() as planted:
            planted.setattr(TrainStep, "__call__", step)  # in this process, whose forks the launcher and its ranks are
            return forked_shoal(tmp_path, *arguments, seconds=120)

    return run


@pytest.fixture
def from_step_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step after the third runs out of memory, in this process and its forks."""
    call, seen = TrainStep.__call__, [0]

    def step(self: TrainStep, batch: Any, lr: float) -> Any:
        seen[0] += 1
        if seen[0] > 3:
            raise torch.OutOfMemoryError(ERROR)
        return call(self, batch, lr)

    monkeypatch.setattr(TrainStep, "__call__", step)


def hold_message(ended: Ended, sentence: str) -> list[str]:
    """Status 1, and the message, the table and the fixes on standard error, once; returns the fixes."""
    assert (ended.status, ended.out) == (1, ""), ended.err
    assert "Traceback" not in ended.err
    assert ended.err.count(sentence) == 1
    said = ended.err[ended.err.index("shoal: Rank") :].splitlines()
    names = [line[:16].strip() for line in said[2:7]]
    assert names == ["weights", "gradients", "optimizer state", "the rest", "allocated"]
    fixes = said[said.index("Settings that need less memory, cheapest first:") + 1 :]
    assert len(fixes) == 3
    assert all(" saves " in line for line in fixes)
    return [line.partition("  saves ")[0].strip() for line in fixes]


@pytest.mark.usefixtures("from_step_4")
def test_the_run_ends_with_the_memory_in_use_and_three_fixes_that_work(
    instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_of_memory, "GIB", 1024)  # or a small model's figures would all be 0.00
    write_config(tmp_path, config(instructions))
    ended = forked_shoal(tmp_path, "train", "run.yaml", "--json")
    fixes = hold_message(ended, "Rank 0 ran out of memory in step 4, with micro-batch 8: ")
    assert "and 2.00 GiB more were requested" in ended.err
    assert "train.micro_batch=4" in fixes
    for fix in fixes:
        api.load_config(tmp_path / "run.yaml", fix.split())  # a config that training accepts
    # 31,520 weights of 4 bytes, and two moments of each; a step begins without gradients.
    table = {line[:16].strip(): line[16:].split() for line in ended.err.splitlines()}
    assert table["weights"] == ["123.12", "123.12"]
    assert [float(one) for one in table["optimizer state"]] == pytest.approx([246.25, 246.25], rel=1e-3)
    assert table["gradients"][1] == "0.00"


@pytest.mark.usefixtures("from_step_4")
def test_a_pending_checkpoint_is_completed(instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = store.finish

    def slowly(*arguments: Any) -> None:
        time.sleep(1.5)
        finish(*arguments)

    monkeypatch.setattr(store, "finish", slowly)
    with pytest.raises(OutOfMemory, match=r"in step 4(.|\n)*Larger than forecast: the rest, by "):
        train_on(2, config(instructions, checkpoint__every=3, train__micro_batch=4), tmp_path)
    assert [one.step for one in list_complete(tmp_path / "run" / "checkpoints")] == [3]


def test_out_of_memory_during_setup_shows_the_forecast(
    instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(ERROR)

    monkeypatch.setattr(build, "parallelize", nothing)
    write_config(tmp_path, config(instructions))
    ended = forked_shoal(tmp_path, "train", "run.yaml")
    assert ended.status == 1
    assert "Rank 0 ran out of memory during setup, with micro-batch 8: " in ended.err
    assert "optimizer state" in ended.err
    assert "train.micro_batch=4" in ended.err
    assert "Traceback" not in ended.err


def test_a_setting_that_is_not_implemented_is_not_a_fix() -> None:
    """When everything implemented is in use, the forecast still knows adapters and more."""
    used = ["train.micro_batch=1", "train.recompute=full", "train.precision=bf16-true", "train.loss_impl=chunked"]
    used += ["train.optimizer.name=adamw8bit", "parallel.strategy=fsdp", "parallel.offload=cpu", "data.max_length=512"]
    config = api.load_config(None, ["model.shape=gpt2", *used])
    choice = choose(config, read_shape(config.model), machine_at_hand("NVIDIA H200", 139.8, devices=8))
    said = list(out_of_memory._fixes(choice))
    fixes = [line.partition("  saves ")[0].strip() for line in said[1:]]
    assert fixes
    for fix in fixes:
        api.load_config(None, ["model.shape=gpt2", *used, *fix.split()])


def test_a_change_that_is_not_enough_is_not_a_fix_where_another_is() -> None:
    """Seen on an H200: offloading the optimizer state would have saved a hundredth of what was needed."""
    asked = ["model.shape=gpt2", "data.max_length=1024", "train.global_batch=512", "train.micro_batch=512"]
    config = api.load_config(None, asked)
    choice = choose(config, read_shape(config.model), machine_at_hand("NVIDIA H200", 139.8, devices=1))
    assert not choice.fits
    fixes = [line.partition("  saves ")[0].strip() for line in out_of_memory._fixes(choice)][1:]
    assert len(fixes) == 3
    for fix in fixes:
        changed = api.load_config(None, [*asked, *fix.split()])
        assert choose(changed, choice.run.shape, choice.machine).fits, fix


def hold_as_with(micro_batch: int, run: Path, data: Path, folder: Path, world_size: int, **changes: Any) -> None:
    """The run has the losses of one that started with `micro_batch`, and its plan says so."""
    chosen = json.loads((run / "plan.json").read_text())["chosen"]
    assert (chosen["micro_batch"], chosen["micro_batch"] * chosen["grad_accum_steps"]) == (micro_batch, 8 // world_size)
    reference = train_on(world_size, config(data, **changes, train__micro_batch=micro_batch), folder)
    found, expected = losses(run), losses(reference)
    assert [step for step, _, _ in found] == [step for step, _, _ in expected]
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in expected], rel=2e-6)


@pytest.mark.slow
def test_shrink_restarts_with_half_the_micro_batch_and_the_same_losses(
    shoal_with_little_memory: Callable[..., Ended], instructions: Path, tmp_path: Path
) -> None:
    write_config(tmp_path, config(instructions, train__on_oom="shrink"))
    ended = shoal_with_little_memory("train", "run.yaml", "--json", most=4, after=3)
    assert ended.status == 0, ended.err
    assert "Rank 0 ran out of memory in step 4, with micro-batch 8: " in ended.err
    assert ended.err.count("Restarting all processes with train.micro_batch 4 and 2 gradient accumulation steps") == 1
    run = tmp_path / "runs" / "run"
    assert "micro_batch: 8" in (run / "config.yaml").read_text()
    # It resumed from the checkpoint of step 2 and repeated step 3.
    attempts = {step: line["attempt"] for step, line in training_lines(run).items()}
    assert attempts == {1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 1}
    hold_as_with(4, run, instructions, tmp_path, 1)


@pytest.mark.slow
def test_one_rank_without_memory_shrinks_all_as_often_as_it_takes_and_that_is_no_restart(
    shoal_with_little_memory: Callable[..., Ended], instructions: Path, tmp_path: Path
) -> None:
    settled = config(instructions, train__on_oom="shrink", hardware__devices=2, train__micro_batch=4)
    write_config(tmp_path, settled)
    ended = shoal_with_little_memory("train", "run.yaml", "--max-restarts", "1", "--json", most=1, after=2, rank=1)
    assert ended.status == 0, ended.err
    assert ended.err.count("Rank 1 ran out of memory in step ") == 2
    assert "All processes were restarted" not in ended.err
    hold_as_with(1, tmp_path / "runs" / "run", instructions, tmp_path, 2)


@pytest.mark.slow
def test_a_micro_batch_of_one_cannot_shrink(
    shoal_with_little_memory: Callable[..., Ended], instructions: Path, tmp_path: Path
) -> None:
    write_config(tmp_path, config(instructions, train__on_oom="shrink", train__micro_batch=2))
    ended = shoal_with_little_memory("train", "run.yaml", "--json", most=0)
    assert ended.err.count("Restarting all processes") == 1
    assert "shoal: Rank 0 ran out of memory in step 1, with micro-batch 1: " in ended.err
    assert "Traceback" not in ended.err
    assert (ended.status, ended.out) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [-1, 1])
def test_two_ranks_report_it_once_and_are_not_restarted(
    rank: int, shoal_with_little_memory: Callable[..., Ended], instructions: Path, tmp_path: Path
) -> None:
    """Whether both ran out of memory or one, whose failure makes the other fail, which an agent would restart."""
    write_config(tmp_path, config(instructions, hardware__devices=2, train__micro_batch=4))
    arguments = ["train", "run.yaml", "--max-restarts", "1", "--json"]
    ended = shoal_with_little_memory(*arguments, most=2, after=3, rank=rank)
    hold_message(ended, "ran out of memory in step 4, with micro-batch 4: ")
    assert {line["attempt"] for line in training_lines(tmp_path / "runs" / "run").values()} == {0}
    assert "restart" not in ended.err.lower()


def test_the_next_smaller_micro_batch_divides_the_batch() -> None:
    """The largest divisor up to half is used where half does not divide the batch."""
    assert smaller_batch(micro_batch=8, grad_accum_steps=1) == 4
    assert smaller_batch(micro_batch=9, grad_accum_steps=1) == 3
    assert smaller_batch(micro_batch=5, grad_accum_steps=2) == 2
    assert smaller_batch(micro_batch=3, grad_accum_steps=1) == 1
    assert smaller_batch(micro_batch=1, grad_accum_steps=4) is None


def test_errors_of_libraries_and_of_the_compiler_say_that_memory_is_full() -> None:
    gpu, host = torch.device("cuda"), torch.device("cpu")
    wrapped = RuntimeError("backend='inductor' raised")
    wrapped.__cause__ = torch.OutOfMemoryError(ERROR)
    told = ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"]
    for error in (wrapped, RuntimeError("Triton Error [CUDA]: out of memory"), *map(RuntimeError, told)):
        assert out_of_memory.is_out_of_memory(error, gpu), error
    full = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
    assert out_of_memory.is_out_of_memory(full, host)
    assert not out_of_memory.is_out_of_memory(full, gpu)
    assert not out_of_memory.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"), gpu)
    assert not out_of_memory.is_out_of_memory(ValueError("out of memory"), gpu)

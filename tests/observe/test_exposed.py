"""The time that a step waits for communication is measured with every strategy."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from shoal import api
from shoal.launch.environment import LAUNCH_FOLDER
from shoal.models.loss import LanguageModel
from shoal.parallel.exposed import COLLECTIVES, WaitTimer
from shoal.parallel.pipeline import Stage
from tests.custom import loops
from tests.harness import import_compiler, lines, run_ranks, settings, slow

DELAY = 0.2
QUICK: dict[str, dict[str, Any]] = {"fsdp": {"parallel__strategy": "fsdp"}, "tp": {"parallel__tp": 2}}
SLOW: dict[str, dict[str, Any]] = {
    "ddp": {"parallel__strategy": "ddp", "train__steps": 3},  # its own timer is a step late
    "zero1": {"parallel__strategy": "zero1", "train__steps": 3},
    "zero2": {"parallel__strategy": "zero2"},
    "cp": {"parallel__cp": 2},
    "pp": {"parallel__pp": 2},
    "compiled-tp": {"parallel__tp": 2, "train__compile": "aot_eager"},
}


def waits(
    cases: dict[str, dict[str, Any]], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[dict[str, Any]]]:
    """The log lines of runs whose rank 1 begins every forward pass late."""
    for module in (LanguageModel, Stage):
        forward = module.forward

        def delayed(*arguments: Any, forward: Any = forward, **options: Any) -> Any:
            if os.environ["RANK"] == "1":
                time.sleep(DELAY)
            return forward(*arguments, **options)

        monkeypatch.setattr(module, "forward", delayed)

    def train_all() -> None:
        for name, changes in cases.items():
            os.environ[LAUNCH_FOLDER] = str(tmp_path / f"meet-{name}")
            config = settings(text, **{"name": name, "train__steps": 2, **changes})
            api.train(api.config_from_mapping(config), runs=tmp_path)

    for name in cases:
        (tmp_path / f"meet-{name}").mkdir()
    run_ranks(2, train_all)
    return {name: lines(tmp_path / name) for name in cases}


def check(found: dict[str, list[dict[str, Any]]]) -> None:
    for name, steps in found.items():
        known = [line for line in steps if line["communication_seconds"] is not None]
        assert all(0 < line["communication_seconds"] <= line["seconds"] for line in known), name
        # At least once: on a busy machine rank 0 may be late too.
        assert any(line["communication_seconds"] > DELAY / 2 for line in known), name


@pytest.mark.parametrize("cases", [QUICK, slow(SLOW)], ids=lambda cases: "-".join(cases))
def test_communication_is_measured_with_every_strategy(
    cases: dict[str, dict[str, Any]], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cases is SLOW:
        import_compiler()
    check(waits(cases, text, tmp_path, monkeypatch))


@pytest.mark.parametrize("strategies", [("fsdp",), slow(("ddp", "zero1", "zero2"))], ids="-".join)
def test_a_custom_loop_measures_it_too_and_leaves_out_evaluations(
    strategies: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = loops.Network.forward

    def delayed(self: Any, image: torch.Tensor) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(DELAY if self.training else 5 * DELAY)
        return forward(self, image)

    def evaluate(run: Any, model: Any) -> None:
        if run.step_number == 1:
            run.evaluate(lambda batch: model(batch).mean(), [torch.rand(2, 2, 6), torch.rand(2, 2, 6)])

    monkeypatch.setattr(loops.Network, "forward", delayed)

    def train(name: str) -> None:
        os.environ[LAUNCH_FOLDER] = str(tmp_path / f"meet-{name}")
        steps = 2 if name in ("fsdp", "zero2") else 3  # DDP's own timer is a step late
        loops.train(tmp_path, name=name, each=evaluate, parallel__strategy=name, train__steps=steps)

    for name in strategies:
        (tmp_path / f"meet-{name}").mkdir()
        run_ranks(2, partial(train, name))
    found = {name: lines(tmp_path / name) for name in strategies}
    check(found)
    # The value is at most the step's time, which is without the evaluation: with it, they would be equal.
    evaluated = [found[name][0] for name in found if name in ("fsdp", "zero2")]
    assert all(line["communication_seconds"] < line["seconds"] for line in evaluated), evaluated


def test_each_way_to_wait_is_timed_and_then_put_back() -> None:
    def asynchronous(tensor: torch.Tensor) -> None:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "collective": dist.all_reduce,
        "work": asynchronous,
        "functional": lambda tensor: functional.wait_tensor(functional.all_reduce(tensor, "sum", dist.group.WORLD)),
        "nothing": lambda tensor: time.sleep(DELAY),
    }

    def measure() -> tuple[dict[str, float], bool]:
        folder, rank = os.environ[LAUNCH_FOLDER], int(os.environ["RANK"])
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
        functions = [vars(dist.ProcessGroup).get(name) for name in COLLECTIVES]
        functions += [dist.Work.wait, torch.ops._c10d_functional.wait_tensor._op]
        operator = torch.ops._c10d_functional.wait_tensor.default
        known, found = {operator: "known"}, {}
        for name, wait in ways.items():
            timer = WaitTimer(torch.device("cpu"))
            dist.barrier()
            with timer.sample():
                assert known[operator] == "known"  # also while it is replaced
                time.sleep(DELAY * rank)
                wait(torch.ones(4))
            (sample,) = timer.take()
            found[name] = sample.seconds()
            assert not timer.take()
        after = [vars(dist.ProcessGroup).get(name) for name in COLLECTIVES]
        after += [dist.Work.wait, torch.ops._c10d_functional.wait_tensor._op]
        return found, all(one is other for one, other in zip(functions, after, strict=True))

    (first, same), (second, _) = run_ranks(2, measure)
    assert same
    assert first.pop("nothing") == second.pop("nothing") == 0
    assert all(seconds > DELAY / 2 for seconds in first.values()), first
    assert all(0 < seconds < first[name] for name, seconds in second.items()), second

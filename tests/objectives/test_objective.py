"""An objective is one file: labels, loss, weight, an auxiliary loss and metrics of its own, under every strategy."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shoal
from shoal.data.loader import IGNORED, MicroBatch
from shoal.data.sequences import Sequences
from shoal.models.loss import LanguageModel, LossSums
from shoal.objectives.causal_lm import CausalLM
from tests.harness import lines, run_ranks, settings

AUXILIARY = 0.5


class PerSequence(LanguageModel):
    """The mean loss of a sequence, with every sequence of the same weight, and a penalty on hidden states."""

    def losses(self, hidden: Tensor, batch: Any) -> LossSums:
        total, weight, penalty = hidden.new_zeros(()), hidden.new_zeros(()), hidden.new_zeros(())
        for states, labels in zip(hidden, batch.labels, strict=True):
            counted = labels != IGNORED
            count = counted.sum()
            loss = self.head_and_loss(states[None], labels[None])
            total = total + loss / count.clamp(min=1)
            weight = weight + (count > 0)
            penalty = penalty + (states.square().mean(-1) * counted).sum() / count.clamp(min=1)
        return LossSums(total + AUXILIARY * penalty, (total.detach(), weight, penalty.detach()))


class Examples(CausalLM):
    name = "examples"
    sums = ("loss", "weight", "penalty")

    def collate(self, sequences: Sequences, sequence_ids: np.ndarray, **shape: Any) -> MicroBatch:
        """Every second label counts."""
        batch = super().collate(sequences, sequence_ids, **shape)
        batch.labels[:, ::2] = IGNORED
        return batch

    def weight(self, sequences: Sequences, sequence_ids: np.ndarray) -> int:
        return len(sequence_ids)

    def module(self, *parts: Any, **options: Any) -> LanguageModel:
        return PerSequence(*parts, **options)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["weight"], "penalty": sums["penalty"] / sums["weight"]}


CASES = {
    "single": (1, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "pp": (2, {"pp": 2}),
}


@pytest.fixture(scope="module")
def trained(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of a case, with the objective in place of causal_lm."""
    found: dict[str, Path] = {}

    def train(case: str) -> Path:
        if case not in found:
            world_size, parallel = CASES[case]
            config = settings(
                instructions, train__steps=3, train__micro_batch=2, eval__every=3, data__validation=0.05,
                parallel=parallel,
            )  # fmt: skip
            folder = tmp_path_factory.mktemp(case)

            def be() -> None:
                shoal.train(config, runs=folder, objective=Examples())

            run_ranks(world_size, be)
            found[case] = folder / "run"
        return found[case]

    return train


def evaluation(run: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (last,) = [line for line in found if "eval_loss" in line]
    return last


@pytest.mark.parametrize("case", [case for case in CASES if case != "single"])
def test_every_strategy_equals_one_process(case: str, trained: Any) -> None:
    one, many = lines(trained("single")), lines(trained(case))
    assert [line["loss"] for line in many] == pytest.approx([line["loss"] for line in one], rel=2e-6)
    assert [line["grad_norm"] for line in many] == pytest.approx([line["grad_norm"] for line in one], rel=1e-5)
    expected = evaluation(trained("single"))
    for name in ("eval_loss", "eval_penalty"):
        assert evaluation(trained(case))[name] == pytest.approx(expected[name], rel=2e-6)


def test_weight_labels_and_metrics_are_the_objectives(trained: Any, instructions: Path) -> None:
    run = trained("single")
    assert [line["loss_tokens"] for line in lines(run)] == [8, 16, 24]  # examples
    assert set(evaluation(run)) == {"step", "attempt", "time", "eval_loss", "eval_penalty"}


def test_the_auxiliary_loss_is_trained_and_reported_apart(
    trained: Any, instructions: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without it the first loss is the same, and the gradient is not."""
    whole = lines(trained("single"))[0]
    monkeypatch.setitem(globals(), "AUXILIARY", 0.0)
    config = settings(instructions, train__steps=1, train__micro_batch=2, data__validation=0.05)

    def be() -> None:
        shoal.train(config, runs=tmp_path, objective=Examples())

    run_ranks(1, be)
    (without,) = lines(tmp_path / "run")
    assert without["loss"] == whole["loss"]
    assert abs(without["grad_norm"] / whole["grad_norm"] - 1) > 1e-3


def test_the_causal_objective_has_the_loss_and_its_perplexity() -> None:
    found = CausalLM().metrics({"loss": 20.0, "weight": 10.0})
    assert found == {"loss": 2.0, "perplexity": pytest.approx(float(torch.tensor(2.0).exp()), rel=1e-6)}

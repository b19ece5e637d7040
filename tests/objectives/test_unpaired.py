"""Preference tuning on answers with labels: the published loss, the same numbers under every split, and learning."""

import json
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal import api
from shoal.config.schema import Config
from shoal.data import StoredSequences, Summary
from shoal.data.sequences import DESIRABLE, DOCUMENT, LOSS_TOKEN
from shoal.models.anatomy import read_anatomy
from shoal.objectives import find_objective
from shoal.objectives.references import Known, References
from shoal.objectives.unpaired import Unpaired
from tests.harness import lines, settings, slow, train_again_on
from tests.models.small import drawn, small_config
from tests.objectives.test_pair_losses import Accelerator, Answer, answer_logps, gradients, hold_equal, make_answers
from tests.objectives.test_preference import MESHES, evaluation

NAME = "apo_zero_unpaired"
BETA, DESIRABLE_WEIGHT, UNDESIRABLE_WEIGHT = 0.3, 1.5, 0.8
LABELS = (True, True, False, True, False, False)
SEQUENCES = ((0, 1, 2, 3), (4, 5))  # the answers of each sequence
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


def labelled_answers() -> list[Answer]:
    return [one for pair in make_answers() for one in pair]


def as_sequences(answers: list[Answer]) -> StoredSequences:
    """The answers with their labels, packed as SEQUENCES says."""
    tokens, flags, ends = [], [], []
    for members in SEQUENCES:
        for index in members:
            answer = answers[index]
            marks = np.full(len(answer.tokens), LOSS_TOKEN, np.uint8)
            marks[: answer.prompt] = 0
            marks[0] = DOCUMENT | (DESIRABLE if LABELS[index] else 0)
            tokens.append(answer.tokens.numpy())
            flags.append(marks)
        ends.append(sum(map(len, tokens)))
    starts, counted = np.array([0, *ends[:-1]]), np.zeros(len(ends), np.int32)
    summary = Summary("unpaired", False, True, len(answers), ends[-1], len(ends), 99, 1, 0.5, "these", desirable=3)
    return StoredSequences(np.concatenate(tokens), np.concatenate(flags), starts, np.array(ends), counted, summary)


def objective_of(answers: list[Answer]) -> Unpaired:
    preference = {"beta": BETA, "desirable_weight": DESIRABLE_WEIGHT, "undesirable_weight": UNDESIRABLE_WEIGHT}
    config = Config.model_validate({"model": {"shape": "gpt2"}, "train": {"objective": NAME, "preference": preference}})
    found = find_objective(config)
    assert isinstance(found, Unpaired)
    values = np.array([[one.reference if label else 0.0, 0.0 if label else one.reference]
                       for one, label in zip(answers, LABELS, strict=True)])  # fmt: skip
    found.references = References({"these": Known(np.arange(2), np.array([len(one) for one in SEQUENCES]), values)})
    return found


def published(answers: list[Answer], logps: Tensor) -> tuple[Tensor, dict[str, float]]:
    """The mean loss and the metrics, in the order of TRL's terms."""
    desirable = torch.tensor(LABELS)
    rewards = BETA * (logps - torch.tensor([one.reference for one in answers]))
    losses = [DESIRABLE_WEIGHT * (1 - rewards[desirable].sigmoid()), UNDESIRABLE_WEIGHT * rewards[~desirable].sigmoid()]
    shown = {
        f"{name}/{side}": float(values.detach()[chosen].mean())
        for name, values in (("rewards", rewards), ("logps", logps))
        for side, chosen in (("chosen", desirable), ("rejected", ~desirable))
    }
    return torch.cat(losses).mean(), {**shown, "rewards/margins": shown["rewards/chosen"] - shown["rewards/rejected"]}


def trl(answers: list[Answer], model: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.kto_trainer import KTOTrainer

    longest = max(len(one.tokens) for one in answers)
    inputs = torch.zeros(len(answers), longest, dtype=torch.long)
    attended, answered = torch.zeros_like(inputs), torch.zeros_like(inputs)
    for row, one in enumerate(answers):
        inputs[row, : len(one.tokens)] = one.tokens
        attended[row, : len(one.tokens)] = 1
        answered[row, one.prompt : len(one.tokens)] = 1

    def forward(input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits
        logps = torch.log_softmax(logits, -1).gather(2, input_ids[:, 1:, None])[..., 0]
        zeros = torch.zeros_like(logps)
        counted = logps.masked_fill(labels[:, 1:] == -100, 0.0)
        return SimpleNamespace(log_probs=counted, entropy=zeros, mean_logits=zeros)

    metrics: dict[str, Any] = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=Accelerator(), beta=BETA, loss_type=NAME,
        desirable_weight=DESIRABLE_WEIGHT, undesirable_weight=UNDESIRABLE_WEIGHT, precompute_ref_logps=True,
        calculate_KL=False, aux_loss_enabled=False, _metrics=metrics, _total_train_tokens=0, _tp_size=1,
        _compute_kl_logps=lambda *_: None,
    )  # fmt: skip
    given = {
        "input_ids": inputs, "attention_mask": attended, "completion_mask": answered, "label": torch.tensor(LABELS),
        "ref_logps": torch.tensor([one.reference for one in answers]),
    }  # fmt: skip
    loss = KTOTrainer._compute_loss(trainer, forward, given, False)
    return loss, {key: values[-1] for key, values in metrics["train"].items() if key in METRICS}


@pytest.mark.parametrize("source", ["published", slow("trl")])
@pytest.mark.parametrize("loss_impl", ["plain", "chunked"])
def test_packed_answers_have_the_loss_and_gradients_of_single_ones(source: str, loss_impl: str) -> None:
    model, answers = drawn(small_config("llama")), labelled_answers()
    objective, sequences = objective_of(answers), as_sequences(answers)
    batch = objective.collate(sequences, np.arange(2), pad=0, multiple=8)
    found = objective.module(model, read_anatomy(model), loss_impl)(batch)
    sums = dict(zip(objective.sums, (one.item() for one in found.sums), strict=True))
    if source == "trl":
        wanted, shown = trl(answers, model)
    else:
        wanted, shown = published(answers, answer_logps(model, make_answers())[0].flatten())
    assert sums["weight"] == len(LABELS) == objective.weight(sequences, np.arange(2))
    assert found.trained.item() / len(LABELS) == pytest.approx(wanted.item(), rel=1e-5)
    hold_equal(gradients(model, found.trained / len(LABELS)), gradients(model, wanted))
    assert shown.keys() == set(METRICS)
    assert objective.metrics(sums) == {
        "loss": pytest.approx(wanted.item(), rel=1e-5),
        **{name: pytest.approx(value, rel=1e-5) for name, value in shown.items()},
    }


@pytest.mark.slow
def test_without_answers_of_a_kind_its_metrics_are_null(examples: Path, tmp_path: Path) -> None:
    """One sequence of one example per step."""
    alone = {"data__pack": False, "data__validation": 0, "train__global_batch": 1, "train__micro_batch": 1}
    config = config_of(examples, train__steps=2, **alone)
    for line in lines(train_again_on(1, config, tmp_path)):
        assert (line["rewards/chosen"] is None) != (line["rewards/rejected"] is None)
        assert line["rewards/margins"] is None


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Desirable answers are of one colour, undesirable ones of another; a third of them are desirable."""
    source = random.Random(3)
    path = tmp_path_factory.mktemp("unpaired") / "examples.jsonl"
    with path.open("w") as file:
        for number in range(120):
            label = number % 3 == 0
            asked = " ".join(source.choices(["tall", "small", "kind", "old", "new"], k=source.randint(1, 3)))
            answer = (" red" if label else " blue") * source.randint(1, 3)
            file.write(json.dumps({"prompt": f"{asked}:", "completion": answer, "label": label}) + "\n")
    return path


def config_of(examples: Path, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "data__max_length": 96, "data__pack": True, "data__validation": 0.2, "train__objective": NAME,
        "train__steps": 4, "train__global_batch": 4, "train__micro_batch": 2, "eval__every": 4,
    }  # fmt: skip
    return settings(examples, **{**given, **changes})


@pytest.fixture(scope="module")
def trained(examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_again_on(1, config_of(examples), tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("mesh", ["ddp", *(slow(one) for one in ("fsdp", "pp", "cp", "tp chunked"))])
def test_every_strategy_equals_one_process(mesh: str, trained: Path, examples: Path, tmp_path: Path) -> None:
    world_size, changes = MESHES[mesh]
    run = train_again_on(world_size, config_of(examples, **changes), tmp_path)
    one, many = lines(trained), lines(run)
    assert [line["loss_tokens"] for line in many] == [line["loss_tokens"] for line in one]
    assert [line["loss"] for line in many] == pytest.approx([line["loss"] for line in one], rel=5e-6)
    assert [line["grad_norm"] for line in many] == pytest.approx([line["grad_norm"] for line in one], rel=2e-5)
    for key in METRICS:
        wanted = [line[key] for line in one]
        assert [line[key] for line in many] == pytest.approx(wanted, rel=1e-4, abs=1e-5), key
        assert evaluation(run)[f"eval_{key}"] == pytest.approx(evaluation(trained)[f"eval_{key}"], rel=1e-4, abs=1e-5)


def test_the_model_learns_what_is_desirable(examples: Path, tmp_path: Path) -> None:
    """With an adapter, which is switched off for the reference; and a run is evaluated as it was trained."""
    lora = {"adapter": {"kind": "lora", "rank": 8, "targets": "all-linear"}}
    config = config_of(examples, train__steps=10, train__lr=0.05, eval__every=10, **lora)
    run = train_again_on(1, config, tmp_path)
    first = lines(run)[0]
    assert first["loss"] == pytest.approx(0.5, abs=1e-5), "policy and reference are the same"
    assert abs(first["rewards/chosen"]) + abs(first["rewards/rejected"]) < 1e-4
    wanted = evaluation(run)
    assert wanted["eval_rewards/chosen"] > 0 > wanted["eval_rewards/rejected"]
    assert wanted["eval_loss"] < 0.45
    found = api.evaluate(run)
    assert "examples in" in found.text()
    assert found.as_dict()["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-4)

"""Preference losses and their gradients: those of the published formulas, on answers that are computed one by one."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.config.schema import Config
from shoal.data import StoredSequences, Summary
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN
from shoal.models import cross_entropy
from shoal.models.anatomy import Anatomy, read_anatomy
from shoal.objectives import find_objective
from shoal.objectives.preference import PairModel, Preference
from shoal.objectives.references import Known, References
from tests.models.small import VOCAB, drawn, small_config

OBJECTIVES = ("dpo", "ipo", "orpo", "simpo")
BETA, GAMMA = 0.3, 0.7
PAIRS, SEQUENCES = 3, ((0, 1), (2,))  # the pairs of each sequence


@dataclass(frozen=True)
class Answer:
    """A document: a prompt and its answer."""

    tokens: Tensor
    prompt: int
    reference: float


def make_answers() -> list[tuple[Answer, Answer]]:
    source = torch.Generator().manual_seed(1)
    found = []
    for pair in range(PAIRS):
        prompt = torch.randint(0, VOCAB, (3 + pair,), generator=source)
        lengths = torch.randint(2, 9, (2,), generator=source).tolist()
        found.append(
            tuple(
                Answer(
                    torch.cat([prompt, torch.randint(0, VOCAB, (length,), generator=source)]),
                    len(prompt),
                    -4.5 * length + pair,
                )
                for length in lengths
            )
        )
    return found


def as_sequences(answers: list[tuple[Answer, Answer]]) -> StoredSequences:
    """The pairs, packed as SEQUENCES says."""
    tokens, flags, ends = [], [], []
    for members in SEQUENCES:
        for answer in (one for pair in members for one in answers[pair]):
            marks = np.full(len(answer.tokens), LOSS_TOKEN, np.uint8)
            marks[: answer.prompt] = 0
            marks[0] = DOCUMENT
            tokens.append(answer.tokens.numpy())
            flags.append(marks)
        ends.append(sum(map(len, tokens)))
    starts, counted = np.array([0, *ends[:-1]]), np.zeros(len(ends), np.int32)
    summary = Summary("preference", False, True, 2 * PAIRS, ends[-1], len(ends), 99, 1, 0.5, "these", pairs=True)
    return StoredSequences(np.concatenate(tokens), np.concatenate(flags), starts, np.array(ends), counted, summary)


def objective_of(name: str, answers: list[tuple[Answer, Answer]]) -> Preference:
    preference = {"beta": BETA, "gamma": GAMMA}
    config = Config.model_validate({"model": {"shape": "gpt2"}, "train": {"objective": name, "preference": preference}})
    found = find_objective(config)
    assert isinstance(found, Preference)
    assert found.precomputes == (name in ("dpo", "ipo"))
    if found.precomputes:
        values = np.array([[one.reference for one in answers[pair]] for members in SEQUENCES for pair in members])
        counts = np.array([len(members) for members in SEQUENCES])
        found.references = References({"these": Known(np.arange(len(SEQUENCES)), counts, values)})
    return found


def answer_logps(model: Any, answers: list[tuple[Answer, Answer]]) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities and tokens of each answer, alone in the model: pairs × 2."""
    sums, tokens = [], []
    for answer in (one for pair in answers for one in pair):
        logits = model(input_ids=answer.tokens[None, :-1], use_cache=False).logits[0]
        chosen = torch.log_softmax(logits, -1).gather(1, answer.tokens[1:, None])[:, 0]
        sums.append(chosen[answer.prompt - 1 :].sum())
        tokens.append(len(answer.tokens) - answer.prompt)
    return torch.stack(sums).view(-1, 2), torch.tensor(tokens).view(-1, 2)


def published_loss(name: str, logps: Tensor, tokens: Tensor, reference: Tensor) -> Tensor:
    """The loss of each pair as in TRL 1.16, here in the order of its terms."""
    chosen, rejected = (logps / tokens if name in ("orpo", "simpo") else logps).unbind(-1)
    ratios = (logps - reference).unbind(-1)
    if name == "dpo":
        return -F.logsigmoid(BETA * (ratios[0] - ratios[1]))
    if name == "ipo":
        return (ratios[0] / tokens[:, 0] - ratios[1] / tokens[:, 1] - 1 / (2 * BETA)) ** 2
    if name == "simpo":
        return -F.logsigmoid(BETA * (chosen - rejected - GAMMA / BETA))
    log_odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen - BETA * F.logsigmoid(log_odds)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


def hold_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


@pytest.fixture(params=["plain", "chunked"])
def loss_impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 5 * VOCAB)  # five tokens at a time
    return str(request.param)


def pair_model(objective: Preference, model: Any, loss_impl: str = "plain", anatomy: Anatomy | None = None) -> Any:
    found = objective.module(model, anatomy or read_anatomy(model), loss_impl)
    assert isinstance(found, PairModel)
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
def test_packed_pairs_have_the_loss_and_gradients_of_single_answers(name: str, loss_impl: str) -> None:
    model, answers = drawn(small_config("llama")), make_answers()
    objective = objective_of(name, answers)
    batch = objective.collate(as_sequences(answers), np.arange(2), pad=0, multiple=8)
    found = pair_model(objective, model, loss_impl)(batch)
    sums = dict(zip(objective.sums, (one.item() for one in found.sums), strict=True))
    logps, tokens = answer_logps(model, answers)
    reference = torch.tensor([[one.reference for one in pair] for pair in answers])
    wanted = published_loss(name, logps, tokens, reference).sum()
    assert found.trained.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert sums["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert sums["weight"] == PAIRS == objective.weight(as_sequences(answers), np.arange(2))
    hold_equal(gradients(model, found.trained), gradients(model, wanted))

    shown = (logps / tokens if name in ("orpo", "simpo") else logps).detach()
    rewards = BETA * (shown if name in ("orpo", "simpo") else shown - reference)
    metrics = objective.metrics(sums)
    assert metrics == {
        "loss": pytest.approx(wanted.item() / PAIRS, rel=1e-5),
        **{f"rewards/{one}": pytest.approx(rewards[:, at].mean().item(), rel=1e-5) for at, one in enumerate(SIDES)},
        "rewards/accuracies": pytest.approx((rewards[:, 0] > rewards[:, 1]).double().mean().item()),
        "rewards/margins": pytest.approx((rewards[:, 0] - rewards[:, 1]).mean().item(), rel=1e-4),
        **{f"logps/{one}": pytest.approx(shown[:, at].mean().item(), rel=1e-5) for at, one in enumerate(SIDES)},
    }


SIDES = ("chosen", "rejected")


def test_a_head_that_is_more_than_one_matrix_gives_the_same() -> None:
    model, answers = drawn(small_config("llama")), make_answers()
    objective = objective_of("dpo", answers)
    batch = objective.collate(as_sequences(answers), np.arange(2), pad=0)
    wanted = pair_model(objective, model)(batch)
    found = pair_model(objective, model, anatomy=replace(read_anatomy(model), linear_head=False))(batch)
    assert found.trained.item() == pytest.approx(wanted.trained.item(), rel=1e-6)
    hold_equal(gradients(model, found.trained), gradients(model, wanted.trained))


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_chunked_gradients_in_fp16_do_not_underflow_before_the_loss_scale(scale: float) -> None:
    """Of a token whose probability is 1e-9: the gradient is below the smallest number of fp16 unless it is scaled."""
    hidden = torch.tensor([[16.0, 1.0]], dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [-0.25, 1.0]], dtype=torch.float16, requires_grad=True)
    losses = cross_entropy.chunked_token_losses(hidden, weight, torch.tensor([0]))
    (losses * scale).sum().backward()
    assert weight.grad is not None
    expected = scale * 16 * math.exp(16 * -0.25 + 1 - 16)
    assert weight.grad[1, 0].item() == pytest.approx(expected, rel=1e-2 if scale > 1 else 1.0)
    assert (weight.grad[1, 0].item() > 0) == (scale > 1)


def test_a_certain_answer_has_finite_odds() -> None:
    objective = objective_of("orpo", make_answers())
    logps = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    answers = SimpleNamespace(logps=logps, tokens=torch.ones(1, 2), mean=lambda sums: sums)
    loss = objective.pair_loss(answers).losses.sum()  # type: ignore[arg-type]
    loss.backward()
    assert loss.isfinite()
    assert logps.grad is not None
    assert logps.grad.isfinite().all()


class Accelerator:
    device = torch.device("cpu")

    def gather(self, values: Tensor) -> Tensor:
        return values

    gather_for_metrics = gather


def _trl_dpo(name: str, answers: list[tuple[Answer, Answer]], model: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.dpo_trainer import DPOTrainer

    rows = [pair[side] for side in (0, 1) for pair in answers]
    longest = max(len(one.tokens) for one in rows)
    inputs = torch.zeros(len(rows), longest, dtype=torch.long)
    attended, answered = torch.zeros_like(inputs), torch.zeros_like(inputs)
    for row, one in enumerate(rows):
        inputs[row, : len(one.tokens)] = one.tokens
        attended[row, : len(one.tokens)] = 1
        answered[row, one.prompt : len(one.tokens)] = 1

    def forward(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> Any:
        logits = model(input_ids=input_ids[:, :-1], use_cache=False).logits  # causal: padding on the right is not seen
        logps = torch.log_softmax(logits, -1).gather(2, input_ids[:, 1:, None])[..., 0]
        zeros = torch.zeros_like(logps)
        counted = logps.masked_fill(labels[:, 1:] == -100, 0.0)
        return SimpleNamespace(log_probs=counted, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    metrics: dict[str, Any] = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=Accelerator(), beta=BETA,
        loss_types=["sigmoid" if name == "dpo" else name], loss_weights=[1.0], f_divergence_type="reverse_kl",
        ld_alpha=None, precompute_ref_logps=True,
        use_weighting=False, aux_loss_enabled=False, _metrics=metrics, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    given = {
        "input_ids": inputs, "attention_mask": attended, "completion_mask": answered,
        "ref_chosen_logps": torch.tensor([pair[0].reference for pair in answers]),
        "ref_rejected_logps": torch.tensor([pair[1].reference for pair in answers]),
    }  # fmt: skip
    loss = DPOTrainer._compute_loss(trainer, forward, given, False)
    return loss, {key: sum(values) / len(values) for key, values in metrics["train"].items()}


def _trl_without_reference(
    name: str, answers: list[tuple[Answer, Answer]], model: Any
) -> tuple[Tensor, dict[str, float]]:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    logps, tokens = answer_logps(model, answers)
    chosen, rejected = (logps / tokens).unbind(-1)
    trainer = SimpleNamespace(
        accelerator=Accelerator(), beta=BETA, alpha=0.0, loss_type="simpo", simpo_gamma=GAMMA, label_smoothing=0.0
    )
    if name == "simpo":
        losses, *rewards = CPOTrainer.cpo_loss(trainer, chosen, rejected)
        loss = losses.mean()
    else:
        ratios, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(trainer, chosen, rejected)
        loss = -chosen.mean() - ratios.mean()
    return loss, {f"rewards/{one}": float(found.mean()) for one, found in zip(SIDES, rewards, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_gradients_and_metrics_are_those_of_trl(name: str, loss_impl: str) -> None:
    model, answers = drawn(small_config("llama")), make_answers()
    objective = objective_of(name, answers)
    batch = objective.collate(as_sequences(answers), np.arange(2), pad=0)
    found = pair_model(objective, model, loss_impl)(batch)
    reference = _trl_dpo if name in ("dpo", "ipo") else _trl_without_reference
    wanted, shown = reference(name, answers, model)
    assert found.trained.item() / PAIRS == pytest.approx(wanted.item(), rel=1e-5)
    hold_equal(gradients(model, found.trained / PAIRS), gradients(model, wanted))
    metrics = objective.metrics(dict(zip(objective.sums, (one.item() for one in found.sums), strict=True)))
    same = metrics.keys() & shown.keys()
    assert same >= {"rewards/chosen", "rewards/rejected"}
    assert {key: metrics[key] for key in same} == {key: pytest.approx(shown[key], rel=1e-4) for key in same}

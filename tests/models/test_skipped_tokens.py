"""Tokens without a label take no part in head and loss, where the host knows how many labels there are."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.models import cross_entropy
from shoal.models.cross_entropy import IGNORED, KEPT_SIZES, kept_tokens, measure_full_vocabulary
from shoal.models.loss import HeadAndLoss
from tests.models.test_loss import COMPUTES, make_case, on_cuda, plain_cross_entropy, with_gradients

SEQUENCES, LENGTH, WIDTH, WORDS = 3, 40, 16, 50


def labels_of(count: int, tokens: int = SEQUENCES * LENGTH) -> Tensor:
    """`count` labels, spread over the tokens."""
    labels = torch.full((tokens,), IGNORED)
    generator = torch.Generator().manual_seed(count)
    labels[torch.randperm(tokens, generator=generator)[:count]] = torch.arange(count) % WORDS
    return labels


def head_and_loss(kind: str) -> HeadAndLoss:
    torch.manual_seed(0)
    return HeadAndLoss(torch.nn.Linear(WIDTH, WORDS, bias=False), kind, None)


def hidden_states() -> Tensor:
    return torch.randn(SEQUENCES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("columns", [50, 64])
@pytest.mark.parametrize("compute", COMPUTES)
def test_a_loss_of_kept_tokens_equals_the_one_of_all(compute, columns, rows):
    case = make_case(ignored=0.7)
    kept = kept_tokens(case.labels, int((case.labels != IGNORED).sum()))
    assert kept is not None
    wanted = with_gradients(case, plain_cross_entropy, scale=0.37)
    found = with_gradients(case, partial(compute, rows=rows, columns=columns, kept=kept), scale=0.37)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_all_loss_tokens_are_kept_each_once_and_in_order():
    for count in range(110):
        labels = labels_of(count)
        kept = kept_tokens(labels, count)
        assert kept is not None
        found = kept[labels[kept] != IGNORED].tolist()
        assert found == (labels != IGNORED).nonzero().flatten().tolist()
        assert len(set(kept.tolist())) == len(kept)


def test_the_number_of_kept_tokens_has_few_values_close_to_the_count():
    tokens = 1000
    sizes = {count: kept_tokens(labels_of(count, tokens), count) for count in range(0, tokens, 7)}
    lengths = {count: tokens if kept is None else len(kept) for count, kept in sizes.items()}
    assert all(0 <= length - max(count, 1) < 1 + tokens / KEPT_SIZES for count, length in lengths.items())
    assert len(set(lengths.values())) <= KEPT_SIZES


def test_nothing_is_skipped_where_the_count_is_unknown_or_all():
    assert kept_tokens(labels_of(3), None) is None
    assert kept_tokens(labels_of(SEQUENCES * LENGTH), SEQUENCES * LENGTH) is None


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", ["plain", "chunked"])
@pytest.mark.parametrize("count", [0, 30])
def test_skipping_changes_neither_losses_nor_gradients(count, kind, per_token):
    labels = labels_of(count).view(SEQUENCES, LENGTH)
    results = []
    for loss_tokens in (None, count):
        module, hidden = head_and_loss(kind), hidden_states()
        losses = module(hidden, labels, per_token=per_token, loss_tokens=loss_tokens)
        (losses * torch.linspace(0.5, 2, losses.numel()).view_as(losses)).sum().backward()
        assert hidden.grad is not None
        results.append((losses.detach(), hidden.grad, module.head.weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("per_token", [False, True])
def test_logits_of_few_other_tokens_are_computed(per_token, monkeypatch):
    seen = []

    def measure(logits: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        seen.append(len(logits))
        return measure_full_vocabulary(logits, *given)

    monkeypatch.setattr(cross_entropy, "measure_full_vocabulary", measure)
    labels = labels_of(30).view(SEQUENCES, LENGTH)
    head_and_loss("chunked")(hidden_states(), labels, per_token=per_token, loss_tokens=30)
    assert 30 <= sum(seen) < 30 + SEQUENCES * LENGTH / KEPT_SIZES + 1


@on_cuda
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("kind", ["plain", "chunked"])
def test_the_host_does_not_wait_for_the_device(kind, per_token):
    module, hidden = head_and_loss(kind).cuda(), hidden_states().detach().cuda().requires_grad_()
    labels = labels_of(30).view(SEQUENCES, LENGTH).cuda()
    for check in ("default", "error"):  # the first call compiles kernels
        torch.cuda.set_sync_debug_mode(check)
        try:
            module(hidden, labels, per_token=per_token, loss_tokens=30).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

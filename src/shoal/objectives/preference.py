"""Preference tuning on pairs of a chosen and a rejected answer: DPO, IPO, ORPO and SimPO.

Both answers of a pair are documents of one sequence, the chosen one first, so that a pair is never divided between
micro-batches or ranks. Its loss is a function of the log-probabilities of both answers, which are sums over tokens: the
gradients of tokens are known only after all of them, and chunks of logits are computed again in the backward pass.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.catalogue.objectives import objective_facts
from shoal.config.reference import computes_before, switches_adapter_off
from shoal.config.schema import Config
from shoal.data.loader import MicroBatch, collate_next_token
from shoal.data.sequences import DOCUMENT, Sequences
from shoal.models.adapters import without_adapters
from shoal.models.anatomy import Anatomy
from shoal.models.cross_entropy import IGNORED, Measure
from shoal.models.loss import LanguageModel, LossSums
from shoal.models.loss import MicroBatch as Batch
from shoal.objectives.pair_losses import PAIR_LOSSES, Answers, Compared, PairLoss
from shoal.objectives.references import References


class Preference:
    """`train.objective: dpo`, `ipo`, `orpo` or `simpo`; see `objectives.unpaired` for answers without a pair."""

    counted = "pairs"  # what `weight` counts
    documents = 2  # of each
    sums: tuple[str, ...] = (
        "loss",
        "weight",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "logps/chosen",
        "logps/rejected",
    )

    def __init__(self, config: Config) -> None:
        facts = objective_facts(config.train.objective)
        given = config.train.preference.model_dump()
        options = {key: default if given[key] is None else given[key] for key, default in facts.options}
        self.name = facts.name
        self.pair_loss: PairLoss = partial(PAIR_LOSSES[self.name], **options)
        self.switches_adapters, self.precomputes = switches_adapter_off(config), computes_before(config)
        self.references: References | None = None  # set before the first step

    def collate(
        self,
        sequences: Sequences,
        sequence_ids: np.ndarray,
        *,
        pad: int,
        length: int | None = None,
        multiple: int = 1,
        positions: np.ndarray | None = None,
    ) -> MicroBatch:
        batch = collate_next_token(sequences, sequence_ids, pad=pad, length=length, multiple=multiple)
        counts = self.count(sequences, sequence_ids)
        reference = torch.zeros(len(counts), int(counts.max()), 2, dtype=torch.float64)
        if self.references is not None:
            for row, (index, count) in enumerate(zip(sequence_ids.tolist(), counts.tolist(), strict=True)):
                reference[row, :count] = torch.from_numpy(self.references.of(sequences, index))
        return replace(batch, reference=reference)

    def weight(self, sequences: Sequences, sequence_ids: np.ndarray) -> int:
        return int(self.count(sequences, sequence_ids).sum())

    def count(self, sequences: Sequences, sequence_ids: np.ndarray) -> np.ndarray:
        """The pairs in each of these sequences."""
        flags = (sequences[int(one)][1] for one in sequence_ids.reshape(-1))
        return np.array([np.count_nonzero(one & DOCUMENT) // self.documents for one in flags])

    def module(
        self,
        model: Any,
        anatomy: Anatomy,
        loss: str,
        measure: Measure | None = None,
        *,
        skips_tiles: bool = False,
        matmul_dtype: torch.dtype | None = None,
    ) -> LanguageModel:
        kind = self.model_class()
        found = kind(model, anatomy, loss, measure, skips_tiles=skips_tiles, matmul_dtype=matmul_dtype)
        found.pair_loss, found.switches_adapters = self.pair_loss, self.switches_adapters
        return found

    def model_class(self) -> "type[PairModel]":
        return PairModel

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        found = {name: sums[name] / max(sums["weight"], 1.0) for name in self.sums if name != "weight"}
        return found | {"rewards/margins": found["rewards/chosen"] - found["rewards/rejected"]}


class PairModel(LanguageModel):
    """A language model with the loss of its pairs."""

    pair_loss: PairLoss
    switches_adapters: bool  # the reference is this model without its adapters
    scores: list[Tensor] | None = (
        None  # if a list, log-probabilities of each micro-batch are appended: batch × pairs × 2
    )

    def forward(self, batch: Batch) -> LossSums:
        if self.switches_adapters:
            batch = replace(batch, reference=self._without_adapters(batch))  # type: ignore[type-var]
        return self._compare(self._token_losses(batch), batch)

    def losses(self, hidden: Tensor, batch: Batch) -> LossSums:
        return self._compare(self._hidden_losses(hidden, batch), batch)

    def losses_of_logits(self, logits: Tensor, batch: Batch) -> LossSums:
        return self._compare(self.head_and_loss.losses_of_logits(logits, batch.labels), batch)

    def _token_losses(self, batch: Batch) -> Tensor:
        inputs = {"input_ids": batch.inputs, **self.model_kwargs(batch)}
        if self.anatomy.linear_head:
            return self._hidden_losses(self.hidden(inputs), batch)
        return self.head_and_loss.losses_of_logits(self.logits(inputs), batch.labels)

    def _hidden_losses(self, hidden: Tensor, batch: Batch) -> Tensor:
        found: Tensor = self.head_and_loss(hidden, batch.labels, per_token=True, loss_tokens=batch.loss_tokens)
        return found

    @torch.no_grad()
    def _without_adapters(self, batch: Batch) -> Tensor:
        """The log-probabilities of the base model, without dropout."""
        training = self.training
        self.eval()
        with without_adapters(self.model):
            found = self._answers(self._token_losses(batch), batch)
        self.train(training)
        return found.logps

    def _compare(self, token_losses: Tensor, batch: Batch) -> LossSums:
        answers = self._answers(token_losses, batch)
        if self.scores is not None:
            self.scores.append(answers.logps.detach())
        found = self.pair_loss(answers)
        loss, reported = self._sum(found, answers.tokens > 0)
        sums = (loss.detach(), *reported)
        if self.sequence_group is not None and dist.get_rank(self.sequence_group) > 0:
            sums = tuple(torch.zeros_like(one) for one in sums)  # the first of the ranks has them
        return LossSums(loss.float(), sums)

    def _sum(self, found: Compared, present: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The summed loss, and the other sums of the objective. `present`: which answers have tokens, … × 2."""
        counted = present.all(dim=-1)  # others fill up the micro-batch
        rewards, logps = found.rewards.detach(), found.logps.detach()
        reported = (
            *rewards.unbind(-1),
            (rewards[..., 0] > rewards[..., 1]).double(),
            *logps.unbind(-1),
        )
        loss = torch.where(counted, found.losses, 0.0).sum()
        return loss, (counted.sum(), *(torch.where(counted, one, 0.0).sum() for one in reported))

    def _answers(self, token_losses: Tensor, batch: Batch) -> Answers:
        """The answers of a micro-batch, of which this rank may have only some of the tokens."""
        found = _answers_here(token_losses, batch)
        if self.sequence_group is None:
            return found
        both = torch.stack([found.logps.detach(), found.tokens])
        dist.all_reduce(both, group=self.sequence_group)
        # Each rank differentiates the whole loss with respect to its own tokens.
        return Answers(found.logps + (both[0] - found.logps.detach()), found.reference, both[1])


def _answers_here(token_losses: Tensor, batch: Batch) -> Answers:
    """The log-probabilities of a micro-batch's answers: documents 2k and 2k + 1 of a sequence are its pair k."""
    documents, reference = batch.documents, batch.reference
    assert documents is not None, "sequences of pairs are collated with documents"
    assert reference is not None
    sequences, pairs, _ = reference.shape
    width = 2 * pairs + 1  # and one for the padding, which is a document of its own
    first = width * torch.arange(sequences, device=documents.device)
    slots = (documents.clamp(max=2 * pairs) + first[:, None]).flatten()
    empty = torch.zeros(sequences * width, dtype=torch.float64, device=documents.device)

    def per_answer(values: Tensor) -> Tensor:
        return (
            empty.index_add(0, slots, values.double().flatten()).view(sequences, width)[:, :-1].reshape(reference.shape)
        )

    return Answers(per_answer(-token_losses), reference, per_answer(batch.labels != IGNORED))

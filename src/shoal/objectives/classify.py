"""Classification: one class for each example, by cross-entropy; accuracy and macro-F1 over all examples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.config.schema import Config
from shoal.data.loader import MicroBatch
from shoal.data.sequences import Sequences
from shoal.models.anatomy import Anatomy
from shoal.models.cross_entropy import IGNORED, Measure
from shoal.models.loss import LossSums
from shoal.models.loss import MicroBatch as Batch
from shoal.objectives.encoder import EncoderModel, collate_examples

# Counted for each class: examples of it, examples that are taken for it, and those of which both are true.
COUNTS = ("labelled", "predicted", "correct")


class Classify:
    """`train.objective: classify`."""

    name = "classify"
    counted = "examples"  # what `weight` counts

    def __init__(self, config: Config, classes: Sequence[str] = ()) -> None:
        self.classes = tuple(classes)
        self.sums = ("loss", "weight", *(f"{count}/{name}" for count in COUNTS for name in self.classes))

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
        batch = collate_examples(sequences, sequence_ids, pad=pad, length=length, multiple=multiple)
        labels = sequences.labels(sequence_ids).astype(np.int64)
        batch.labels = torch.from_numpy(labels[:, None])  # one for each example
        return batch

    def weight(self, sequences: Sequences, sequence_ids: np.ndarray) -> int:
        return int(sequence_ids.size)

    def module(
        self,
        model: Any,
        anatomy: Anatomy,
        loss: str,
        measure: Measure | None = None,
        *,
        skips_tiles: bool = False,
        matmul_dtype: torch.dtype | None = None,
    ) -> EncoderModel:
        found = Classifier(model, anatomy, loss, measure, matmul_dtype=matmul_dtype)
        found.classes = len(self.classes)
        return found

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        weight = max(sums["weight"], 1.0)
        labelled, predicted, correct = (
            np.array([sums[f"{count}/{name}"] for name in self.classes], dtype=np.float64) for count in COUNTS
        )
        return {
            "loss": sums["loss"] / weight,
            "accuracy": float(correct.sum()) / weight,
            "macro_f1": macro_f1(labelled, predicted, correct),
        }


def macro_f1(labelled: np.ndarray, predicted: np.ndarray, correct: np.ndarray) -> float:
    """The mean of F1 over the classes that an example has or was taken for, as in scikit-learn."""
    present = (labelled + predicted) > 0
    if not present.any():
        return 0.0
    return float(np.mean(2 * correct[present] / (labelled + predicted)[present]))


class Classifier(EncoderModel):
    """An encoder with a classification head, and the cross-entropy of each example."""

    classes: int  # 0: they are not counted

    def forward(self, batch: Batch) -> LossSums:
        return self.losses_of_logits(self.logits({"input_ids": batch.inputs, **self.model_kwargs(batch)}), batch)

    def losses_of_logits(self, logits: Tensor, batch: Batch) -> LossSums:
        labels = batch.labels.flatten()
        loss = self.head_and_loss.loss_of_logits(logits[None], labels[None])
        counted = labels != IGNORED
        sums: tuple[Tensor, ...] = (loss.detach(), counted.sum())
        if self.classes:
            found = logits.detach().argmax(-1)
            taken = (labels.clamp(min=0), found, torch.where(found == labels, found, 0))
            which = (counted, counted, counted & (found == labels))
            empty = torch.zeros(self.classes, dtype=torch.int64, device=labels.device)
            counts = [empty.index_add(0, one, some.long()) for one, some in zip(taken, which, strict=True)]
            sums = (*sums, torch.cat(counts))
        return LossSums(loss, sums)

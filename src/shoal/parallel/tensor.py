"""Tensor parallelism: each rank holds some heads, a shard of the MLP's intermediate size and a shard of the vocabulary.

Between the matrices a rank holds a shard of the sequence (sequence parallelism): an all-gather follows each norm, and a
reduce-scatter follows each row-parallel matmul. That is two all-gathers and two reduce-scatters per block in each
direction. A replicated parameter (a norm, or a bias after a reduce-scatter) sees a shard of the tokens on each rank, so
its gradient is partial and must be summed over the group at the end of a step.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.catalogue.families import find_plan
from shoal.catalogue.family import Plan
from shoal.models.adapters import DOWN, UP
from shoal.models.anatomy import Anatomy
from shoal.models.cross_entropy import IGNORED
from shoal.models.head import gradient_scale
from shoal.models.tensor_slices import Split
from shoal.parallel.collectives import all_gather, local_chunk, reduce_scatter
from shoal.parallel.patch import patch
from shoal.plan.check import check_tensor_sizes

SEQUENCE = 1  # activations are [batch, sequence, hidden]


def check_tensor_parallel(model: Any, degree: int) -> None:
    """Raise a UserMistake unless `model` supports tensor parallelism of `degree`."""
    if degree == 1:
        return
    find_plan(model.config.model_type, "parallel.tp")
    settings = model.config.get_text_config()
    heads = settings.num_attention_heads
    counts = {
        "attention heads": heads,
        "key and value heads": getattr(settings, "num_key_value_heads", None) or heads,
        "MLP columns": _intermediate_size(model),
    }
    check_tensor_sizes(degree, counts)


def row_parallel_widths(model: Any, anatomy: Anatomy) -> dict[str, int]:
    """The weights that would be split along their last dimension, and the size of that dimension."""
    plan = find_plan(model.config.model_type, "parallel.tp")
    found = {}
    for name in anatomy.blocks:
        for matrix in (*plan.column, *plan.row):
            linear: Any = model.get_submodule(f"{name}.{matrix}")
            if (matrix in plan.row) == isinstance(linear, nn.Linear):  # Conv1D stores its weight transposed
                found[f"{name}.{matrix}.weight"] = linear.weight.shape[1] // plan.fused.get(matrix, 1)
    return found


def split_tensors(model: Any, anatomy: Anatomy, group: dist.ProcessGroup) -> dict[str, Split]:
    """Split `model`, which is on meta, in place; returns the split of each parameter that is not replicated."""
    plan = find_plan(model.config.model_type, "parallel.tp")
    splits: dict[str, Split] = {}
    for name in anatomy.blocks:
        _split_block(model.get_submodule(name), name, plan, group, splits)
    _split_embedding_and_head(model, anatomy, plan, group, splits)
    return splits


def _intermediate_size(model: Any) -> int:
    settings = model.config.get_text_config()
    width: int = getattr(settings, "intermediate_size", None) or 4 * settings.hidden_size
    return width


def _split_block(block: nn.Module, name: str, plan: Plan, group: dist.ProcessGroup, splits: dict[str, Split]) -> None:
    for column in plan.column:
        linear: Any = block.get_submodule(column)
        dimension = 0 if isinstance(linear, nn.Linear) else 1  # Conv1D stores its weight transposed
        fused = plan.fused.get(column, 1)
        for key, at in (("weight", dimension), ("bias", 0)):
            _split_parameter(linear, key, f"{name}.{column}", at, fused, group, splits)
        if UP in linear._modules:
            _split_parameter(linear.lora_B, "weight", f"{name}.{column}.{UP}", 0, fused, group, splits)
        if not isinstance(linear, nn.Linear):
            linear.nf = linear.weight.shape[1]
            if fused > 1:  # GPT-2's attention splits the fused q, k and v by a stored size
                attention: Any = block.get_submodule(column.rsplit(".", 1)[0])
                attention.split_size = linear.nf // fused
    for row in plan.row:
        linear = block.get_submodule(row)
        is_linear = isinstance(linear, nn.Linear)
        _split_parameter(linear, "weight", f"{name}.{row}", 1 if is_linear else 0, 1, group, splits)
        if DOWN in linear._modules:
            _split_parameter(linear.lora_A, "weight", f"{name}.{row}.{DOWN}", 1, 1, group, splits)
        patch(linear, RowParallel, tensor_group=group, transposed=not is_linear)
    for norm in plan.norms:
        patch(block.get_submodule(norm), _GatherOutput, tensor_group=group)


def _split_embedding_and_head(
    model: Any, anatomy: Anatomy, plan: Plan, group: dist.ProcessGroup, splits: dict[str, Split]
) -> None:
    """Embedding and head by vocabulary, tied or not; final norm and position embedding by sequence.

    A pipeline stage has only some of these.
    """
    embedding, head = model.get_submodule(anatomy.embedding), model.get_submodule(anatomy.head)
    if "weight" in embedding._parameters:
        _split_parameter(embedding, "weight", anatomy.embedding, 0, 1, group, splits)
        ((start, _),) = splits[f"{anatomy.embedding}.weight"].spans
        patch(embedding, _VocabularyParallel, tensor_group=group, first_token=start)
    if "weight" in head._parameters:
        if anatomy.tied:
            head.weight = embedding.weight
        else:
            _split_parameter(head, "weight", anatomy.head, 0, 1, group, splits)
    assert anatomy.final_norm is not None, "every family that has a plan has a final norm"
    final_norm = model.get_submodule(anatomy.final_norm)
    if final_norm._parameters:
        patch(final_norm, _GatherOutput, tensor_group=group)
    if plan.positions is not None:
        positions = model.get_submodule(anatomy.backbone).get_submodule(plan.positions)
        if positions._parameters:
            patch(positions, _ShardOutput, tensor_group=group)


def _split_parameter(
    module: nn.Module,
    key: str,
    name: str,
    dimension: int,
    fused: int,
    group: dist.ProcessGroup,
    splits: dict[str, Split],
) -> None:
    """Replace a parameter with this rank's shard. `fused` concatenated matrices are each split."""
    whole = module._parameters.get(key)
    if whole is None:
        return
    assert whole.is_meta, "models are split before they are materialized"
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    width = whole.shape[dimension] // fused
    start, end = width * rank // size, width * (rank + 1) // size
    spans = tuple((one * width + start, end - start) for one in range(fused))
    split = Split(dimension, whole.shape[dimension], spans)
    part = torch.empty(split.part_shape(whole.shape), dtype=whole.dtype, device="meta")
    module._parameters[key] = nn.Parameter(part, requires_grad=whole.requires_grad)
    splits[f"{name}.{key}"] = split


class _GatherOutput:
    """A norm of this rank's tokens, followed by an all-gather of the sequence."""

    tensor_group: dist.ProcessGroup

    def forward(self, inputs: Tensor) -> Tensor:
        return all_gather(super().forward(inputs), SEQUENCE, self.tensor_group)  # type: ignore[misc]


class RowParallel:
    """A linear layer split along its inputs: a partial matmul, a reduce-scatter, and then the bias."""

    tensor_group: dist.ProcessGroup
    transposed: bool  # GPT-2's Conv1D stores its weight transposed
    weight: Tensor
    bias: Tensor | None

    def forward(self, inputs: Tensor) -> Tensor:
        result = reduce_scatter(self.matmul(inputs), SEQUENCE, self.tensor_group)
        return result if self.bias is None else result + self.bias

    def matmul(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.t() if self.transposed else self.weight)


class _VocabularyParallel:
    """An embedding split by vocabulary: zero for the tokens of other ranks, followed by a reduce-scatter."""

    tensor_group: dist.ProcessGroup
    first_token: int
    weight: Tensor
    padding_idx: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        local, size = tokens - self.first_token, self.weight.shape[0]
        here = (local >= 0) & (local < size)
        padding = None  # a token whose embedding is not trained
        if self.padding_idx is not None and 0 <= self.padding_idx - self.first_token < size:
            padding = self.padding_idx - self.first_token
        found = F.embedding(local * here, self.weight, padding) * here.unsqueeze(-1)
        return reduce_scatter(found, SEQUENCE, self.tensor_group)


class _ShardOutput:
    """A replicated position embedding, of this rank's shard of the sequence."""

    tensor_group: dist.ProcessGroup

    def forward(self, positions: Tensor) -> Tensor:
        return local_chunk(super().forward(positions), SEQUENCE, self.tensor_group)  # type: ignore[misc]


@dataclass(frozen=True)
class VocabularyShard:
    """Cross-entropy of logits that are split along the vocabulary: this rank's shard begins at `start`. Implements
    `models.loss.Measure`."""

    start: int
    group: dist.ProcessGroup

    def __call__(self, logits: Tensor, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
        given, logits = logits, logits[:, :width].to(torch.float32, copy=True)
        highest = logits.max(dim=-1).values
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
        local = labels - self.start
        here = (local >= 0) & (local < width)
        index = torch.where(here, local, 0)[:, None]
        label_logits = torch.where(here, logits.gather(1, index).squeeze(1), 0.0)
        probabilities = logits.sub_(highest[:, None]).exp_()
        # Two sums in one all-reduce: of the exponentials, and of the label's logit, which is on one rank only.
        sums = torch.stack([probabilities.sum(dim=-1), label_logits])
        dist.all_reduce(sums, group=self.group)
        counted = labels != IGNORED
        losses = torch.where(counted, sums[0].log() + highest - sums[1], 0.0)
        probabilities.div_(sums[0][:, None])
        probabilities.scatter_add_(1, index, -here.to(probabilities.dtype)[:, None])
        grad_logits = torch.empty_like(given)
        grad_logits[:, :width] = probabilities.mul_(counted[:, None] * gradient_scale(given.dtype))
        grad_logits[:, width:] = 0  # padding
        return losses, grad_logits

"""Tensor parallelism: each rank holds some heads, some of the MLP's width and some of the vocabulary.

Between the matrices a rank holds its part of the sequence (sequence parallelism): after each norm the sequence is
gathered, and what comes out of a row-cut matrix is summed and scattered again. Four exchanges a block and direction
two by two: gathers and scatters. Everything that is not cut (norms, biases after a sum) sees a part of the tokens on
each rank, so its gradient is partial and must be summed over the group at the end of a step.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy
from shoal.models.tensor_slices import Split
from shoal.parallel.collectives import gather, own_part, reduce_scatter
from shoal.parallel.patch import patch
from shoal.parallel.plans import Plan, find_plan

SEQUENCE = 1  # activations are rows × sequence × hidden


def check_tensor_parallel(model: Any, degree: int) -> None:
    """Raise a UserMistake unless `model` can be cut `degree` ways."""
    if degree == 1:
        return
    find_plan(model, "parallel.tp")
    settings = model.config.get_text_config()
    heads = settings.num_attention_heads
    counts = {
        "attention heads": heads,
        "key and value heads": getattr(settings, "num_key_value_heads", None) or heads,
        "MLP columns": _inner_width(model),
    }
    for what, count in counts.items():
        if count % degree:
            fitting = max(one for one in range(1, degree) if all(each % one == 0 for each in counts.values()))
            raise UserMistake(
                f"parallel.tp {degree} does not divide the model's {count} {what}; the next smaller that does is "
                f"{fitting}."
            )


def row_parallel_widths(model: Any, anatomy: Anatomy) -> dict[str, int]:
    """The weights that would be cut along their last dimension, and the length of what is divided there."""
    plan = find_plan(model, "parallel.tp")
    found = {}
    for name in anatomy.blocks:
        for matrix in (*plan.column, *plan.row):
            linear: Any = model.get_submodule(f"{name}.{matrix}")
            if (matrix in plan.row) == isinstance(linear, nn.Linear):  # Conv1D holds its matrix the other way round
                found[f"{name}.{matrix}.weight"] = linear.weight.shape[1] // plan.fused.get(matrix, 1)
    return found


def split_tensors(model: Any, anatomy: Anatomy, group: dist.ProcessGroup) -> dict[str, Split]:
    """Cut `model`, which is on meta, in place; returns how each parameter that was cut lies in the whole."""
    plan = find_plan(model, "parallel.tp")
    splits: dict[str, Split] = {}
    for name in anatomy.blocks:
        _split_block(model.get_submodule(name), name, plan, group, splits)
    _split_ends(model, anatomy, plan, group, splits)
    return splits


def _inner_width(model: Any) -> int:
    settings = model.config.get_text_config()
    width: int = getattr(settings, "intermediate_size", None) or 4 * settings.hidden_size
    return width


def _split_block(block: nn.Module, name: str, plan: Plan, group: dist.ProcessGroup, splits: dict[str, Split]) -> None:
    for column in plan.column:
        linear: Any = block.get_submodule(column)
        dimension = 0 if isinstance(linear, nn.Linear) else 1  # Conv1D holds its matrix the other way round
        fused = plan.fused.get(column, 1)
        for key, at in (("weight", dimension), ("bias", 0)):
            _cut(linear, key, f"{name}.{column}", at, fused, group, splits)
        if not isinstance(linear, nn.Linear):
            linear.nf = linear.weight.shape[1]
            if fused > 1:  # GPT-2's attention cuts its fused result into pieces of a size it remembers
                attention: Any = block.get_submodule(column.rsplit(".", 1)[0])
                attention.split_size = linear.nf // fused
    for row in plan.row:
        linear = block.get_submodule(row)
        is_linear = isinstance(linear, nn.Linear)
        _cut(linear, "weight", f"{name}.{row}", 1 if is_linear else 0, 1, group, splits)
        patch(linear, RowParallel, tensor_group=group, transposed=not is_linear)
    for norm in plan.norms:
        patch(block.get_submodule(norm), _GatheredAfter, tensor_group=group)


def _split_ends(model: Any, anatomy: Anatomy, plan: Plan, group: dist.ProcessGroup, splits: dict[str, Split]) -> None:
    """Embedding and head by vocabulary, tied or not; final norm and learned positions by sequence.

    A stage of a pipeline has some of these only.
    """
    embedding, head = model.get_submodule(anatomy.embedding), model.get_submodule(anatomy.head)
    if "weight" in embedding._parameters:
        _cut(embedding, "weight", anatomy.embedding, 0, 1, group, splits)
        ((start, _),) = splits[f"{anatomy.embedding}.weight"].spans
        patch(embedding, _VocabularyParallel, tensor_group=group, first_token=start)
    if "weight" in head._parameters:
        if anatomy.tied:
            head.weight = embedding.weight
        else:
            _cut(head, "weight", anatomy.head, 0, 1, group, splits)
    assert anatomy.final_norm is not None, "every family that has a plan has a final norm"
    final_norm = model.get_submodule(anatomy.final_norm)
    if final_norm._parameters:
        patch(final_norm, _GatheredAfter, tensor_group=group)
    if plan.positions is not None:
        positions = model.get_submodule(anatomy.backbone).get_submodule(plan.positions)
        if positions._parameters:
            patch(positions, _OwnPart, tensor_group=group)


def _cut(
    module: nn.Module,
    key: str,
    name: str,
    dimension: int,
    fused: int,
    group: dist.ProcessGroup,
    splits: dict[str, Split],
) -> None:
    """Replace a parameter by this rank's part. `fused` matrices side by side are each cut."""
    whole = module._parameters.get(key)
    if whole is None:
        return
    assert whole.is_meta, "models are cut before they have memory"
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    width = whole.shape[dimension] // fused
    start, end = width * rank // size, width * (rank + 1) // size
    spans = tuple((one * width + start, end - start) for one in range(fused))
    split = Split(dimension, whole.shape[dimension], spans)
    part = torch.empty(split.part_shape(whole.shape), dtype=whole.dtype, device="meta")
    module._parameters[key] = nn.Parameter(part, requires_grad=whole.requires_grad)
    splits[f"{name}.{key}"] = split


class _GatheredAfter:
    """A norm: of this rank's tokens; then everybody's."""

    tensor_group: dist.ProcessGroup

    def forward(self, inputs: Tensor) -> Tensor:
        return gather(super().forward(inputs), SEQUENCE, self.tensor_group)  # type: ignore[misc]


class RowParallel:
    """A matrix cut along its inputs: each rank's share of the products, summed; the bias is added once, after that."""

    tensor_group: dist.ProcessGroup
    transposed: bool  # GPT-2's Conv1D holds its matrix the other way round
    weight: Tensor
    bias: Tensor | None

    def forward(self, inputs: Tensor) -> Tensor:
        result = reduce_scatter(self.product(inputs), SEQUENCE, self.tensor_group)
        return result if self.bias is None else result + self.bias

    def product(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.t() if self.transposed else self.weight)


class _VocabularyParallel:
    """An embedding: vectors of the tokens that this rank has, zero for the others; summed, each keeps its part."""

    tensor_group: dist.ProcessGroup
    first_token: int
    weight: Tensor
    padding_idx: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        local, size = tokens - self.first_token, self.weight.shape[0]
        here = (local >= 0) & (local < size)
        padding = None  # a token whose vector does not learn
        if self.padding_idx is not None and 0 <= self.padding_idx - self.first_token < size:
            padding = self.padding_idx - self.first_token
        found = F.embedding(local * here, self.weight, padding) * here.unsqueeze(-1)
        return reduce_scatter(found, SEQUENCE, self.tensor_group)


class _OwnPart:
    """An embedding of positions, which every rank has whole: of its own part of the sequence."""

    tensor_group: dist.ProcessGroup

    def forward(self, positions: Tensor) -> Tensor:
        return own_part(super().forward(positions), SEQUENCE, self.tensor_group)  # type: ignore[misc]

"""Split a model into pipeline stages: each is the same transformers model without the modules of the other stages.

Blocks keep their indices and parameters their names, so that weights, checkpoints and name patterns are unaffected.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from shoal.catalogue.families import find_plan
from shoal.models.anatomy import Anatomy, matmul_parameters
from shoal.parallel.parallel_dims import ParallelDims
from shoal.plan.check import check_rounds, check_stages
from shoal.plan.run.stages import divide_blocks


class OnAnotherStage(nn.Module):
    """Replaces a module that another stage holds: returns its input."""

    def forward(self, given: Tensor, *_: Any, **__: Any) -> Tensor:
        return given


class AddsNothing(nn.Module):
    """Replaces a position embedding, which the first stage has already added: returns zero."""

    def forward(self, given: Tensor) -> Tensor:
        return given.new_zeros(1)


@dataclass(frozen=True)
class StageModel:
    """One pipeline stage, on meta."""

    index: int
    count: int
    model: Any
    anatomy: Anatomy  # of this stage

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def blocks(self) -> list[nn.Module]:
        return self.anatomy.block_modules(self.model)

    @property
    def final_norm(self) -> list[nn.Module]:
        """Empty if the model has no final norm, or if another stage holds it."""
        name = self.anatomy.final_norm
        return [self.model.get_submodule(name)] if name is not None and self.is_last else []


def stages_per_rank(schedule: str) -> int:
    """Pipeline stages on each pipeline rank."""
    return 1 if schedule == "1f1b" else 2


def check_pipeline(model: Any, anatomy: Anatomy, devices: int, schedule: str, grad_accum_steps: int) -> None:
    """Raise a UserMistake unless `model` can be split into stages for `devices`, and `grad_accum_steps` micro-batches
    fit the schedule."""
    if devices == 1:
        return
    find_plan(model.config.model_type, "parallel.pp")
    check_stages(devices, schedule, len(anatomy.blocks), stages_per_rank(schedule))
    check_rounds(devices, schedule, grad_accum_steps)


def stages_of_rank(model: Any, anatomy: Anatomy, schedule: str, parallel_dims: ParallelDims) -> list[StageModel]:
    """The part of `model` that runs on this rank: all of it, or this rank's pipeline stages."""
    devices = parallel_dims.mesh.pp
    if devices == 1:
        return [StageModel(0, 1, model, anatomy)]
    if anatomy.tied:
        _ = parallel_dims.embedding_group  # creating a group is collective: also for the stages between
    per_rank = stages_per_rank(schedule)
    indices = [parallel_dims.coordinate["pp"] + devices * turn for turn in range(per_rank)]
    return split_stages(model, anatomy, indices, devices * per_rank)


def split_stages(model: Any, anatomy: Anatomy, indices: list[int], count: int) -> list[StageModel]:
    """Split `model`, which is on meta, into `count` stages; returns those in `indices`, each a model of its own."""
    plan = find_plan(model.config.model_type, "parallel.pp")
    parameters = dict(model.named_parameters())
    head = parameters[f"{anatomy.embedding if anatomy.tied else anatomy.head}.weight"].numel()
    block = (matmul_parameters(parameters, anatomy) - head) / len(anatomy.blocks)
    blocks_of_stage = divide_blocks(len(anatomy.blocks), count, head / block)
    stages = []
    for index in indices:
        part = copy.deepcopy(model)
        backbone = part.get_submodule(anatomy.backbone)
        here = {anatomy.blocks[number] for number in blocks_of_stage[index]}
        for name in anatomy.blocks:
            if name not in here:
                part.set_submodule(name, OnAnotherStage())
        first, last = index == 0, index == count - 1
        # The first and the last stage both hold a tied weight: as the embedding, and as the head.
        if not first and not (last and anatomy.tied):
            part.set_submodule(anatomy.embedding, OnAnotherStage())
        if not last and not (first and anatomy.tied):
            part.set_submodule(anatomy.head, OnAnotherStage())
        if not last and anatomy.final_norm is not None:
            part.set_submodule(anatomy.final_norm, OnAnotherStage())
        if not first:
            for name in plan.entry:
                backbone.set_submodule(name, OnAnotherStage())
            if plan.positions is not None:
                backbone.set_submodule(plan.positions, AddsNothing())
        blocks = tuple(name for name in anatomy.blocks if name in here)
        stages.append(StageModel(index, count, part, replace(anatomy, blocks=blocks)))
    return stages

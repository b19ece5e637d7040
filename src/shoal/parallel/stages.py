"""A model cut into stages of a pipeline: the same transformers model, with what other stages do taken out.

Blocks keep their numbers and parameters their names, so weights, checkpoints and patterns need not know of the cut.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy, matmul_parameters
from shoal.parallel.plans import find_plan
from shoal.plan.stages import divide_blocks


class Elsewhere(nn.Module):
    """In the place of a part that another stage has: hands on what it is given."""

    def forward(self, given: Tensor, *_: Any, **__: Any) -> Tensor:
        return given


class Nothing(nn.Module):
    """In the place of an embedding that was added before the first block: adds nothing."""

    def forward(self, given: Tensor) -> Tensor:
        return given.new_zeros(1)


@dataclass(frozen=True)
class StageModel:
    """One stage of a pipeline, on meta."""

    index: int
    count: int
    model: Any
    anatomy: Anatomy  # of the parts that are here

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def stages_each(schedule: str) -> int:
    """Stages of the pipeline on each device."""
    return 1 if schedule == "1f1b" else 2


def check_pipeline(model: Any, anatomy: Anatomy, devices: int, schedule: str, grad_accum_steps: int) -> None:
    """Raise a UserMistake unless `model` can be split into stages for `devices`, with `grad_accum_steps` micro-batches."""
    if devices == 1:
        return
    find_plan(model, "parallel.pp")
    blocks, stages = len(anatomy.blocks), devices * stages_each(schedule)
    if blocks < stages:
        other = "" if schedule == "1f1b" else ", or use parallel.pp_schedule 1f1b, which has one stage a device"
        raise UserMistake(
            f"parallel.pp {devices} with pp_schedule {schedule} makes {stages} stages, but the model has {blocks} "
            f"blocks, and each stage needs one; lower parallel.pp to {max(1, blocks // stages_each(schedule))}{other}."
        )
    rounds = max(1, grad_accum_steps // devices)
    if schedule != "1f1b" and grad_accum_steps % rounds:
        raise UserMistake(
            f"pp_schedule {schedule} runs micro-batches in rounds of equal size, and {grad_accum_steps} of them cannot be "
            f"divided into {rounds}; change train.global_batch or micro_batch so that there are {devices * rounds} or "
            f"{devices * (rounds + 1)}, or use pp_schedule 1f1b."
        )


def split_stages(model: Any, anatomy: Anatomy, indices: list[int], count: int) -> list[StageModel]:
    """The stages `indices` of `count` of `model`, which is on meta. Each is a model of its own."""
    plan = find_plan(model, "parallel.pp")
    parameters = dict(model.named_parameters())
    head = parameters[f"{anatomy.embedding if anatomy.tied else anatomy.head}.weight"].numel()
    block = (matmul_parameters(parameters, anatomy) - head) / len(anatomy.blocks)
    divided = divide_blocks(len(anatomy.blocks), count, head / block)
    stages = []
    for index in indices:
        part = copy.deepcopy(model)
        backbone = part.get_submodule(anatomy.backbone)
        here = {anatomy.blocks[number] for number in divided[index]}
        for name in anatomy.blocks:
            if name not in here:
                part.set_submodule(name, Elsewhere())
        first, last = index == 0, index == count - 1
        # Both ends hold a tied embedding: the first looks tokens up in it, the last makes logits with it.
        if not first and not (last and anatomy.tied):
            part.set_submodule(anatomy.embedding, Elsewhere())
        if not last and not (first and anatomy.tied):
            part.set_submodule(anatomy.head, Elsewhere())
        if not last and anatomy.final_norm is not None:
            part.set_submodule(anatomy.final_norm, Elsewhere())
        if not first:
            for name in plan.entry:
                backbone.set_submodule(name, Elsewhere())
            if plan.positions is not None:
                backbone.set_submodule(plan.positions, Nothing())
        blocks = tuple(name for name in anatomy.blocks if name in here)
        stages.append(StageModel(index, count, part, replace(anatomy, blocks=blocks)))
    return stages

"""How the run of a custom loop is carried out: every auto is filled in, without a forecast."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from shoal.catalogue.strategies import find_strategy
from shoal.config.mesh import Mesh, mesh_for
from shoal.config.schema import CheckpointConfig, Config
from shoal.mistakes import UserMistake
from shoal.parallel.device import Device
from shoal.plan.batches import nearest_multiples

# Fully replicated training in fp32 with Adam: weights, gradients and two moments.
BYTES_PER_PARAMETER = 16
# The same in a checkpoint, which has no gradients.
CHECKPOINT_BYTES = 12
# `checkpoint.every: auto` before the time of a step is known.
FIRST_INTERVAL = 200


@dataclass(frozen=True)
class CustomRun:
    """How the run is carried out. Without a forecast: only a language model's structure is known."""

    requested: Config
    config: Config
    mesh: Mesh
    micro_batch: int
    global_batch: int

    @property
    def strategy(self) -> str:
        return self.config.parallel.strategy

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def data_parallel(self) -> int:
        return self.mesh.data_parallel

    @cached_property  # every step reads it
    def grad_accum_steps(self) -> int:
        return self.global_batch // (self.micro_batch * self.data_parallel)


def resolve_custom(
    config: Config, networks: Iterable[nn.Module], loader: Any, world_size: int, nodes: int, device: Device
) -> CustomRun:
    """Fill in every auto; a UserMistake if model, loader and config do not fit together."""
    requested, parallel, train = config, config.parallel, config.train
    for key in ("tp", "pp", "cp"):
        if getattr(parallel, key) > 1:
            raise UserMistake(
                f"parallel.{key} {getattr(parallel, key)} needs a language model that shoal builds (shoal train); a "
                "model of your own is trained with ddp, zero1, zero2, zero3 or fsdp."
            )
    if train.tokens is not None:
        raise UserMistake("train.tokens counts the tokens of language models; set train.steps or train.epochs.")
    global_batch = int(loader.batch_size)
    if "global_batch" in train.model_fields_set and train.global_batch != global_batch:
        raise UserMistake(
            f"train.global_batch is {train.global_batch}, but the loader's batch_size is {global_batch}; the loader's "
            "is the global batch, over all devices: leave train.global_batch out, or make them equal."
        )
    strategy = _strategy(config, networks, world_size, device)
    mesh = mesh_for(parallel, strategy, world_size, nodes)
    if global_batch % mesh.data_parallel:
        near = nearest_multiples(global_batch, mesh.data_parallel)
        raise UserMistake(
            f"The loader's batch_size {global_batch} is the global batch, and not divisible by the "
            f"{mesh.data_parallel} data-parallel ranks; the nearest values that are: {near}."
        )
    per_rank = global_batch // mesh.data_parallel
    micro_batch = per_rank if train.micro_batch == "auto" else min(train.micro_batch, per_rank)
    if train.grad_accum is not None and train.micro_batch * train.grad_accum != per_rank:
        raise UserMistake(
            f"train.micro_batch {train.micro_batch} × train.grad_accum {train.grad_accum} is not the {per_rank} "
            f"samples that each of {mesh.data_parallel} ranks has of the loader's batch_size {global_batch}; leave "
            "train.grad_accum out."
        )
    if per_rank % micro_batch:
        raise UserMistake(
            f"train.micro_batch {micro_batch} does not divide the {per_rank} samples that each of {mesh.data_parallel} "
            f"ranks has of the loader's batch_size {global_batch}."
        )
    recompute = "none" if train.recompute == "auto" else train.recompute
    config = config.model_copy(
        update={
            "parallel": parallel.model_copy(update={"strategy": strategy}),
            "checkpoint": _with_interval(config.checkpoint),
            "train": train.model_copy(
                update={"global_batch": global_batch, "micro_batch": micro_batch, "recompute": recompute}
            ),
        }
    )
    return CustomRun(requested, config, mesh, micro_batch, global_batch)


def _with_interval(checkpoint: CheckpointConfig) -> CheckpointConfig:
    return checkpoint if checkpoint.every != "auto" else checkpoint.model_copy(update={"every": FIRST_INTERVAL})


def _strategy(config: Config, networks: Iterable[nn.Module], world_size: int, device: Device) -> str:
    wanted, offload = config.parallel.strategy, config.parallel.offload == "cpu"
    if offload:
        return "fsdp" if wanted in ("auto", "single") else wanted
    if world_size == 1:
        return "single"
    if wanted != "auto":
        return "ddp" if find_strategy(wanted, config.parallel.sharding).ddp and wanted == "fsdp" else wanted
    needed = BYTES_PER_PARAMETER * sum(one.numel() for model in networks for one in model.parameters()) / 2**30
    return "fsdp" if device.memory_gib is not None and needed > device.memory_gib / 2 else "ddp"

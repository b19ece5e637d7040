"""Preflight: find the errors of a run without device memory, other ranks or a run folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.checkpoint import state, store
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.mistakes import UserMistake
from shoal.models.base import check_resumed_base
from shoal.models.peft_config import adapter_folder
from shoal.models.peft_weights import check_adapter
from shoal.models.prepare import PreparedModel, prepare_model
from shoal.models.read_weights import check_stored
from shoal.optim.check import check_groups, check_quantization_blocks
from shoal.optim.offload import find_store
from shoal.parallel.check import check_parallel
from shoal.parallel.device import Device
from shoal.parallel.float8 import check_float8
from shoal.parallel.ranks import Ranks
from shoal.plan.resolved import ResolvedRun
from shoal.train.inputs import Inputs
from shoal.train.resolve import machine_here, resolve_for_all, resolve_run


@dataclass(frozen=True)
class Preflight:
    """A run whose errors were looked for."""

    inputs: Inputs
    prepared: PreparedModel
    resolved: ResolvedRun
    device: Device

    def agree(self, config: Config, ranks: Ranks, overrides: Mapping[str, Any]) -> "Preflight":
        """The same run on every rank: where devices, host memory or precision differ, it is resolved anew."""
        resolved = resolve_for_all(self.resolved, config, self.prepared, self.device, ranks, overrides)
        if resolved is not self.resolved:
            _check(self.prepared, resolved, self.device)
        return replace(self, resolved=resolved)


def preflight(
    config: Config,
    inputs: Inputs,
    world_size: int,
    device: Device,
    *,
    overrides: Mapping[str, Any] | None = None,
    start_from: Path | None = None,
    resume: bool = False,
) -> Preflight:
    """Build the model on the meta device, resolve every auto, and find the errors that setup would find."""
    prepared = prepare_model(
        inputs.blueprint,
        attention=config.model.attention,
        longest=config.data.max_length,
        freeze=config.model.freeze,
        adapter=config.adapter,
    )
    model = prepared.model
    check_groups(dict(model.named_parameters()), config.train)
    find_store(config.parallel.offload)
    resolved = resolve_run(config, prepared, machine_here(config, device, world_size), overrides=overrides)
    _check(prepared, resolved, device)
    if inputs.blueprint.folder is not None:
        check_stored(model, inputs.blueprint.folder, prepared.new_rows)
    if start_from is not None:
        check_checkpoint(start_from, config)
        if prepared.adapters is not None:
            check_resumed_base(RunDirectory(start_from.parent.parent), inputs.blueprint.folder)
    elif prepared.adapters is not None and config.adapter.from_ is not None and not resume:
        check_adapter(model, adapter_folder(config.adapter.from_))
    return Preflight(inputs, prepared, resolved, device)


def _check(prepared: PreparedModel, resolved: ResolvedRun, device: Device) -> None:
    """A UserMistake if the model or the device does not support the run as it is resolved."""
    config, model = resolved.config, prepared.model
    check_parallel(
        model, config, strategy=resolved.strategy, mesh=resolved.mesh, grad_accum_steps=resolved.grad_accum_steps
    )
    check_quantization_blocks(model, config.train, resolved.mesh.tp)
    if config.train.precision == "fp8":
        check_float8(model, device)


def check_checkpoint(start_from: Path, config: Config) -> None:
    """A UserMistake if `--from` names a checkpoint that is incomplete, damaged or of another optimizer."""
    checkpoint = store.read_manifest(start_from)
    if checkpoint is None:
        if found := store.list_complete(RunDirectory(start_from).checkpoints):
            raise UserMistake(f"--from: {start_from} is a run; give a checkpoint of it, such as {found[-1].path}.")
        raise UserMistake(
            f"--from: {start_from} is not a complete checkpoint: "
            + ("its MANIFEST.json is missing or invalid." if start_from.is_dir() else "there is no such folder.")
        )
    if (file := store.damaged_file(checkpoint)) is not None:
        raise UserMistake(f"--from: {start_from / file} is damaged: it is not what was saved.")
    before, now = state.read_progress(start_from).optimizer, config.train.optimizer.name
    if before and before != now:
        raise UserMistake(f"--from: {start_from} holds the optimizer state of {before}, which {now} cannot use.")

"""The whole parallel recipe, in the one order that works.

Cut into pipeline stages → cut tensors → cut the sequence → 8-bit products → recompute → compile each block → shard and
fill, or fill and replicate. The model is on meta until it is filled, so a rank is given memory for its own part alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.config.mesh import Mesh, length_multiple
from shoal.config.schema import Config
from shoal.data.loader import MicroBatch
from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy, read_anatomy
from shoal.models.attention import NARROWEST, skips_tiles
from shoal.models.emulate import EmulatedForward
from shoal.models.float8 import MULTIPLE
from shoal.models.loss import LanguageModel, choose_loss
from shoal.models.pieces import Split
from shoal.models.weights import Weights, kept_buffers, materialize
from shoal.parallel.become import become
from shoal.parallel.compile import compile_backend, compile_blocks
from shoal.parallel.context import SequencePart, split_sequence
from shoal.parallel.float8 import share_in_float8, use_float8
from shoal.parallel.gradients import Gradients
from shoal.parallel.grid import Grid
from shoal.parallel.model import ParallelModel, Runner
from shoal.parallel.passes import Passes, Prepare
from shoal.parallel.pipeline import Pipeline, Stage
from shoal.parallel.placement import Placement
from shoal.parallel.precision import ComputeCopies, Precision, read_precision, round_norms
from shoal.parallel.ranks import Ranks
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.shard import SHARDED, replicate, shard_fully
from shoal.parallel.stages import StageModel, cut_stages, stages_each
from shoal.parallel.tensor import split_tensors
from shoal.parallel.units import choose_units
from shoal.parallel.vocabulary import VocabularyPart

# Few enough lengths for a compiler, and little to pad.
ROUND_LENGTHS_TO = 64
# fp8 that concerns a smaller share of the blocks is spoken of.
MOSTLY = 0.9


def parallelize(
    model: Any,
    config: Config,
    *,
    strategy: str,
    mesh: Mesh,
    ranks: Ranks,
    micro_batch: int,
    passes: int,
    folder: Path | None,
    values: bool = True,
    emulated: frozenset[torch.dtype] = frozenset(),
) -> ParallelModel:
    """Spread `model`, which is on meta and has what is frozen frozen, over `mesh`.

    Weights come from `folder` or, where that is None, from the seed; with `values` false they are left unset, because
    a checkpoint will be read into them. Matmuls of the dtypes in `emulated` are computed in fp32: see `models.emulate`.
    """
    grid = Grid(mesh, ranks)
    precision = read_precision(config.train.precision, config.train.reduce_dtype)
    if grid.gradient_ranks > 1:
        _ = grid.replicas  # made by every rank, also those that have nothing to average with it
    anatomy = read_anatomy(model)
    everything: dict[str, Tensor] = {**dict(model.named_parameters()), **kept_buffers(model)}
    shapes = {name: tuple(tensor.shape) for name, tensor in everything.items()}
    loss = _choose_loss(model, anatomy, config, precision, micro_batch, mesh)

    splits: dict[str, Split] = {}
    sequence: SequencePart | None = None
    modules: list[nn.Module] = []
    parameters: dict[str, nn.Parameter] = {}
    stages = _stages(model, anatomy, config, grid)
    backend = compile_backend(config.train.compile, ranks.device)
    compiled = backend == "inductor" and ranks.device.type == "cuda"
    tiles = mesh.cp == 1 and skips_tiles(model, config.model.attention, compiled=compiled)
    for stage in stages:
        if precision.mixed:
            round_norms(stage.model, stage.anatomy, precision.compute)
        if grid.tp is not None:
            splits |= split_tensors(stage.model, stage.anatomy, grid.tp)
        if grid.cp is not None:
            sequence = split_sequence(stage.model, grid.cp, config.parallel.cp_method)
        module = _with_loss(stage, loss, grid, splits, precision, tiles)
        blocks = stage.anatomy.block_modules(stage.model)
        if config.train.precision == "fp8":
            use_float8(blocks)
        if precision.compute in emulated:
            # Compiled blocks are traced once, inside of the whole, and what they recompute is part of their graph.
            recomputed = blocks if config.train.recompute not in ("none", "cheap") and backend is None else []
            for part in (module, *recomputed):
                become(part, EmulatedForward, emulated=emulated)
        recompute_blocks(blocks, config.train.recompute)
        if backend is not None:
            compile_blocks([*blocks, *_final_norm(stage)], backend, keeps_all=config.train.recompute == "none")
        if strategy in SHARDED:
            _shard(module, stage, config, strategy, grid, precision)  # on meta, so that only this part gets memory
        materialize(
            stage.model,
            stage.anatomy,
            device=ranks.device,
            dtype=precision.weights,
            source=Weights(folder, config.seed) if values else None,
            splits=splits,
            offload=config.parallel.offload == "cpu",
        )
        parameters |= dict(stage.model.named_parameters())
        if strategy not in SHARDED:
            module = _replicate(module, stage, config, grid, precision)  # DDP cannot wrap what is on meta
        modules.append(module)

    prepare = _preparation(sequence, ranks.device, fill=mesh.tp > 1 or mesh.pp > 1)
    runner: Runner
    if mesh.pp == 1:
        runner = Passes(modules[0], prepare, keeps_weights=_reshards(config, strategy) is False)
    else:
        numbers = [stage.index for stage in stages]
        runner = _pipeline(model, modules, numbers, config, grid, precision, micro_batch, passes, prepare)
    # DDP averages everything over replicas, FSDP what it shards, and nobody a pipeline's.
    wrapped = mesh.pp == 1 and strategy not in SHARDED
    tied = {f"{anatomy.embedding}.weight"} if mesh.pp > 1 and anatomy.tied else set()
    placement = Placement(grid, shapes, splits, at_both_ends=frozenset(tied & parameters.keys()))
    return ParallelModel(
        modules=modules,
        runner=runner,
        grid=grid,
        anatomy=anatomy,
        precision=precision,
        placement=placement,
        parameters=parameters,
        buffers={name: buffer for stage in stages for name, buffer in kept_buffers(stage.model).items()},
        gradients=Gradients(
            parameters,
            placement,
            averages=[] if wrapped else [name for name, one in parameters.items() if not isinstance(one, DTensor)],
            in_buckets=isinstance(modules[0], DistributedDataParallel),
        ),
        copies=[copies for module in modules for copies in module.modules() if isinstance(copies, ComputeCopies)],
        row_length=config.data.max_length if mesh.pp > 1 or (compiled and config.data.pack) else None,
        row_multiple=_row_multiple(config, compiled=compiled),
        notes=list(_notes(model, stages, config, loss, compiled=backend is not None, tiles=tiles)),
    )


def _choose_loss(
    model: Any, anatomy: Anatomy, config: Config, precision: Precision, micro_batch: int, mesh: Mesh
) -> str:
    # A chunked loss makes its gradients before they are scaled, and fp16 cannot hold the smallest of them.
    wanted = "plain" if config.train.loss_impl == "auto" and precision.scaled else config.train.loss_impl
    tokens = micro_batch * config.data.max_length // mesh.cp
    return choose_loss(wanted, anatomy, tokens, model.config.get_text_config().vocab_size)


def _notes(
    model: Any, stages: list[StageModel], config: Config, loss: str, *, compiled: bool, tiles: bool
) -> Iterator[str]:
    name = type(model).__name__
    if config.train.precision == "fp8":
        share = share_in_float8([block for stage in stages for block in stage.anatomy.block_modules(stage.model)])
        if share < MOSTLY:
            yield (
                f"train.precision fp8 concerns {share:.0%} of the matrices of {name}'s blocks: the others are not "
                f"linear layers whose sides are multiples of {MULTIPLE}, and are multiplied in bf16."
            )
    if config.train.loss_impl in ("chunked", "fused") and loss == "plain":
        yield f"train.loss_impl {config.train.loss_impl} has no effect: the head of {name} is more than one matrix."
    if config.train.recompute == "cheap" and not compiled:
        yield "train.recompute cheap has no effect: the compiler does it, and blocks are not compiled here."
    if config.model.attention == "flex" and not tiles:
        yield (
            f"model.attention flex has no effect: it needs CUDA, compiled blocks, and a model with heads of at least "
            f"{NARROWEST} channels and neither a sliding window nor dropout in its attention; {name} is trained with "
            "sdpa or eager attention."
        )


def _stages(model: Any, anatomy: Anatomy, config: Config, grid: Grid) -> list[StageModel]:
    """The parts of the model that run on this rank: all of it, or its stages of the pipeline."""
    devices = grid.mesh.pp
    if devices == 1:
        return [StageModel(0, 1, model, anatomy)]
    if anatomy.tied:
        _ = grid.ends  # made by every rank, also those of the stages between, or NCCL would wait for them
    each = stages_each(config.parallel.pp_schedule)
    mine = [grid.place["pp"] + devices * turn for turn in range(each)]
    return cut_stages(model, anatomy, mine, devices * each)


def _final_norm(stage: StageModel) -> list[nn.Module]:
    """None, where the model has none or another stage has it."""
    name = stage.anatomy.final_norm
    return [stage.model.get_submodule(name)] if name is not None and stage.is_last else []


def _with_loss(
    stage: StageModel, loss: str, grid: Grid, splits: dict[str, Split], precision: Precision, tiles: bool
) -> nn.Module:
    measure = None
    name = f"{stage.anatomy.embedding if stage.anatomy.tied else stage.anatomy.head}.weight"
    if grid.tp is not None and name in splits:
        ((start, _),) = splits[name].spans
        measure = VocabularyPart(start, grid.tp)
    rounded = precision.compute if precision.mixed else None
    inner = LanguageModel(stage.model, stage.anatomy, loss, measure, skips_tiles=tiles, rounded=rounded)
    return inner if stage.count == 1 else Stage(inner, is_first=stage.is_first, is_last=stage.is_last)


def _shard(
    module: nn.Module, stage: StageModel, config: Config, strategy: str, grid: Grid, precision: Precision
) -> None:
    language = module.inner if isinstance(module, Stage) else module
    assert isinstance(language, LanguageModel)
    shard_fully(
        module,
        choose_units(language, config.parallel.wrap, part=stage.count > 1),
        grid.sharding,
        precision,
        reshard=_reshards(config, strategy),
        prefetch=config.parallel.prefetch,
        offload=config.parallel.offload == "cpu",
    )


def _replicate(module: nn.Module, stage: StageModel, config: Config, grid: Grid, precision: Precision) -> nn.Module:
    if precision.mixed:
        units = [[block] for block in stage.anatomy.block_modules(stage.model)]
        if last := _final_norm(stage):
            # The head's weight may be used without a call of the head, but not before the final norm is called.
            units.append([*last, stage.model.get_submodule(stage.anatomy.head)])
        module = ComputeCopies(module, precision, units)
    if grid.mesh.pp == 1 and grid.gradient_ranks > 1:  # a pipeline's gradients are averaged after its passes
        module = replicate(module, grid.replicas, precision, grid.device, config.parallel.compress)
    return module


def _pipeline(
    model: Any,
    modules: list[nn.Module],
    numbers: list[int],
    config: Config,
    grid: Grid,
    precision: Precision,
    micro_batch: int,
    passes: int,
    prepare: Prepare,
) -> Pipeline:
    assert grid.pp is not None
    length = config.data.max_length // grid.mesh.cp
    return Pipeline(
        list(zip(numbers, modules, strict=True)),
        count=grid.mesh.pp * stages_each(config.parallel.pp_schedule),
        group=grid.pp,
        schedule=config.parallel.pp_schedule,
        passes=passes,
        prepare=prepare,
        tokens=(micro_batch, length),
        hidden=(micro_batch, length // grid.mesh.tp, model.config.get_text_config().hidden_size),
        dtype=precision.stream,
        device=grid.device,
    )


def _reshards(config: Config, strategy: str) -> bool | int:
    """Whether gathered weights are freed after the forward pass, or to how many ranks they are sharded then."""
    parallel = config.parallel
    if parallel.pp > 1:  # a stage runs many passes between gathering and reducing, and cannot gather in each
        return False
    if strategy == "zero2" or (strategy == "fsdp" and parallel.sharding == "shard_grad_op"):
        return False
    return True if parallel.reshard == "auto" else parallel.reshard


def _row_multiple(config: Config, *, compiled: bool) -> int:
    """What the length of rows is rounded up to. Compiled code and attention's kernels are made for each length anew."""
    multiple = length_multiple(config.parallel, config.train.precision)
    rounded = math.lcm(multiple, ROUND_LENGTHS_TO)
    return rounded if compiled and config.data.max_length % rounded == 0 else multiple


def _preparation(sequence: SequencePart | None, device: torch.device, fill: bool) -> Prepare:
    """What is done to a micro-batch before it enters the model."""

    def prepare(batch: MicroBatch) -> MicroBatch:
        batch = batch.to(device)
        if sequence is not None:
            return sequence.cut(batch)
        if fill and batch.positions is None:
            # transformers would count the tokens it sees, which are a part of the row's.
            places = torch.arange(batch.inputs.shape[1], device=device).expand(batch.inputs.shape)
            return replace(batch, positions=places)
        return batch

    return prepare


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters whose name fits a pattern are not trained."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise UserMistake(f"model.freeze: {pattern!r} fits no parameter; one is named {names[0]}.")
    for name, parameter in model.named_parameters():
        if any(fnmatch(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserMistake("model.freeze leaves no parameter to train.")

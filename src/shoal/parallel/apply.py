"""The whole parallel recipe, in the one order that works.

Cut into pipeline stages → cut tensors → cut the sequence → recompute → compile each block → shard and fill, or fill
and replicate. The model is on meta until it is filled, so a rank is given memory for its own part alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.config.mesh import Mesh, length_multiple
from shoal.config.schema import Config
from shoal.data.loader import MicroBatch
from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy, read_anatomy, require_blocks
from shoal.models.loss import LanguageModel, choose_loss
from shoal.models.pieces import Split
from shoal.models.weights import Weights, kept_buffers, materialize
from shoal.parallel.compile import compile_backend, compile_blocks
from shoal.parallel.context import SequencePart, check_context_parallel, split_sequence
from shoal.parallel.gradients import Gradients
from shoal.parallel.grid import Grid
from shoal.parallel.passes import Passes
from shoal.parallel.pipeline import Pipeline, Stage
from shoal.parallel.placement import Placement
from shoal.parallel.precision import ComputeCopies, Precision, read_precision
from shoal.parallel.ranks import Ranks
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.shard import replicate, shard_fully
from shoal.parallel.stages import StageModel, check_pipeline, cut_stages, stages_each
from shoal.parallel.tensor import check_tensor_parallel, split_tensors
from shoal.parallel.units import choose_units
from shoal.parallel.vocabulary import VocabularyPart

SHARDED = ("fsdp", "zero2", "zero3")  # the strategies that FSDP2 carries out


class Runner(Protocol):
    """Runs the passes of a step, or of an evaluation."""

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor: ...

    def measure(self, batches: Sequence[MicroBatch]) -> Tensor: ...


@dataclass
class ParallelModel:
    """A model spread over ranks, as the loop sees it."""

    modules: list[nn.Module]  # what was wrapped: one, or the stages of a pipeline that are here
    runner: Runner
    grid: Grid
    anatomy: Anatomy  # of the whole model
    precision: Precision
    placement: Placement
    parameters: dict[str, nn.Parameter]  # the weights that are here, by their Hugging Face names
    buffers: dict[str, Tensor]  # what is kept with them and not trained
    gradients: Gradients
    copies: list[ComputeCopies]
    row_length: int | None  # all rows are padded to this; None: to the longest of a pass
    row_multiple: int  # … rounded up to a multiple of this
    loss_note: str | None  # said to the user: the loss is not the one asked for

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor:
        """Gradients of `factor` times the mean over ranks of the summed loss. Returns this rank's sum, in fp64: ranks
        that have what another reports return zero, so that the sum over all ranks counts every target once."""
        total = self.runner.backward(batches, factor)
        self.gradients.finish()
        return total if self.grid.reports_loss else torch.zeros_like(total)

    @torch.no_grad()
    def measure(self, batches: Sequence[MicroBatch]) -> Tensor:
        """(summed loss, targets) of batches, without training on them; the sum over all ranks counts each once."""
        for module in self.modules:
            module.eval()
        sums = self.runner.measure(batches)
        for module in self.modules:
            module.train()
        return sums if self.grid.reports_loss else torch.zeros_like(sums)

    @property
    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model."""
        return {**self.parameters, **self.buffers}

    def weights_changed(self) -> None:
        """After an optimizer step, or after weights were loaded."""
        for copies in self.copies:
            copies.refresh()


def check_parallel(model: Any, config: Config, *, strategy: str, mesh: Mesh, passes: int) -> None:
    """Find what cannot work on this mesh, from the model on meta alone. Raises UserMistake."""
    anatomy, parallel = read_anatomy(model), config.parallel
    sharding = "use parallel.strategy fsdp with parallel.wrap {min_params: 10_000_000}, which needs none"
    for key, needed in (("parallel.tp", mesh.tp > 1), ("parallel.pp", mesh.pp > 1)):
        if needed:
            require_blocks(anatomy, model, key, sharding)
    if config.train.recompute != "none":
        require_blocks(anatomy, model, "train.recompute", "use none")
    if config.train.optimizer.name == "muon":
        require_blocks(anatomy, model, "muon", "use adamw")
    check_pipeline(model, anatomy, mesh.pp, parallel.pp_schedule, passes)
    check_tensor_parallel(model, mesh.tp)
    check_context_parallel(model, mesh, parallel.cp_method)
    if strategy in SHARDED:
        choose_units(model, anatomy, parallel.wrap)


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
) -> ParallelModel:
    """Spread `model`, which is on meta and has what is frozen frozen, over `mesh`. No rank holds it whole unless the
    mesh says so.

    Weights come from `folder` or, where that is None, from the seed; with `values` false they are left unset, because
    a checkpoint will be read into them.
    """
    train, parallel = config.train, config.parallel
    grid = Grid(mesh, ranks)
    precision = read_precision(train.precision, train.reduce_dtype)
    anatomy = read_anatomy(model)
    everything: dict[str, Tensor] = {**dict(model.named_parameters()), **kept_buffers(model)}
    shapes = {name: tuple(tensor.shape) for name, tensor in everything.items()}
    # A chunked loss makes its gradients before they are scaled, and fp16 cannot hold the smallest of them.
    wanted = "plain" if train.loss == "auto" and precision.scaled else train.loss
    vocabulary = model.config.get_text_config().vocab_size
    loss = choose_loss(wanted, anatomy, micro_batch * config.data.max_length // mesh.cp, vocabulary)

    backend = compile_backend(train.compile, ranks.device)
    stages = _stages(model, anatomy, mesh, parallel.pp_schedule, grid)
    if mesh.pp > 1 and anatomy.tied:
        _ = grid.ends  # made by every rank, also those of the stages between, or NCCL would wait for them
    splits: dict[str, Split] = {}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    modules: list[nn.Module] = []
    copies: list[ComputeCopies] = []
    sequence: SequencePart | None = None
    for stage in stages:
        if grid.tp is not None:
            splits |= split_tensors(stage.model, stage.anatomy, grid.tp)
        if grid.cp is not None:
            sequence = split_sequence(stage.model, grid.cp, parallel.cp_method)
        module = _with_loss(stage, loss, grid, splits, backend)
        blocks = stage.anatomy.block_modules(stage.model)
        recompute_blocks(blocks, train.recompute)
        if backend is not None:
            compile_blocks(blocks, backend)
        offload = parallel.offload == "cpu"
        if strategy in SHARDED:
            # Sharded while on meta, so that only this rank's part is ever given memory.
            shard_fully(
                module,
                choose_units(stage.model, stage.anatomy, parallel.wrap, part=mesh.pp > 1),
                grid.sharding,
                precision,
                reshard=_reshards(config, strategy),
                prefetch=parallel.prefetch,
                offload=offload,
            )
        # DDP, which wraps below, cannot wrap meta tensors.
        materialize(
            stage.model,
            stage.anatomy,
            device=ranks.device,
            dtype=precision.weights,
            source=Weights(folder, config.seed) if values else None,
            splits=splits,
            offload=offload,
        )
        parameters |= dict(stage.model.named_parameters())
        buffers |= kept_buffers(stage.model)
        if strategy not in SHARDED:
            if precision.mixed:
                module = ComputeCopies(module, precision.compute)
                copies.append(module)
            if mesh.pp == 1 and grid.gradient_ranks > 1:
                module = replicate(module, grid.replicas, precision, ranks.device, parallel.compress)
        modules.append(module)

    both = {f"{anatomy.embedding}.weight"} if mesh.pp > 1 and anatomy.tied else set()
    placement = Placement(grid, shapes, splits, at_both_ends=frozenset(both & parameters.keys()))
    prepare = _preparation(sequence, ranks.device, fill=mesh.tp > 1 or mesh.pp > 1)
    runner: Runner
    if mesh.pp == 1:
        runner = Passes(modules[0], prepare, keeps_weights=_reshards(config, strategy) is False)
    else:
        length = config.data.max_length // mesh.cp
        assert grid.pp is not None
        runner = Pipeline(
            [(stage.index, module) for stage, module in zip(stages, modules, strict=True)],
            count=stages[0].count,
            group=grid.pp,
            schedule=parallel.pp_schedule,
            passes=passes,
            prepare=prepare,
            tokens=(micro_batch, length),
            hidden=(micro_batch, length // mesh.tp, model.config.get_text_config().hidden_size),
            dtype=precision.compute,
            device=ranks.device,
        )
    note = None
    if loss == "plain" and train.loss == "chunked":
        note = f"train.loss chunked has no effect: the head of {type(model).__name__} is more than one matrix."
    wrapped = isinstance(modules[0], DistributedDataParallel)
    gradients = Gradients(parameters, placement, averages=mesh.pp > 1 and strategy not in SHARDED, in_buckets=wrapped)
    return ParallelModel(
        modules=modules,
        runner=runner,
        grid=grid,
        anatomy=anatomy,
        precision=precision,
        placement=placement,
        parameters=parameters,
        buffers=buffers,
        gradients=gradients,
        copies=copies,
        row_length=config.data.max_length if mesh.pp > 1 else None,
        row_multiple=length_multiple(parallel),
        loss_note=note,
    )


def _stages(model: Any, anatomy: Anatomy, mesh: Mesh, schedule: str, grid: Grid) -> list[StageModel]:
    """The parts of the model that run on this rank: all of it, or its stages of the pipeline."""
    if mesh.pp == 1:
        return [StageModel(0, 1, model, anatomy)]
    each = stages_each(schedule)
    mine = [grid.place["pp"] + mesh.pp * turn for turn in range(each)]
    return cut_stages(model, anatomy, mine, mesh.pp * each)


def _with_loss(stage: StageModel, loss: str, grid: Grid, splits: dict[str, Split], backend: str | None) -> nn.Module:
    measure = None
    name = f"{stage.anatomy.embedding if stage.anatomy.tied else stage.anatomy.head}.weight"
    if grid.tp is not None and name in splits:
        ((start, _),) = splits[name].spans
        measure = VocabularyPart(start, grid.tp)
    inner = LanguageModel(stage.model, stage.anatomy, loss, measure, backend)
    return inner if stage.count == 1 else Stage(inner, is_first=stage.is_first, is_last=stage.is_last)


def _reshards(config: Config, strategy: str) -> bool | int:
    """Whether gathered weights are freed after the forward pass, or to how many ranks they are sharded then."""
    parallel = config.parallel
    if parallel.pp > 1:  # a stage runs many passes between gathering and reducing, and cannot gather in each
        return False
    if strategy == "zero2" or (strategy == "fsdp" and parallel.sharding == "shard_grad_op"):
        return False
    return True if parallel.reshard == "auto" else parallel.reshard


def _preparation(sequence: SequencePart | None, device: torch.device, fill: bool) -> Any:
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

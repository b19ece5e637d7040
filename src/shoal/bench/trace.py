"""Traces the memory of one rank of a job by running the training code on fake tensors.

Model, sharding, optimizer and step are those of training. Differences between the CUDA and the CPU code paths are
emulated: see `_with_gpu_optimizer` and the functions below it. Blocks are not compiled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from shoal.bench.ledger import Ledger, Peak
from shoal.catalogue.objectives import objective_facts
from shoal.config.schema import Config, ModelConfig
from shoal.data.loader import MicroBatch, StepBatch
from shoal.mistakes import UserMistake
from shoal.models.cross_entropy import CHUNK_LOGITS, KERNEL_CHUNK_LOGITS, Chunks, Measure
from shoal.models.head import padded_vocabulary
from shoal.models.loss import HeadAndLoss
from shoal.models.prepare import Blueprint, PreparedModel, blueprint, prepare_model
from shoal.models.tensor_slices import local_tensor
from shoal.objectives import find_objective
from shoal.optim.adamw import AdamW
from shoal.optim.check import check_groups, check_quantization_blocks
from shoal.optim.fused import FusedOptimizer
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.optimizer import NamedOptimizer
from shoal.parallel.check import check_parallel
from shoal.parallel.model import ParallelModel
from shoal.parallel.ranks import Ranks
from shoal.plan.from_config import has_documents
from shoal.plan.resolved import ResolvedRun
from shoal.plan.run.run import Run
from shoal.train.build import build, keep_low_precision_gradients
from shoal.train.step import TrainStep

# Parts of a step, named as the moments of the forecast; and two that it omits, because memory only grows or shrinks
# there from one moment to the next.
FORWARD, LOSS, BACKWARD = "forward pass", "loss", "start of the backward pass"
BETWEEN, LAST, EMBEDDING, STEP = "backward pass", "backward of the first block", "embedding gradient", "optimizer step"
# The first step allocates optimizer state and FSDP's buffers; the second is like all that follow.
STEPS = 2


@dataclass(frozen=True)
class Traced:
    """Memory of a rank at the peak of each part of a step, in bytes."""

    moments: Mapping[str, Peak]
    parameters: int  # of the full model

    @property
    def peak(self) -> str:
        return max(self.moments, key=lambda name: self.moments[name].bytes)


def check_traceable(config: Config, run: Run) -> None:
    """A UserMistake if the run cannot be traced as a single rank."""
    if run.mesh.pp > 1:
        raise UserMistake(
            "bench rank does not support pipeline parallelism: a stage would wait for the others. Use parallel.pp 1."
        )
    if config.parallel.offload != "none":
        raise UserMistake(
            "bench rank without a GPU cannot tell host memory from device memory; use parallel.offload none."
        )
    if config.train.precision == "fp8":
        raise UserMistake("bench rank without a GPU cannot trace fp8 matmuls; use train.precision bf16-mixed.")


def trace(choice: ResolvedRun, report: Callable[[str], None] = lambda _: None) -> Traced:
    """Trace one steady-state step of rank 0. With other ranks, there must be a fake process group."""
    config, run = choice.config, choice.run
    check_traceable(config, run)
    prepared = prepare_model(
        _blueprint(config.model, config.train.objective),
        attention=config.model.attention,
        longest=config.data.max_length,
        freeze=config.model.freeze,
        adapter=config.adapter,
    )
    built, parameters = prepared.model, prepared.parameters
    check_groups(dict(built.named_parameters()), config.train)
    check_parallel(built, config, strategy=run.strategy, mesh=run.mesh, grad_accum_steps=run.grad_accum_steps)
    check_quantization_blocks(built, config.train, run.mesh.tp)
    on_gpu = not choice.machine.is_cpu
    ledger = Ledger(_cpu_only_tensors(built) if on_gpu else lambda operation, purpose, tensor: False)
    with ledger:
        step = _build(prepared, choice, ledger, on_gpu)
        report(f"{parameters:,} parameters set up as rank 0 of {run.world_size}")
        assert isinstance(step.model, ParallelModel)
        _hook_blocks(step.model, built, ledger)
        for number in range(STEPS):
            if number == STEPS - 1:
                timeline = ledger.record()
            ledger.begin(FORWARD, "other")
            step(_batch(config, run), config.train.lr)
            ledger.label((local_tensor(state) for state in step.optimizer.state().values()), "optimizer state")
            report(f"step {number + 1} of {STEPS} traced")
        return Traced(timeline.peaks(ledger.names), parameters)


def _blueprint(model: ModelConfig, objective: str) -> Blueprint:
    """The model as the forecast counts it: without a tokenizer, a vocabulary may have spare rows for added tokens."""
    plan = blueprint(model, objective)
    if not model.add_tokens:
        return plan
    return plan.with_tokens(range(plan.vocabulary, plan.vocabulary + len(model.add_tokens)), plan.vocabulary)


def _build(prepared: PreparedModel, choice: ResolvedRun, ledger: Ledger, on_gpu: bool) -> TrainStep:
    ranks = Ranks(0, choice.world_size, 0, torch.device("cpu"))
    model, optimizer = build(prepared, choice, ranks, objective=find_objective(choice.config), values=False)
    if on_gpu:
        optimizer = _with_gpu_optimizer(optimizer, model)
        _use_gpu_loss(model)
    keep_low_precision_gradients(model, optimizer, choice)
    scaler = LossScaler(ranks.device, enabled=model.precision.scaled)
    ledger.building = False
    weights = [*model.parameters.values(), *model.low_precision.values()]
    ledger.label((local_tensor(weight) for weight in weights), "weights")
    for module in model.modules:
        if isinstance(module, DistributedDataParallel):
            _skip_all_reduce(module)
    _hook_optimizer(optimizer, model, ledger)
    return TrainStep(model, optimizer, scaler, clip=choice.config.train.clip, total=ranks.sum)


def _with_gpu_optimizer(optimizer: NamedOptimizer, model: ParallelModel) -> NamedOptimizer:
    """On CUDA the update of AdamW or Lion is one fused kernel, which allocates nothing but the state."""
    parts: list[torch.optim.Optimizer] = []
    for part in optimizer.parts:
        if isinstance(part, torch.optim.AdamW):
            part = AdamW(part.param_groups, **{key: part.defaults[key] for key in ("lr", "betas", "eps")})
        if isinstance(part, FusedOptimizer):
            part.kernel = lambda: lambda tensors, hyperparameters, usable, factor: None
        parts.append(part)
    return NamedOptimizer(parts, optimizer.names, optimizer.partition, optimizer.offloaded, model.low_precision)


def _use_gpu_loss(model: ParallelModel) -> None:
    """On CUDA the vocabulary is padded. Unless it is sharded, the loss of a chunk, which is larger, is one kernel that
    overwrites the logits with their gradient."""

    def overwrite_logits(logits: Tensor, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
        return logits.new_zeros(len(logits), dtype=torch.float32), logits

    def chunks(measure: Measure | None, weight: Tensor) -> Chunks:
        columns = padded_vocabulary(weight)
        if measure is not None:
            return Chunks(measure, CHUNK_LOGITS, columns)
        return Chunks(overwrite_logits, KERNEL_CHUNK_LOGITS, columns)

    for end in (one for module in model.modules for one in module.modules() if isinstance(one, HeadAndLoss)):
        end.chunks = partial(chunks, end.measure)  # type: ignore[method-assign]


def _cpu_only_tensors(model: nn.Module) -> Callable[[str, str, Tensor], bool]:
    """The chunked loss accumulates a matmul into the head's gradient; only a CPU allocates the matmul's result, unless
    it is fp32 (models/cross_entropy.py)."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    width = None if head is None else head.weight.shape[1]

    def ignore(operation: str, purpose: str, tensor: Tensor) -> bool:
        wide = tensor.dim() == 2 and tensor.shape[1] == width and tensor.dtype != torch.float32
        return operation == "aten::mm" and purpose == "head" and wide

    return ignore


def _skip_all_reduce(module: DistributedDataParallel) -> None:
    """An all-reduce of a fake process group has no future that DDP could wait for."""

    def all_reduce(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    module.register_comm_hook(None, all_reduce)


def _hook_blocks(model: ParallelModel, built: Any, ledger: Ledger) -> None:
    """Hooks on the blocks tell the ledger which part of the step is running.

    The start of the backward pass is its first two blocks here, because the gradients of one are reduced during the
    backward pass of the next; its end is the first block.
    """
    (root,) = model.modules
    root.register_forward_pre_hook(lambda *_: ledger.begin(FORWARD, "activations"))
    blocks = model.anatomy.block_modules(built)
    if not blocks:
        return
    parts = dict.fromkeys(range(len(blocks)), BETWEEN)
    parts[0] = LAST
    parts |= dict.fromkeys(range(max(1, len(blocks) - 2), len(blocks)), BACKWARD)
    for index, block in enumerate(blocks):
        begin = partial(ledger.begin, parts[index], "block backward")
        block.register_forward_hook(lambda block, inputs, output, begin=begin: _after(output, begin))
    begin = partial(ledger.begin, EMBEDDING, "embedding gradient")
    blocks[0].register_forward_pre_hook(lambda block, inputs, named: _after((inputs, named), begin), with_kwargs=True)

    def start_loss(block: nn.Module, inputs: Any, output: Any) -> None:
        # The last block's output is the final norm's input, which the forecast counts as head.
        ledger.label((one for one in tree_leaves(output) if isinstance(one, Tensor)), "head")
        ledger.begin(LOSS, "head")

    blocks[-1].register_forward_hook(start_loss)


def _after(values: Any, do: Callable[[], None]) -> None:
    """Call `do` once the gradient of the first of these tensors that requires one is computed."""
    tensors = (one for one in tree_leaves(values) if isinstance(one, Tensor) and one.requires_grad)
    if (tensor := next(tensors, None)) is not None:
        tensor.register_hook(lambda gradient: do())  # type: ignore[no-untyped-call]


def _hook_optimizer(optimizer: NamedOptimizer, model: ParallelModel, ledger: Ledger) -> None:
    def start_step(*_: Any) -> None:
        gradients = (parameter.grad for parameter in model.parameters.values())
        ledger.label((local_tensor(one) for one in gradients if one is not None), "gradients")
        ledger.begin(STEP, "optimizer temporaries")

    optimizer.parts[0].register_step_pre_hook(start_step)


def _batch(config: Config, run: Run) -> StepBatch:
    """Sequences of the maximal length."""
    shape = (run.micro_batch, config.data.max_length)
    every_token = run.micro_batch * config.data.max_length  # fake labels cannot be counted
    encoder = objective_facts(config.train.objective)

    def zeros() -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def micro_batch() -> MicroBatch:
        if encoder.classes:
            return MicroBatch(zeros(), zeros()[:, :1])
        if encoder.encoder:
            return MicroBatch(zeros(), zeros(), loss_tokens=round(every_token * run.head_share))
        if not has_documents(config):
            return MicroBatch(zeros(), zeros(), loss_tokens=every_token)
        documents = torch.zeros(shape, dtype=torch.int32)
        return MicroBatch(zeros(), zeros(), zeros(), documents, loss_tokens=every_token)

    micro_batches = [micro_batch() for _ in range(run.grad_accum_steps)]
    return StepBatch(micro_batches, run.global_batch * config.data.max_length, np.empty(0))

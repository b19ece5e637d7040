"""The memory of one rank of a job, by running its real code on tensors that have shapes and no values.

Model, sharding, optimizer and step are those of training. Where a GPU is pretended, what its code would do otherwise
than a CPU's is done so here: see `_as_on_a_gpu` and what follows it. Blocks are not compiled.
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

from shoal.bench.ledger import Fullest, Ledger
from shoal.config.schema import Config
from shoal.data.loader import MicroBatch, StepBatch
from shoal.mistakes import UserMistake
from shoal.models.build import blueprint, build_on_meta
from shoal.models.loss import KERNEL_CHUNK_LOGITS, HeadAndLoss
from shoal.models.tensor_slices import local_tensor
from shoal.optim.adamw import AdamW
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.optimizer import NamedOptimizer, check_cuts, check_groups
from shoal.parallel.apply import freeze
from shoal.parallel.check import check_parallel
from shoal.parallel.model import ParallelModel
from shoal.parallel.ranks import Ranks
from shoal.plan.decide import Choice
from shoal.plan.run import Run
from shoal.train.build import build, keep_small_gradients
from shoal.train.step import TrainStep

# Parts of a step by the names that the forecast has for the moments at which it sums up; and two that it leaves out,
# because what is held there grows or shrinks from one such moment to the next.
FORWARD, LOSS, BACKWARD = "forward pass", "loss", "start of the backward pass"
BETWEEN, LAST, EMBEDDING, STEP = "backward pass", "first block's gradients", "embedding's gradient", "optimizer step"
# The first step makes the optimizer's state and FSDP's buffers; the second is as all that follow.
STEPS = 2


@dataclass(frozen=True)
class Traced:
    """What a rank held at the fullest moment of each part of a step, in bytes."""

    moments: Mapping[str, Fullest]
    parameters: int  # of the whole model

    @property
    def peak(self) -> str:
        return max(self.moments, key=lambda name: self.moments[name].bytes)


def check_traceable(config: Config, run: Run) -> None:
    """A UserMistake where a rank needs more of the others than that exchanges return at once."""
    if run.mesh.pp > 1:
        raise UserMistake(
            "bench rank cannot be one stage of a pipeline: the next stage would wait for what no other sends. Use "
            "parallel.pp 1."
        )
    if config.parallel.offload != "none":
        raise UserMistake(
            "bench rank without a GPU does not tell the host's memory from a device's; use parallel.offload none."
        )
    if config.train.precision == "fp8":
        raise UserMistake("bench rank without a GPU cannot trace 8-bit products; use train.precision bf16-mixed.")


def trace(choice: Choice, report: Callable[[str], None] = lambda _: None) -> Traced:
    """One steady step of the first rank of the job. There must be a fake process group where there are other ranks."""
    config, run = choice.config, choice.run
    check_traceable(config, run)
    built = build_on_meta(blueprint(config.model), attention=config.model.attention, longest=config.data.max_length)
    parameters = sum(parameter.numel() for parameter in built.parameters())
    freeze(built, config.model.freeze)
    check_groups(dict(built.named_parameters()), config.train)
    check_parallel(built, config, strategy=run.strategy, mesh=run.mesh, grad_accum_steps=run.grad_accum_steps)
    check_cuts(built, config.train, run.mesh.tp)
    on_gpu = not choice.machine.is_cpu
    ledger = Ledger(_only_on_a_cpu(built) if on_gpu else lambda operation, purpose, tensor: False)
    with ledger:
        step = _build(built, choice, ledger, on_gpu)
        report(f"{parameters:,} parameters laid out as the first of {run.world_size} ranks has them")
        _watch_blocks(step.model, built, ledger)
        for number in range(STEPS):
            if number == STEPS - 1:
                book = ledger.record()
            ledger.begin(FORWARD, "other")
            step(_batch(config, run), config.train.lr)
            ledger.call((local_tensor(state) for state in step.optimizer.state().values()), "optimizer state")
            report(f"step {number + 1} of {STEPS} traced")
        return Traced(book.fullest(ledger.names), parameters)


def _build(built: Any, choice: Choice, ledger: Ledger, on_gpu: bool) -> TrainStep:
    run, chosen = choice.run, choice.chosen()
    ranks = Ranks(0, run.world_size, 0, torch.device("cpu"))
    model, optimizer = build(built, choice.config, chosen, run.mesh, ranks, folder=None, values=False)
    if on_gpu:
        optimizer = _as_on_a_gpu(optimizer, model)
        _measure_as_on_a_gpu(model)
    keep_small_gradients(model, optimizer, chosen)
    scaler = LossScaler(ranks.device, enabled=model.precision.scaled)
    ledger.building = False
    weights = [*model.parameters.values(), *model.low_precision.values()]
    ledger.call((local_tensor(weight) for weight in weights), "weights")
    for module in model.modules:
        if isinstance(module, DistributedDataParallel):
            _return_at_once(module)
    _watch_optimizer(optimizer, model, ledger)
    return TrainStep(model, optimizer, scaler, clip=choice.config.train.clip, total=ranks.sum)


def _as_on_a_gpu(optimizer: NamedOptimizer, model: ParallelModel) -> NamedOptimizer:
    """On CUDA one kernel does AdamW's step and makes no tensors but the state."""
    parts: list[torch.optim.Optimizer] = []
    for part in optimizer.parts:
        if type(part) is torch.optim.AdamW:
            part = AdamW(part.param_groups, **{key: part.defaults[key] for key in ("lr", "betas", "eps")})
        if isinstance(part, AdamW):
            part.kernel = lambda tensors, numbers, usable, factor: None
        parts.append(part)
    return NamedOptimizer(parts, optimizer.names, optimizer.partition, optimizer.offloaded, model.low_precision)


def _measure_as_on_a_gpu(model: ParallelModel) -> None:
    """On CUDA one kernel does the loss of a chunk, which is larger, and writes the slope over the logits."""

    def over_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return logits.new_zeros((), dtype=torch.float32), logits

    for end in (one for module in model.modules for one in module.modules() if isinstance(one, HeadAndLoss)):
        if end.measure is None:
            end.chunks = lambda hidden: (over_logits, KERNEL_CHUNK_LOGITS)  # type: ignore[method-assign]


def _only_on_a_cpu(model: nn.Module) -> Callable[[str, str, Tensor], bool]:
    """The chunked loss adds a product to the head's gradient; only a CPU makes the product first, unless it is fp32
    already (models/loss.py)."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    width = None if head is None else head.weight.shape[1]

    def leaves_out(operation: str, purpose: str, tensor: Tensor) -> bool:
        wide = tensor.dim() == 2 and tensor.shape[1] == width and tensor.dtype != torch.float32
        return operation == "aten::mm" and purpose == "head" and wide

    return leaves_out


def _return_at_once(module: DistributedDataParallel) -> None:
    """A fake group's averages have no result that DDP could wait for."""

    def average(_: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    module.register_comm_hook(None, average)


def _watch_blocks(model: ParallelModel, built: Any, ledger: Ledger) -> None:
    """Let the ledger know which part of the step it is, by the blocks that are passed.

    The forecast sums up where the backward pass begins, which here is two blocks, because the gradients of one are
    reduced beside the backward of the next; and where it ends, with the first block.
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
        begin = partial(ledger.begin, parts[index], "backward of a block")
        block.register_forward_hook(lambda block, inputs, output, begin=begin: _after(output, begin))
    begin = partial(ledger.begin, EMBEDDING, "embedding's gradient")
    blocks[0].register_forward_pre_hook(lambda block, inputs, named: _after((inputs, named), begin), with_kwargs=True)

    def ends(block: nn.Module, inputs: Any, output: Any) -> None:
        # The last block's result is the final norm's input, which the forecast counts with the head.
        ledger.call((one for one in tree_leaves(output) if isinstance(one, Tensor)), "head")
        ledger.begin(LOSS, "head")

    blocks[-1].register_forward_hook(ends)


def _after(values: Any, do: Callable[[], None]) -> None:
    """When the gradient of the first of these that has one is there."""
    tensors = (one for one in tree_leaves(values) if isinstance(one, Tensor) and one.requires_grad)
    if (tensor := next(tensors, None)) is not None:
        tensor.register_hook(lambda gradient: do())  # type: ignore[no-untyped-call]


def _watch_optimizer(optimizer: NamedOptimizer, model: ParallelModel, ledger: Ledger) -> None:
    def begins(*_: Any) -> None:
        gradients = (parameter.grad for parameter in model.parameters.values())
        ledger.call((local_tensor(one) for one in gradients if one is not None), "gradients")
        ledger.begin(STEP, "optimizer's work")

    optimizer.parts[0].register_step_pre_hook(begins)


def _batch(config: Config, run: Run) -> StepBatch:
    """Rows as long as they may be."""
    shape = (run.micro_batch, config.data.max_length)

    def whole() -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def one_pass() -> MicroBatch:
        if not run.packed:
            return MicroBatch(whole(), whole())
        return MicroBatch(whole(), whole(), whole(), torch.zeros(shape, dtype=torch.int32))

    grad_accum_steps = [one_pass() for _ in range(run.grad_accum_steps)]
    return StepBatch(grad_accum_steps, run.global_batch * config.data.max_length, np.empty(0))

"""The whole parallel recipe, in the one order that works: build → compile → shard → fill, or fill → replicate."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.config.mesh import Mesh
from shoal.config.schema import Config
from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy, read_anatomy
from shoal.models.loss import LanguageModel, choose_loss
from shoal.models.weights import Weights, materialize
from shoal.parallel.compile import compile_backend, compile_blocks
from shoal.parallel.mesh import lay_mesh
from shoal.parallel.precision import ComputeCopies, Precision, read_precision
from shoal.parallel.ranks import Ranks
from shoal.parallel.shard import replicate, shard_fully


@dataclass
class ParallelModel:
    """A model spread over ranks, as the loop sees it."""

    module: nn.Module  # call it with a micro-batch: (loss sum, target count)
    model: Any  # the transformers model inside
    anatomy: Anatomy
    precision: Precision
    parameters: dict[str, nn.Parameter]  # the weights that are trained, by their Hugging Face names
    copies: ComputeCopies | None
    loss_note: str | None  # said to the user: the loss is not the one asked for

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.module(batch)
        return result

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Around one pass of a step. DDP averages gradients in the last pass only.

        FSDP reduces in every pass: it never holds a whole gradient, which is what it was chosen for.
        """
        if isinstance(self.module, DistributedDataParallel) and not last:
            with self.module.no_sync():
                yield
        else:
            yield

    def weights_changed(self) -> None:
        """After an optimizer step, or after weights were loaded."""
        if self.copies is not None:
            self.copies.refresh()


def parallelize(
    model: Any,
    config: Config,
    *,
    strategy: str,
    mesh: Mesh,
    ranks: Ranks,
    micro_batch: int,
    folder: Path | None,
    values: bool = True,
) -> ParallelModel:
    """Spread `model`, which is on meta, over `mesh`. No rank holds it whole unless the mesh says so.

    Weights come from `folder` or, where that is None, from the seed; with `values` false they are left unset, because
    a checkpoint will be read into them.
    """
    train, parallel = config.train, config.parallel
    precision = read_precision(train.precision, train.reduce_dtype)
    anatomy = read_anatomy(model)
    freeze(model, config.model.freeze)
    length = config.data.max_length
    # A chunked loss makes its gradients before they are scaled, and fp16 cannot hold the smallest of them.
    wanted = "plain" if train.loss == "auto" and precision.scaled else train.loss
    loss = choose_loss(wanted, anatomy, micro_batch * length, model.config.get_text_config().vocab_size)
    module: nn.Module = LanguageModel(model, anatomy, loss)
    blocks = anatomy.block_modules(model)

    if (backend := compile_backend(train.compile, ranks.device)) is not None:
        compile_blocks(blocks, backend)

    def fill() -> None:
        source = Weights(folder, config.seed) if values else None
        materialize(model, anatomy, device=ranks.device, dtype=precision.weights, source=source)

    copies = None
    if strategy == "fsdp":
        # Sharded while on meta, so that only this rank's part is ever given memory.
        shard_fully(
            module,
            blocks,
            lay_mesh(mesh, ranks.device.type)["dp_shard"],
            precision,
            reshard=parallel.reshard is not False,
            prefetch=parallel.prefetch,
        )
        fill()
        parameters = dict(model.named_parameters())
    else:
        # DDP cannot wrap meta tensors.
        fill()
        parameters = dict(model.named_parameters())
        if precision.mixed:
            module = copies = ComputeCopies(module, precision.compute)
        if strategy == "ddp":
            module = replicate(module, precision, ranks.device)
    note = None
    if loss == "plain" and train.loss == "chunked":
        note = f"train.loss chunked has no effect: the head of {type(model).__name__} is more than one matrix."
    return ParallelModel(module, model, anatomy, precision, parameters, copies, note)


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

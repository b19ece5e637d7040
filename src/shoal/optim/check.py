"""Mistakes about the optimizer that the model shows, before anything is allocated."""

from collections.abc import Mapping
from fnmatch import fnmatch

from torch import nn

from shoal.catalogue.optimizers import find_optimizer
from shoal.config.schema import TrainConfig
from shoal.mistakes import UserMistake
from shoal.models.anatomy import read_anatomy
from shoal.optim.eight_bit import is_quantized
from shoal.parallel.tensor import row_parallel_widths
from shoal.plan.check import check_moment_shards


def check_groups(parameters: Mapping[str, nn.Parameter], train: TrainConfig) -> None:
    """Every pattern of `lr_groups` must match a trained parameter."""
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    for pattern in train.lr_groups:
        if not any(fnmatch(name, pattern) for name in trained):
            raise UserMistake(f"train.lr_groups: {pattern!r} matches no trained parameter.")


def check_quantization_blocks(model: nn.Module, train: TrainConfig, degree: int) -> None:
    """Tensor parallelism must not split a quantization block of adamw8bit."""
    optimizer = find_optimizer(train.optimizer.name)
    if not optimizer.is_quantized or degree == 1:
        return
    parameters = dict(model.named_parameters())
    widths = {
        name: width
        for name, width in row_parallel_widths(model, read_anatomy(model)).items()
        if parameters[name].requires_grad and is_quantized(tuple(parameters[name].shape))
    }
    check_moment_shards(degree, optimizer.name, widths)

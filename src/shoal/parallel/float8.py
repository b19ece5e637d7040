"""`train.precision: fp8`: float8 matmuls in the linear layers of the blocks; with `train.fp8_head` in lm_head too."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from shoal.config.schema import Config
from shoal.mistakes import UserMistake
from shoal.models.adapters import adapter_parameters
from shoal.models.anatomy import read_anatomy
from shoal.models.float8 import MULTIPLE, float8_linear
from shoal.parallel.device import Device
from shoal.parallel.patch import patch
from shoal.parallel.tensor import RowParallel

# The first GPUs whose tensor cores support float8: Ada and Hopper.
CAPABILITY = (8, 9)
# The user is told when float8 applies to a smaller fraction of the blocks' weights.
MOSTLY = 0.9


def check_float8(model: Any, device: Device) -> None:
    """Raise a UserMistake unless `model` has eligible layers and the device supports float8."""
    if device.capability is not None and device.capability < CAPABILITY:
        raise UserMistake(
            f"train.precision fp8 needs a GPU of compute capability {_dotted(CAPABILITY)} or newer, such as an L40S "
            f"or an H100, and this one has {_dotted(device.capability)}; use bf16-mixed."
        )
    if not any(_eligible(block) for block in read_anatomy(model).block_modules(model)):
        raise UserMistake(
            f"train.precision fp8: {type(model).__name__} has no linear layers in its blocks whose dimensions are "
            f"multiples of {MULTIPLE}; use bf16-mixed."
        )


def use_float8(blocks: list[nn.Module]) -> None:
    """In place. After tensor parallelism, which determines the dimensions of a layer."""
    for block in blocks:
        for linear in _eligible(block):
            patch(linear, _Float8RowParallel if isinstance(linear, RowParallel) else _Float8Linear)


def uses_float8_head(config: Config) -> bool:
    """Whether a chunked loss computes its matmuls in float8."""
    return config.train.precision == "fp8" and config.train.fp8_head


def float8_notes(name: str, blocks: list[nn.Module]) -> Iterator[str]:
    """For the user, if a model called `name` has other matrices in its blocks too."""
    matrices = 0
    for block in blocks:
        added = {id(one) for one in adapter_parameters(block).values()}  # adapters stay in bf16 in any case
        matrices += sum(one.numel() for one in block.parameters() if one.dim() >= 2 and id(one) not in added)
    fraction = sum(one.weight.numel() for block in blocks for one in _eligible(block)) / matrices if matrices else 1.0
    if fraction < MOSTLY:
        yield (
            f"train.precision fp8 applies to {fraction:.0%} of the weights in {name}'s blocks: the others are not "
            f"linear layers whose dimensions are multiples of {MULTIPLE}, and stay in bf16."
        )


def _eligible(block: nn.Module) -> list[nn.Linear]:
    linears = (module for module in block.modules() if isinstance(module, nn.Linear))
    return [one for one in linears if all(side % MULTIPLE == 0 for side in one.weight.shape)]


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


class _Float8Linear:
    weight: Tensor
    bias: Tensor | None

    def forward(self, inputs: Tensor) -> Tensor:
        return float8_linear(inputs, self.weight, self.bias)


class _Float8RowParallel:
    """A row-parallel layer: its matmul is in float8; the partial results are summed in their own dtype."""

    weight: Tensor

    def matmul(self, inputs: Tensor) -> Tensor:
        return float8_linear(inputs, self.weight)

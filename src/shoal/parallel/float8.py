"""`train.precision: fp8`: the linear layers of the blocks multiply in 8 bits; head, embedding and norms do not."""

from typing import Any

from torch import Tensor, nn

from shoal.mistakes import UserMistake
from shoal.models.anatomy import read_anatomy
from shoal.models.float8 import MULTIPLE, float8_linear
from shoal.parallel.device import Device
from shoal.parallel.patch import patch
from shoal.parallel.tensor import RowParallel

# The first GPUs whose matrix units know 8-bit floats: Ada and Hopper.
CAPABILITY = (8, 9)


def check_float8(model: Any, device: Device) -> None:
    """Raise a UserMistake unless `model` has layers for it, and the device can."""
    if device.capability is not None and device.capability < CAPABILITY:
        raise UserMistake(
            f"train.precision fp8 needs a GPU of compute capability {_version(CAPABILITY)} or newer, such as an L40S "
            f"or an H100, and this one has {_version(device.capability)}; use bf16-mixed."
        )
    if not any(_fitting(block) for block in read_anatomy(model).block_modules(model)):
        raise UserMistake(
            f"train.precision fp8: {type(model).__name__} has no linear layers in blocks whose sides are multiples of "
            f"{MULTIPLE}; use bf16-mixed."
        )


def use_float8(blocks: list[nn.Module]) -> None:
    """In place. After tensors are cut, because that decides the sides of a layer."""
    for block in blocks:
        for linear in _fitting(block):
            patch(linear, _Float8Product if isinstance(linear, RowParallel) else _Float8Linear)


def share_in_float8(blocks: list[nn.Module]) -> float:
    """Of the numbers in the blocks' matrices, those that are multiplied in 8 bits."""
    matrices = sum(one.numel() for block in blocks for one in block.parameters() if one.dim() >= 2)
    return sum(one.weight.numel() for block in blocks for one in _fitting(block)) / matrices if matrices else 1.0


def _fitting(block: nn.Module) -> list[nn.Linear]:
    linears = (module for module in block.modules() if isinstance(module, nn.Linear))
    return [one for one in linears if all(side % MULTIPLE == 0 for side in one.weight.shape)]


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


class _Float8Linear:
    weight: Tensor
    bias: Tensor | None

    def forward(self, inputs: Tensor) -> Tensor:
        return float8_linear(inputs, self.weight, self.bias)


class _Float8Product:
    """A matrix of which each tensor-parallel rank has a part: its product alone; what is summed stays as it was."""

    weight: Tensor

    def product(self, inputs: Tensor) -> Tensor:
        return float8_linear(inputs, self.weight)

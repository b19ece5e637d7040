"""The AdamW update of one parameter in PyTorch operations; adamw_kernel.py is the same for CUDA."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.optim import eight_bit
from shoal.optim.eight_bit import FIRST, SCALES, SECOND
from shoal.optim.rounding import StochasticRounding


@dataclass(frozen=True)
class Hyperparameters:
    """The values of a parameter group in one step."""

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float

    @property
    def kept(self) -> float:
        """The factor that weight decay multiplies a weight with."""
        return 1 - self.lr * self.decay


@dataclass(frozen=True)
class Tensors:
    """The local shards of a parameter and of everything that its update reads or writes."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    correction: Tensor  # bias corrections of the two moments: see `adamw._corrections`
    copy: Tensor | None  # the low-precision copy of the weight
    rounding: StochasticRounding | None = None  # None: the weight is rounded to nearest

    @property
    def in_eight_bits(self) -> bool:
        return SCALES[FIRST] in self.state


# (one parameter's tensors, the group's hyperparameters, usable flag, gradient factor)
Update = Callable[[Tensors, Hyperparameters, Tensor, Tensor | None], None]


def update(tensors: Tensors, hyperparameters: Hyperparameters, usable: Tensor, factor: Tensor | None) -> None:
    """Every operation rounds once, so that a shard has the same result as in the full tensor."""
    weight, state = tensors.weight, tensors.state
    gradient = tensors.gradient.float()
    if factor is not None:
        gradient = gradient * factor
    if tensors.in_eight_bits:
        first = eight_bit.read_first(state[FIRST], state[SCALES[FIRST]])
        second = eight_bit.read_second(state[SECOND], state[SCALES[SECOND]])
    else:
        first, second = state[FIRST].float(), state[SECOND].float()
    first = first + (gradient - first) * (1 - hyperparameters.betas[0])
    second = second * hyperparameters.betas[1] + gradient * gradient * (1 - hyperparameters.betas[1])
    first_correction, second_correction = tensors.correction
    direction = first / (second.sqrt() / second_correction + hyperparameters.eps)
    updated = weight.float() * hyperparameters.kept - direction * (hyperparameters.lr / first_correction)
    weight.copy_(updated if tensors.rounding is None else tensors.rounding.round(updated, state["step"]))
    if tensors.copy is not None:
        tensors.copy.copy_(weight)
    if tensors.in_eight_bits:
        eight_bit.write_first(first, state[FIRST], state[SCALES[FIRST]])
        eight_bit.write_second(second, state[SECOND], state[SCALES[SECOND]], state["step"])
    else:
        state[FIRST].copy_(first)
        state[SECOND].copy_(second)

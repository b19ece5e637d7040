"""What AdamW does to one parameter, in plain operations of torch; adamw_kernel.py does the same on CUDA."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.optim import eight_bit
from shoal.optim.eight_bit import FIRST, SCALES, SECOND


@dataclass(frozen=True)
class Numbers:
    """What is the same for all parameters of a group in a step."""

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float

    @property
    def kept(self) -> float:
        """What weight decay leaves of a weight."""
        return 1 - self.lr * self.decay


@dataclass(frozen=True)
class Tensors:
    """This rank's part of a parameter and of all that its update reads or writes."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    correction: Tensor  # of the bias of the two moments in early steps: see adamw.py
    copy: Tensor | None  # of the weight, in the type that is computed with

    @property
    def in_eight_bits(self) -> bool:
        return SCALES[FIRST] in self.state


# (one parameter's tensors, the group's numbers, whether the step is usable, what gradients are multiplied with)
Update = Callable[[Tensors, Numbers, Tensor, Tensor | None], None]


def update(tensors: Tensors, numbers: Numbers, usable: Tensor, factor: Tensor | None) -> None:
    """Operations of one rounding each: a part of a tensor comes out as in the whole."""
    weight, state = tensors.weight, tensors.state
    gradient = tensors.gradient.float()
    if factor is not None:
        gradient = gradient * factor
    if tensors.in_eight_bits:
        first = eight_bit.read_first(state[FIRST], state[SCALES[FIRST]])
        second = eight_bit.read_second(state[SECOND], state[SCALES[SECOND]])
    else:
        first, second = state[FIRST].float(), state[SECOND].float()
    first = first + (gradient - first) * (1 - numbers.betas[0])
    second = second * numbers.betas[1] + gradient * gradient * (1 - numbers.betas[1])
    first_correction, second_correction = tensors.correction
    direction = first / (second.sqrt() / second_correction + numbers.eps)
    weight.copy_(weight.float() * numbers.kept - direction * (numbers.lr / first_correction))
    if tensors.copy is not None:
        tensors.copy.copy_(weight)
    if tensors.in_eight_bits:
        eight_bit.write_first(first, state[FIRST], state[SCALES[FIRST]])
        eight_bit.write_second(second, state[SECOND], state[SCALES[SECOND]], state["step"])
    else:
        state[FIRST].copy_(first)
        state[SECOND].copy_(second)

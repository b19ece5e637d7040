"""The AdamW update in PyTorch operations, one tensor after another; adamw_kernel.py is the same for CUDA."""

import torch
from torch import Tensor

from shoal.optim import eight_bit
from shoal.optim.eight_bit import FIRST, SCALES, SECOND
from shoal.optim.fused import Hyperparameters, TensorLists
from shoal.optim.rounding import StochasticRounding


def update(tensors: TensorLists, hyperparameters: Hyperparameters, factor: Tensor | None) -> None:
    assert tensors.steps is not None
    corrections = bias_corrections(tensors.steps, hyperparameters.betas)
    for index, weight in enumerate(tensors.weights):
        if weight.numel() == 0:  # this rank's shard may be empty
            continue
        gradient = tensors.gradients[index].float()
        if factor is not None:
            gradient = gradient * factor
        state = {field: some[index] for field, some in tensors.state.items()}
        _update(
            weight, gradient, state, tensors.steps[index], corrections[index], hyperparameters, tensors.rounding[index]
        )
        if (copy := tensors.copies[index]) is not None:
            copy.copy_(weight)


def bias_corrections(steps: Tensor, betas: tuple[float, float]) -> Tensor:
    """For every step count, the corrections of the first moment and of the square root of the second."""
    counts = steps.double()  # 1 - 0.999 loses precision in fp32
    first, second = (1 - beta**counts for beta in betas)
    return torch.stack([first, second.sqrt()], dim=1).float()


def _update(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    step: Tensor,
    correction: Tensor,
    hyperparameters: Hyperparameters,
    rounding: StochasticRounding | None,
) -> None:
    """Every operation rounds once, so that a shard has the same result as in the full tensor."""
    in_eight_bits = SCALES[FIRST] in state
    if in_eight_bits:
        first = eight_bit.read_first(state[FIRST], state[SCALES[FIRST]])
        second = eight_bit.read_second(state[SECOND], state[SCALES[SECOND]])
    else:
        first, second = state[FIRST].float(), state[SECOND].float()
    first = first + (gradient - first) * (1 - hyperparameters.betas[0])
    second = second * hyperparameters.betas[1] + gradient * gradient * (1 - hyperparameters.betas[1])
    first_correction, second_correction = correction
    direction = first / (second.sqrt() / second_correction + hyperparameters.eps)
    updated = weight.float() * hyperparameters.kept - direction * (hyperparameters.lr / first_correction)
    weight.copy_(updated if rounding is None else rounding.round(updated, step))
    if in_eight_bits:
        eight_bit.write_first(first, state[FIRST], state[SCALES[FIRST]])
        eight_bit.write_second(second, state[SECOND], state[SCALES[SECOND]], step)
    else:
        state[FIRST].copy_(first)
        state[SECOND].copy_(second)

"""What `recompute: selective` recomputes, counted by the operators that run."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.parallel.recompute import recompute_blocks
from tests.parallel.blocks import small_block


class Matmuls(TorchDispatchMode):
    """Counts matmuls by the shape of the second matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if operation is torch.ops.aten.mm.default:
            self.counts[tuple(arguments[1].shape)] += 1
        return operation(*arguments, **(named or {}))


def matmuls(how: str) -> Counter[tuple[int, int]]:
    """The matmuls of a forward and a backward pass of one block, whose three kinds of matrices differ in shape."""
    block, hidden, others = small_block()
    recompute_blocks([block], how)
    with Matmuls() as seen:
        result = block(hidden, **others)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
    return seen.counts


def test_selective_recomputes_one_widening_matmul_and_full_every_one_that_a_gradient_needs():
    none, selective, full = matmuls("none"), matmuls("selective"), matmuls("full")
    assert selective - none == {(32, 96): 1}, "one of gate and up"
    # All but the last, whose output nothing needs: query and output (32 × 32), key and value, gate and up.
    assert full - none == {(32, 32): 2, (32, 16): 2, (32, 96): 2}

"""The activations that compiled blocks save for the backward pass."""

import pytest
import torch

from shoal.parallel.compile import compile_blocks
from tests.parallel.blocks import small_block


def saved_elements(*, keeps_all: bool) -> int:
    """The number of elements that a block saves, by the partitioner's choice."""
    block, hidden, others = small_block()
    compile_blocks([block], "aot_eager_decomp_partition", keeps_all=keeps_all)
    sizes = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        block(hidden, **others)
    return sum(sizes)


@pytest.mark.slow
def test_a_second_run_in_a_process_uses_its_own_compiler_settings():
    """The compiler sees identical blocks and has those of the first run in its cache."""
    try:
        everything, less = saved_elements(keeps_all=True), saved_elements(keeps_all=False)
        assert less < everything
        assert saved_elements(keeps_all=True) == everything
    finally:
        compile_blocks([], "eager", keeps_all=True)

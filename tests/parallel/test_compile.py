"""What compiled blocks keep for the backward pass."""

import torch

from shoal.parallel.compile import compile_blocks
from tests.parallel.blocks import small_block


def kept(*, keeps_all: bool) -> int:
    """Numbers that a block keeps, by the compiler's own choice of them."""
    block, hidden, others = small_block()
    compile_blocks([block], "aot_eager_decomp_partition", keeps_all=keeps_all)
    sizes = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        block(hidden, **others)
    return sum(sizes)


def test_a_second_run_in_a_process_keeps_what_it_asks_for_and_not_what_the_first_did():
    """Their blocks look the same to the compiler, which has the first one's at hand."""
    try:
        everything, less = kept(keeps_all=True), kept(keeps_all=False)
        assert less < everything
        assert kept(keeps_all=True) == everything
    finally:
        compile_blocks([], "eager", keeps_all=True)

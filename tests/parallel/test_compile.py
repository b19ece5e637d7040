"""The activations that compiled blocks save for the backward pass."""

import pytest
import torch

from shoal.parallel.compile import compile_blocks
from tests.harness import LLAMA, settings, train_in_whole_graphs
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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recompute", "varying"),
    [
        ("lora", "full", True),
        ("qlora", "none", False),
        ("qlora", "full", False),
        ("qlora", "selective", True),
    ],
)
def test_blocks_with_adapters_compile_without_graph_breaks(kind, recompute, varying, instructions, text, tmp_path):
    """Lengths that vary are compiled once more, with dynamic shapes, which takes two thirds of the time: each kind and
    each recompute has them in one case. LoRA with the other two is in tests/parity/test_adapters.py.

    The first block is compiled apart from the second, whose inputs have gradients; those of one length, and in
    test_adapters.py of lengths that vary, have both."""
    config = settings(
        instructions if varying else text,
        model__shape={**LLAMA, "layers": 1 if varying else 2, "hidden": 64, "ffn": 128, "positions": 512},
        adapter={"kind": kind, "rank": 4},
        train__steps=1,
        train__compile="aot_eager",
        train__recompute=recompute,
    )
    train_in_whole_graphs(1, config, tmp_path)

"""The activations that compiled blocks save for the backward pass."""

import pytest
import torch

from shoal import api
from shoal.parallel.compile import compile_blocks
from tests.harness import LLAMA, import_compiler, run_ranks, settings
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recompute", "varying"),
    [
        ("lora", "none", True),
        ("lora", "full", False),
        ("lora", "selective", True),
        ("qlora", "none", False),
        ("qlora", "full", True),
        ("qlora", "selective", False),
    ],
)
def test_blocks_with_adapters_compile_without_graph_breaks(kind, recompute, varying, instructions, text, tmp_path):
    """A block that cannot be compiled as a whole runs eagerly, which only its speed shows. Lengths that vary are
    compiled once more, with dynamic shapes, which takes two thirds of the time: each kind and each recompute has them
    in some case."""
    config = settings(
        instructions if varying else text,
        model__shape={**LLAMA, "hidden": 64, "ffn": 128, "positions": 512},
        adapter={"kind": kind, "rank": 4},
        train__steps=1,
        train__compile="aot_eager",
        train__recompute=recompute,
    )

    def train() -> dict[str, int]:
        api.train(api.config_from_mapping(config), runs=tmp_path)
        return dict(torch._dynamo.utils.counters["graph_break"])

    import_compiler()
    assert run_ranks(1, train) == [{}]

"""What `recompute: selective` recomputes, counted by the operators that run."""

from collections import Counter
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
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


def matmuls(how: str, rank: int = 0) -> Counter[tuple[int, int]]:
    """The matmuls of a forward and a backward pass of one block, whose three kinds of matrices differ in shape; with
    adapters of `rank` on all of them, if any."""
    block, hidden, others = small_block()
    if rank:
        layers = [name for name, one in block.named_modules() if isinstance(one, torch.nn.Linear)]
        block.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=rank, target_modules=layers), block)
    recompute_blocks([block], how, adapter_rank=rank or None)
    with Matmuls() as seen:
        result = block(hidden, **others)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
    return seen.counts


def test_selective_recomputes_one_widening_matmul_and_full_every_one_that_a_gradient_needs():
    none, selective, full = matmuls("none"), matmuls("selective"), matmuls("full")
    assert selective - none == {(32, 96): 1}, "one of gate and up"
    # All but the last, whose output nothing needs: query and output (32 × 32), key and value, gate and up.
    assert full - none == {(32, 32): 2, (32, 16): 2, (32, 96): 2}


def test_selective_recomputes_what_adapters_widen_and_saves_the_layers_as_without_them():
    """An adapter's second factor costs next to nothing to recompute, and its output is as large as the layer's."""
    recomputed = matmuls("selective", rank=2) - matmuls("none", rank=2)
    assert recomputed[32, 96] == 1, "one of gate and up, as without adapters"
    # The second factors, of rank 2: of queries and outputs, of keys and values, of gate and up, and of the last layer.
    assert recomputed[2, 32] + recomputed[2, 16] + recomputed[2, 96] >= 6
    assert sum(recomputed.values()) == 1 + recomputed[2, 32] + recomputed[2, 16] + recomputed[2, 96]

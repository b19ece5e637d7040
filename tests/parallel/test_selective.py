"""What `recompute: selective` computes again: counted, by the operations that run."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.parallel.recompute import recompute_blocks
from tests.parallel.blocks import small_block


class Products(TorchDispatchMode):
    """Counts matrix products by (inner, outer) size."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if operation is torch.ops.aten.mm.default:
            self.counts[tuple(arguments[1].shape)] += 1
        return operation(*arguments, **(named or {}))


def products(how: str) -> Counter[tuple[int, int]]:
    """Of a forward and a backward pass over one block; the matrices of its three kinds of product all differ."""
    block, hidden, others = small_block()
    recompute_blocks([block], how)
    with Products() as seen:
        result = block(hidden, **others)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
    return seen.counts


def test_selective_computes_one_widening_product_again_and_full_all_that_a_gradient_needs():
    kept, again, whole = products("none"), products("selective"), products("full")
    assert again - kept == {(32, 96): 1}, "of gate and up, one"
    # All but the last, whose result nothing needs: query and output (32 × 32), key and value, gate and up.
    assert whole - kept == {(32, 32): 2, (32, 16): 2, (32, 96): 2}

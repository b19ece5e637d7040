"""What `recompute: selective` computes again: counted, by the operations that run."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from shoal.parallel.recompute import recompute_blocks


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
    torch.manual_seed(0)
    settings = LlamaConfig(
        hidden_size=32,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    block: nn.Module = LlamaDecoderLayer(settings, 0)
    recompute_blocks([block], how)
    hidden = torch.randn(2, 20, 32, requires_grad=True)
    positions = LlamaRotaryEmbedding(settings)(hidden, torch.arange(20)[None])
    with Products() as seen:
        result = block(hidden, position_embeddings=positions)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
    return seen.counts


def test_selective_computes_one_widening_product_again_and_full_all_that_a_gradient_needs():
    kept, again, whole = products("none"), products("selective"), products("full")
    assert again - kept == {(32, 96): 1}, "of gate and up, one"
    # All but the last, whose result nothing needs: query and output (32 × 32), key and value, gate and up.
    assert whole - kept == {(32, 32): 2, (32, 16): 2, (32, 96): 2}

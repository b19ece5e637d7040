"""What compiled blocks keep for the backward pass."""

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from shoal.parallel.compile import compile_blocks


def kept(*, keeps_all: bool) -> int:
    """Numbers that a block keeps, by the compiler's own choice of them."""
    settings = LlamaConfig(
        hidden_size=32,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    block: nn.Module = LlamaDecoderLayer(settings, 0)
    compile_blocks([block], "aot_eager_decomp_partition", keeps_all=keeps_all)
    hidden = torch.randn(2, 20, 32, requires_grad=True)
    positions = LlamaRotaryEmbedding(settings)(hidden, torch.arange(20)[None])
    sizes = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        block(hidden, position_embeddings=positions)
    return sum(sizes)


def test_a_second_run_in_a_process_keeps_what_it_asks_for_and_not_what_the_first_did():
    """Their blocks look the same to the compiler, which has the first one's at hand."""
    try:
        everything, less = kept(keeps_all=True), kept(keeps_all=False)
        assert less < everything
        assert kept(keeps_all=True) == everything
    finally:
        compile_blocks([], "eager", keeps_all=True)

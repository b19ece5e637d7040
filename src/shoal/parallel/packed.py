"""Make blocks of the Llama kind use packed weights: see `models.packed`.

Where there are compute copies of weights, those of layers with the same input are one matrix: the parameters, their
gradients and their checkpoints stay what they are.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from shoal.catalogue.families import LLAMA_PLAN, PLANS
from shoal.models.attention import MASKLESS, attend
from shoal.models.packed import gated_linear, rotated_projections
from shoal.parallel.patch import patch
from shoal.parallel.precision import Packed
from shoal.parallel.recipe import Recipe

# The kernels read parts of a row that are a power of two wide, at least so wide.
NARROWEST = 32
# Queries and keys of other model types with LLAMA_PLAN are normed, or biased, before the rotary embedding.
PLAIN_ATTENTION = ("llama", "mistral")


def packs_weights(recipe: Recipe) -> bool:
    """Whether blocks may multiply by packed weights."""
    config, parallel_dims = recipe.config, recipe.parallel_dims
    return (
        recipe.compiled
        and recipe.precision.autocast is not None
        and config.train.precision != "fp8"
        # What the operators save is what the compiler saves where it recomputes nothing.
        and config.train.recompute == "none"
        and not recipe.fully_shard
        and parallel_dims.tp is None
        and parallel_dims.cp is None
        and config.parallel.offload == "none"
    )


def pack_weights(model: Any, blocks: list[nn.Module]) -> list[Packed]:
    """Patch attention and MLP of `blocks` in place; the layers whose weights their operators need as one matrix."""
    settings = model.config.get_text_config()
    if PLANS.get(settings.model_type) is not LLAMA_PLAN:
        return []
    return [one for block in blocks for one in _pack_block(block, settings)]


def _pack_block(block: Any, settings: Any) -> Iterator[Packed]:
    mlp, attention = block.mlp, block.self_attn
    if getattr(settings, "hidden_act", None) == "silu" and settings.intermediate_size % NARROWEST == 0:
        yield from _pack(mlp, [mlp.gate_proj, mlp.up_proj], _GatedMLP)
    plain = settings.model_type in PLAIN_ATTENTION and settings._attn_implementation == MASKLESS
    width = attention.head_dim
    if plain and width >= NARROWEST and width & (width - 1) == 0:
        yield from _pack(attention, [attention.q_proj, attention.k_proj, attention.v_proj], _RotaryAttention)


def _pack(owner: nn.Module, layers: list[nn.Linear], behaviour: type) -> Iterator[Packed]:
    if all(layer.bias is None and layer.weight.requires_grad for layer in layers):
        patch(owner, behaviour)
        owner.register_parameter("packed_weight", None)
        yield Packed(owner, layers)


class _GatedMLP:
    packed_weight: Tensor
    down_proj: nn.Linear

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.down_proj(gated_linear(inputs, self.packed_weight))
        return result


class _RotaryAttention:
    packed_weight: Tensor
    o_proj: nn.Linear
    config: Any
    scaling: float
    attention_dropout: float
    training: bool

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        **named: Any,
    ) -> tuple[Tensor, None]:
        cache = named.pop("past_key_values", None)
        assert cache is None, "a model in training has no cache of keys and values"
        heads = self.config.num_attention_heads
        query, key, value = rotated_projections(hidden_states, self.packed_weight, *position_embeddings, heads)
        found, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=getattr(self.config, "sliding_window", None),
            **named,
        )
        return self.o_proj(found.reshape(*hidden_states.shape[:-1], -1)), None

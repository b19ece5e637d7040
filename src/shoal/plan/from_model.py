"""A shape for any model that can be trained, also for one that the forecast was not made for.

Of such a model the parameters are counted as they are; what it computes is counted as a Llama of its sizes would.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from shoal.catalogue.shapes import ModelShape, parameters
from shoal.mistakes import UserMistake
from shoal.plan.models import EXPERTS, FAMILY, shape_from_settings, text_settings

# Channels of a head, where nothing says how many heads there are.
USUAL_HEAD = 64
# A shape that has the model's parameters but for this share is the model's.
ALIKE = 0.01


@dataclass(frozen=True)
class Counted:
    """What can be seen of a model without knowing its kind."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    tied: bool


def shape_of_model(settings: Mapping[str, Any], counted: Counted) -> tuple[ModelShape, bool]:
    """The shape of a model, given its transformers config and what was counted; and whether that is its own shape, of a
    family whose blocks the forecast was held against, or one that only resembles it."""
    settings = text_settings(settings)
    experts = any(settings.get(name) for name in EXPERTS)
    try:
        shape = shape_from_settings(_one_path(settings) if experts else settings)
    except UserMistake:
        return _of_size(_resembling(counted), counted.parameters), False
    if not experts and abs(parameters(shape) / counted.parameters - 1) < ALIKE:
        return shape, settings.get("model_type") in FAMILY
    return _of_size(shape, counted.parameters), False


def _one_path(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A mixture of experts as what one token sees of it: as many experts as it is sent to, side by side."""
    width = settings.get("moe_intermediate_size") or settings.get("intermediate_size")
    if not isinstance(width, int):
        raise UserMistake("The width of the experts is not known.")
    sent = next((settings[one] for one in ("num_experts_per_tok", "experts_per_token") if settings.get(one)), 1)
    shared = settings.get("shared_expert_intermediate_size") or width * int(settings.get("n_shared_experts") or 0)
    plain = {key: value for key, value in settings.items() if key not in EXPERTS}
    return {**plain, "intermediate_size": width * int(sent) + int(shared)}


def _resembling(counted: Counted) -> ModelShape:
    heads = max(1, counted.hidden // USUAL_HEAD)
    return ModelShape(
        family="llama",
        hidden=counted.hidden,
        layers=max(1, counted.layers),
        heads=heads,
        kv_heads=heads,
        ffn=4 * counted.hidden,
        vocab=counted.vocabulary,
        positions=2048,
        tied=counted.tied,
    )


def _of_size(shape: ModelShape, wanted: int) -> ModelShape:
    """The shape with so many parameters: a narrower feed-forward part where it has too many, and otherwise parameters
    that nothing is known of."""
    over = (parameters(shape) - wanted) / shape.layers
    if over > 0:
        matrices = shape.hidden * (3 if shape.traits.gated else 2)
        shape = replace(shape, ffn=max(1, shape.ffn - ceil(over / matrices)))
    return replace(shape, others=max(0, (wanted - parameters(shape)) // shape.layers))

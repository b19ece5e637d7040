"""A shape for any model that can be trained, including architectures that the forecast does not know.

The parameters of such a model are counted exactly; its compute is that of a Llama of the same sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from shoal.catalogue.families import BY_MODEL_TYPE, FAMILIES
from shoal.catalogue.shapes import ModelShape, parameters
from shoal.mistakes import UserMistake
from shoal.plan.models import shape_from_settings, text_settings

# Head dimension where the config does not state the number of heads.
USUAL_HEAD = 64
# A shape matches the model if their parameter counts differ by less than this share.
ALIKE = 0.01


@dataclass(frozen=True)
class Counted:
    """What can be counted in a model without knowing its architecture."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    tied: bool


def shape_of_model(settings: Mapping[str, Any], counted: Counted) -> tuple[ModelShape, bool]:
    """The shape of a model from its transformers config and its counted sizes; and whether it is exact, for a family
    that the forecast was validated against, or an approximation."""
    settings = text_settings(settings)
    try:
        shape = shape_from_settings(settings)
    except UserMistake:
        shape = replace(_resembling(counted), model_type=str(settings.get("model_type", "")))
        return _of_size(shape, counted.parameters), False
    if abs(parameters(shape) / counted.parameters - 1) < ALIKE:
        family = BY_MODEL_TYPE.get(str(settings.get("model_type")))
        return shape, family is not None and FAMILIES[family].buildable
    return _of_size(shape, counted.parameters), False


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
    """The shape adjusted to `wanted` parameters: a narrower MLP if it has too many, else extra parameters per block
    that take no part in matmuls."""
    shape = replace(shape, others=0)
    over = (parameters(shape) - wanted) / shape.layers
    if over > 0:
        matrices = shape.hidden * (3 if shape.traits.gated else 2)
        shape = replace(shape, ffn=max(1, shape.ffn - ceil(over / matrices)))
    return replace(shape, others=max(0, (wanted - parameters(shape)) // shape.layers))

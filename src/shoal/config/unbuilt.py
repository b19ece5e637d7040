"""The table of options that the schema has and that are not built yet: refused until they are."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.catalogue.families import BUILDABLE, listed
from shoal.catalogue.forecast_families import CODE_FROM_HUB
from shoal.catalogue.shapes import find_shape
from shoal.config.locate import KeyPath, Origins
from shoal.config.schema import Config, ShapeConfig
from shoal.config.words import shown
from shoal.mistakes import UserMistake


def _only(built: Any) -> Callable[[Any], bool]:
    return lambda value: bool(value == built)


def _not(*unbuilt: Any) -> Callable[[Any], bool]:
    return lambda value: value not in unbuilt


def _is_built_recompute(value: Any) -> bool:
    if isinstance(value, str):
        return value not in ("attention", "offload-all")
    return value.first is None and not value.parts


@dataclass(frozen=True)
class Limit:
    """Which values of a key are built, and what to use instead of the others."""

    key: str
    is_built: Callable[[Any], bool]
    meanwhile: str


# Remove a line when its feature is built. Keys that are not in this table are built.
LIMITS = (
    Limit("model.attention", _not("flash"), "Use auto, which uses PyTorch's flash attention."),
    Limit(
        "train.objective",
        _not("kto"),
        "Use apo_zero_unpaired, TRL's variant of it without the KL term, which depends on what else is in the batch.",
    ),
    Limit(
        "train.compile",
        _not("thunder"),
        "Use auto: lightning-thunder 0.2.6 cannot be imported with torch 2.13, which has no Tensor.align_as.",
    ),
    Limit("train.optimizer.name", _not("adafactor", "lamb"), "Use adamw, adamw8bit, or sgd, which needs least memory."),
    Limit("train.precision", _not("16-true"), "Use bf16-true, or 16-mixed."),
    Limit("adapter.quantize", _not("fp4", "fp4-dq", "int8"), "Use nf4 or nf4-dq."),
    Limit("train.optimizer.in_backward", _only(False), "Use adamw8bit, or parallel.strategy fsdp."),
    Limit("train.optimizer.paged", _only(False), "Use parallel.offload optimizer."),
    Limit("train.recompute", _is_built_recompute, "Use selective, full, offload, or every."),
    Limit("parallel.sequence_parallel", _only(True), "Leave it at true, which needs less memory and no more time."),
    Limit("parallel.pp_stages", _only("auto"), "Use auto."),
    Limit("parallel.optimizer_ranks", _only("auto"), "Use auto, or parallel.sharding hybrid_shard."),
)


def is_built(path: KeyPath, value: Any) -> bool:
    """Whether training accepts this value of a key, if its type allows it."""
    return all(limit.is_built(value) for limit in LIMITS if tuple(limit.key.split(".")) == path)


def find_unbuilt(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """The keys whose values are not built yet, each with a sentence."""
    values = config.model_dump(by_alias=True)
    for limit in LIMITS:
        path: KeyPath = tuple(limit.key.split("."))
        if not limit.is_built(_attribute(config, path)):
            value: Any = values
            for key in path:
                value = value[key]
            wanted = value if isinstance(value, str) else shown(value)
            yield path, f"{limit.key} {wanted} is not built yet. {limit.meanwhile}"
    named = config.model.shape
    if isinstance(named, ShapeConfig) and named.family not in BUILDABLE:
        yield (
            ("model", "shape", "family"),
            f"model.shape.family {named.family} is only forecast: train such a model from a folder or a cached id with "
            f"model.from, or use family {listed(list(BUILDABLE))}.",
        )
    if isinstance(named, str) and not ((shape := find_shape(named)).is_family and shape.traits.buildable):
        instead = f"train a {shape.model_type} from a folder or a cached id with model.from."
        if shape.model_type in CODE_FROM_HUB:
            instead = f"transformers builds a {shape.model_type} only with code from the hub. Choose another model."
        yield ("model", "shape"), f"model.shape {named} is only forecast: {instead}"


def refuse_unbuilt(config: Config, origins: Origins) -> None:
    """Raise a UserMistake with one line for each option of the config that is not built yet."""
    sentences = [origins.prefix(path) + sentence for path, sentence in find_unbuilt(config)]
    if sentences:
        raise UserMistake("\n".join(sentences))


def _attribute(config: Any, path: KeyPath) -> Any:
    for key in path:
        config = getattr(config, f"{key}_" if key in ("from", "async") else str(key))
    return config

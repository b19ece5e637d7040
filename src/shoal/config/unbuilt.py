"""The table of options that the schema has and that are not built yet: refused until they are."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.catalogue.families import BUILDABLE, FAMILIES, listed
from shoal.catalogue.shapes import find_shape
from shoal.config.explain import shown
from shoal.config.locate import KeyPath, Origins
from shoal.config.schema import Config
from shoal.mistakes import UserMistake


def _not(*unbuilt: Any) -> Callable[[Any], bool]:
    return lambda value: value not in unbuilt


@dataclass(frozen=True)
class Limit:
    """Which values of a key are built, and what to use instead of the others."""

    key: str
    is_built: Callable[[Any], bool]
    meanwhile: str


# Remove a line when its feature is built. Keys that are not in this table are built.
LIMITS = (
    Limit("model.attention", _not("flash"), "Use auto, which uses PyTorch's flash attention."),
    Limit("data.source", _not("cells"), "Use another source."),
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
)


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
    if (family := _family(config)) is not None and not FAMILIES[family].causal:
        causal = listed([name for name in BUILDABLE if FAMILIES[name].causal])
        yield (
            ("model", "shape"),
            f"model.shape is a {family}, which learns masked tokens; that objective is not built yet. Use {causal}.",
        )


def refuse_unbuilt(config: Config, origins: Origins) -> None:
    """Raise a UserMistake with one line for each option of the config that is not built yet."""
    sentences = [origins.prefix(path) + sentence for path, sentence in find_unbuilt(config)]
    if sentences:
        raise UserMistake("\n".join(sentences))


def _family(config: Config) -> str | None:
    shape = config.model.shape
    if shape is None:
        return None
    return find_shape(shape).family if isinstance(shape, str) else shape.family


def _attribute(config: Any, path: KeyPath) -> Any:
    for key in path:
        config = getattr(config, f"{key}_" if key in ("from", "async") else str(key))
    return config

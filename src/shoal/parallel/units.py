"""What FSDP gathers and frees as one: each block and each end of the model, or what `parallel.wrap` says."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.config.schema import WrapConfig
from shoal.mistakes import UserMistake, suggestion
from shoal.models.anatomy import Anatomy, require_blocks
from shoal.models.loss import LanguageModel
from shoal.models.weights import parameter_slots


@dataclass(frozen=True)
class Units:
    """In the order in which the forward pass enters them; what they leave over belongs to the root."""

    first: list[nn.Module]  # the embedding, where it is a table and nothing else has that too
    blocks: list[nn.Module]
    last: list[nn.Module]  # the head with the loss, likewise


def choose_units(language: LanguageModel, wrap: str | WrapConfig, *, part: bool = False) -> Units:
    """`wrap` is about what lies between the ends. A `part` of a model, a stage of a pipeline, need not have all that
    it names."""
    model, anatomy = language.model, language.anatomy
    embedding, shared = model.get_submodule(anatomy.embedding), _shared(model)
    # One with a norm inside, say, would need that norm's weight in the backward pass too.
    is_table = isinstance(embedding, nn.Embedding) and len(list(embedding.parameters())) == 1
    first: list[nn.Module] = [embedding] if is_table and _is_whole(embedding, shared) else []
    last: list[nn.Module] = [language.end] if anatomy.linear_head and _is_whole(language.end.head, shared) else []
    blocks = [one for one in choose_blocks(model, anatomy, wrap, part=part) if one not in first]
    return Units(first, blocks, last)


def choose_blocks(model: Any, anatomy: Anatomy, wrap: str | WrapConfig, *, part: bool = False) -> list[nn.Module]:
    """What `wrap` says, or a UserMistake where it cannot be."""
    if not isinstance(wrap, WrapConfig):
        instead = "set parallel.wrap to {min_params: 10_000_000} or to {classes: [NAME]}, which need none"
        require_blocks(anatomy, model, "parallel.wrap auto", instead)
        return anatomy.block_modules(model)
    allowed = _wrappable(model, anatomy)
    if wrap.min_params is not None:
        chosen = _by_size(model.get_submodule(anatomy.backbone), wrap.min_params, allowed)
    else:
        names = {type(module).__name__ for module in model.modules()}
        for name in wrap.classes:
            if name not in names and not part:
                raise UserMistake(
                    f"parallel.wrap: no module of {type(model).__name__} is a {name}.{suggestion(name, names)}"
                )
        chosen = {module for module in allowed if type(module).__name__ in wrap.classes}
        if not chosen and not part:
            raise UserMistake(
                f"parallel.wrap: {', '.join(wrap.classes)} cannot be wrapped: the head is gathered for itself anyway, "
                "and modules that share weights with others stay with the root."
            )
    return [module for module in model.modules() if module in chosen]


def _wrappable(model: Any, anatomy: Anatomy) -> set[nn.Module]:
    """Modules of the backbone with parameters of their own."""
    shared, backbone = _shared(model), model.get_submodule(anatomy.backbone)
    return {one for one in backbone.modules() if not isinstance(one, nn.ModuleList) and _is_whole(one, shared)}


def _shared(model: Any) -> list[list[nn.Module]]:
    """Of each parameter that several modules have, those modules."""
    return [[owner for owner, _ in places] for places in parameter_slots(model).values() if len(places) > 1]


def _is_whole(module: nn.Module, shared: list[list[nn.Module]]) -> bool:
    """Whether it has parameters, and none that a module outside has too: a tied weight must stay one."""
    inside = set(module.modules())
    torn = any(0 < sum(owner in inside for owner in owners) < len(owners) for owners in shared)
    return not torn and any(True for _ in module.parameters())


def _by_size(root: nn.Module, least: int, allowed: set[nn.Module]) -> set[nn.Module]:
    """From the leaves up: a module is a unit when what its own units leave over has `least` parameters."""
    chosen: set[nn.Module] = set()
    seen: set[nn.Parameter] = set()

    def left_over(module: nn.Module) -> int:
        count = sum(left_over(child) for child in module.children())
        for parameter in module._parameters.values():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                count += parameter.numel()
        if count >= least and module in allowed:
            chosen.add(module)
            return 0
        return count

    left_over(root)
    return chosen

"""The units that FSDP shards and gathers: each block, the embedding and lm_head, or what `parallel.wrap` selects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.config.schema import RecomputeConfig, WrapConfig
from shoal.mistakes import UserMistake, suggestion
from shoal.models.anatomy import Anatomy, find_blocks, require_blocks
from shoal.models.loss import LanguageModel
from shoal.models.slots import parameter_slots
from shoal.plan.check import check_units_in_blocks


@dataclass(frozen=True)
class Units:
    """In the order of the forward pass; parameters in none of them belong to the root."""

    first: list[nn.Module]  # the embedding, if it is a plain nn.Embedding that is not tied
    blocks: list[nn.Module]
    last: list[nn.Module]  # the head with the loss, if it is not tied


def choose_units(language: LanguageModel, wrap: str | WrapConfig, *, part: bool = False) -> Units:
    """`wrap` selects modules between the embedding and the head. A `part` of a model, a pipeline stage, need not have
    every class it names."""
    model, anatomy = language.model, language.anatomy
    embedding, shared = model.get_submodule(anatomy.embedding), _shared(model)
    # An embedding that contains a norm would need the norm's weight in the backward pass too.
    is_table = isinstance(embedding, nn.Embedding) and len(list(embedding.parameters())) == 1
    first: list[nn.Module] = [embedding] if is_table and _owns_all(embedding, shared) else []
    last: list[nn.Module] = (
        [language.head_and_loss] if anatomy.linear_head and _owns_all(language.head_and_loss.head, shared) else []
    )
    blocks = [one for one in choose_blocks(model, anatomy, wrap, part=part) if one not in first]
    return Units(first, blocks, last)


def choose_blocks(model: Any, anatomy: Anatomy, wrap: str | WrapConfig, *, part: bool = False) -> list[nn.Module]:
    """The modules that `wrap` selects. Raises a UserMistake if there are none."""
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
                f"parallel.wrap: {', '.join(wrap.classes)} cannot be wrapped: the lm_head is a unit of its own anyway, "
                "and modules that share weights with others belong to the root."
            )
    return [module for module in model.modules() if module in chosen]


def choose_any_units(model: nn.Module, wrap: str | WrapConfig) -> list[nn.Module]:
    """The same for any model. auto: its list of identical layers or, without one, modules of an eighth of it."""
    shared = _shared(model)
    allowed = {
        one
        for one in model.modules()
        if one is not model and not isinstance(one, nn.ModuleList | nn.ModuleDict) and _owns_all(one, shared)
    }
    if not isinstance(wrap, WrapConfig):
        blocks = [model.get_submodule(name) for name in find_blocks(model)]
        if blocks and all(block in allowed for block in blocks):
            return blocks
        wrap = WrapConfig(min_params=max(1, sum(one.numel() for one in model.parameters()) // 8))
    if wrap.min_params is not None:
        chosen = _by_size(model, wrap.min_params, allowed)
    else:
        chosen = set(blocks_of_classes(model, wrap.classes)) & allowed
    return [module for module in model.modules() if module in chosen]


def check_recomputed(units: Sequence[nn.Module], blocks: Sequence[nn.Module], recompute: str | RecomputeConfig) -> None:
    """Raise a UserMistake if blocks that are recomputed selectively have units inside."""
    inside = {module for block in blocks for module in block.modules() if module is not block}
    if (found := next((unit for unit in units if unit in inside), None)) is not None:
        check_units_in_blocks(recompute, f"{type(found).__name__}, which is inside of one")


def blocks_of_classes(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    """The modules of these classes. Raises a UserMistake if there are none of one."""
    names = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in names:
            raise UserMistake(
                f"parallel.wrap: no module of {type(model).__name__} is a {name}.{suggestion(name, names)}"
            )
    return [module for module in model.modules() if type(module).__name__ in classes]


def _wrappable(model: Any, anatomy: Anatomy) -> set[nn.Module]:
    """Modules of the backbone with parameters of their own."""
    shared, backbone = _shared(model), model.get_submodule(anatomy.backbone)
    return {one for one in backbone.modules() if not isinstance(one, nn.ModuleList) and _owns_all(one, shared)}


def _shared(model: Any) -> list[list[nn.Module]]:
    """The owners of each parameter that several modules share."""
    return [[owner for owner, _ in slots] for slots in parameter_slots(model.modules()).values() if len(slots) > 1]


def _owns_all(module: nn.Module, shared: list[list[nn.Module]]) -> bool:
    """Whether `module` has parameters and shares none with a module outside: a tied weight must stay one tensor."""
    inside = set(module.modules())
    shares = any(0 < sum(owner in inside for owner in owners) < len(owners) for owners in shared)
    return not shares and any(True for _ in module.parameters())


def _by_size(root: nn.Module, least: int, allowed: set[nn.Module]) -> set[nn.Module]:
    """Bottom-up: a module is a unit if it has at least `least` parameters outside of the units inside it."""
    chosen: set[nn.Module] = set()
    seen: set[nn.Parameter] = set()

    def remaining(module: nn.Module) -> int:
        count = sum(remaining(child) for child in module.children())
        for parameter in module._parameters.values():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                count += parameter.numel()
        if count >= least and module in allowed:
            chosen.add(module)
            return 0
        return count

    remaining(root)
    return chosen

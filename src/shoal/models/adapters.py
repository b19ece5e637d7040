"""LoRA: trained low-rank matrices beside the frozen linear layers of a model.

An adapted layer computes `W x + scale · B A x`, with `A` [rank, in] and `B` [out, rank]. The matrices are children of
the layer, `lora_A` and `lora_B`, so that the names of base weights stay those of Hugging Face files, and those of the
adapter are PEFT's without its prefix. They are added on the meta device, before the model is parallelized;
`parallel.adapters` makes the layers use them.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import AdapterConfig
from shoal.mistakes import UserMistake, suggestion
from shoal.models.anatomy import Anatomy, require_blocks
from shoal.models.nf4_layers import base_matrix, mark_quantized

# Names of an adapted layer's children, in the order in which they are saved.
DOWN, UP, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"


class Factor(nn.Module):
    """One trained tensor of an adapter. Not a nn.Linear, so that nothing that looks for linear layers finds it."""

    weight: nn.Parameter

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))


@dataclass(frozen=True)
class AddedAdapters:
    """What `add_adapters` did to a model."""

    layers: tuple[str, ...]  # the names of the adapted layers
    parameters: int  # of the adapters
    also: tuple[str, ...] = ()  # parameters of the base model that are trained as well
    quantized: tuple[str, ...] = ()  # layers whose frozen weights are quantized


def add_adapters(model: nn.Module, anatomy: Anatomy, wanted: AdapterConfig) -> AddedAdapters:
    """Freeze `model`, which is on meta, and add adapters to the layers that `wanted` targets. In place."""
    require_blocks(anatomy, model, f"adapter.kind {wanted.kind}", "train the model itself, with adapter.kind none")
    linears = linear_layers(model, anatomy)
    chosen = _choose(linears, wanted.targets, model)
    model.requires_grad_(False)
    also = _train_also(model, chosen, wanted.train_also)
    scale = scale_of(wanted)
    total = 0
    for name in chosen:
        layer = linears[name]
        inputs, outputs = sizes_of(layer)
        if wanted.dora and not isinstance(layer, nn.Linear):
            raise UserMistake(
                f"adapter.dora: {name} is a {type(layer).__name__}, which stores its matrix transposed; use "
                "adapter.dora false for this model."
            )
        if wanted.rank > min(inputs, outputs):
            raise UserMistake(
                f"adapter.rank {wanted.rank} is larger than the matrix of {name}, which is {outputs} × {inputs}; "
                f"use at most {min(inputs, outputs)}, or leave this layer out of adapter.targets."
            )
        setattr(layer, DOWN, Factor(wanted.rank, inputs))
        setattr(layer, UP, Factor(outputs, wanted.rank))
        if wanted.dora:
            setattr(layer, MAGNITUDE, Factor(outputs))
        layer.adapter_scale, layer.adapter_dropout, layer.adapter_enabled = scale, wanted.dropout, True
        layer.shared_input = None  # see parallel.adapters
        total += wanted.rank * (inputs + outputs) + (outputs if wanted.dora else 0)
    quantized = mark_quantized(model, anatomy, wanted.quantize, also) if wanted.kind == "qlora" else []
    return AddedAdapters(tuple(chosen), total, tuple(also), tuple(quantized))


def scale_of(wanted: AdapterConfig) -> float:
    """The factor of the adapter's output."""
    return wanted.alpha / (math.sqrt(wanted.rank) if wanted.rslora else wanted.rank)


def linear_layers(model: nn.Module, anatomy: Anatomy) -> dict[str, Any]:
    """The linear layers of the blocks, by name. GPT-2's Conv1D is one, with a transposed weight."""
    return {
        f"{block}.{name}": module
        for block in anatomy.blocks
        for name, module in model.get_submodule(block).named_modules()
        if is_linear(module)
    }


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def sizes_of(layer: Any) -> tuple[int, int]:
    """Input and output features."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    inputs, outputs = layer.weight.shape
    return int(inputs), int(outputs)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if DOWN in module._modules}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the adapters, by name."""
    return {
        f"{layer}.{child}.weight": module._modules[child].weight
        for layer, module in adapted_layers(model).items()
        for child in (DOWN, UP, MAGNITUDE)
        if child in module._modules
    }


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within, `model` computes what its base computes. Parameters in `adapter.train_also` stay as trained."""
    layers = [module for module in model.modules() if DOWN in module._modules]
    for layer in layers:
        layer.adapter_enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.adapter_enabled = True  # type: ignore[assignment]


def add_adapter_output(layer: Any, base: Tensor, inputs: Tensor) -> Tensor:
    """`base`, the layer's own output for `inputs`, with its adapter's output added."""
    if not layer.adapter_enabled:
        return base
    down, up = layer.lora_A.weight, layer.lora_B.weight
    if layer.adapter_dropout and layer.training:
        inputs = F.dropout(inputs, layer.adapter_dropout)
    shared = layer.shared_input
    low = F.linear(inputs, down) if shared is None else shared.multiply(layer, inputs)
    added = F.linear(low * layer.adapter_scale, up)  # the scale is applied to the smallest of the tensors
    if MAGNITUDE not in layer._modules:
        return base + added
    factor: Tensor = (layer.lora_magnitude_vector.weight / _adapted_norms(layer, down, up)).to(base.dtype)
    if (bias := layer.bias) is not None:
        base = base - bias
    added = factor * (base + added)
    return added if bias is None else added + bias


def row_norms(matrix: Tensor) -> Tensor:
    """The 2-norm of each row, in fp32."""
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32)
    return norms


@torch.no_grad()
def _adapted_norms(layer: Any, down: Tensor, up: Tensor) -> Tensor:
    """DoRA: the row norms of `W + scale · B A`, without computing that matrix. No gradient flows through them, as in
    the paper (section 4.3)."""
    weight, scale = base_matrix(layer), layer.adapter_scale
    down, up = down.float(), up.float()
    crossed = F.linear(weight, down.to(weight.dtype)).float()  # W Aᵀ
    squares: Tensor = row_norms(weight).square()
    squares = squares + 2 * scale * (crossed * up).sum(1) + scale**2 * ((up @ (down @ down.t())) * up).sum(1)
    return squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt()


def _choose(linears: dict[str, Any], targets: str | Sequence[str], model: nn.Module) -> list[str]:
    """The names among `linears` that `targets` selects: by the last part of a name, as in PEFT, or by a pattern of the
    full name."""
    if isinstance(targets, str):  # auto or all-linear
        if not linears:
            raise UserMistake(
                f"adapter.targets {targets}: the blocks of {type(model).__name__} have no linear layers to adapt."
            )
        return list(linears)
    found = dict.fromkeys(linears, False)
    for target in targets:
        matched = [name for name in linears if _matches(name, target)]
        if not matched:
            # By their last names: blocks have the same layers.
            names = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linears))
            raise UserMistake(
                f"adapter.targets: no linear layer in the blocks of {type(model).__name__} is called {target}."
                f"{suggestion(target, names)} The names are {', '.join(names)}."
            )
        found |= dict.fromkeys(matched, True)
    return [name for name, chosen in found.items() if chosen]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}") or fnmatch(name, target)


def _train_also(model: nn.Module, adapted: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Make the base parameters that match a pattern trainable: a pattern of the name of a parameter or of a module that
    holds it."""
    parameters = dict(model.named_parameters())
    of_adapted = {f"{layer}.{key}" for layer in adapted for key in ("weight", "bias")}
    found: dict[str, None] = {}
    for pattern in patterns:
        matched = [name for name in parameters if _matches_parameter(name, pattern)]
        if not matched:
            raise UserMistake(
                f"adapter.train_also: {pattern!r} matches no parameter; one is named {next(iter(parameters))}."
            )
        if clash := next((name for name in matched if name in of_adapted), None):
            raise UserMistake(
                f"adapter.train_also: {pattern!r} matches {clash}, whose layer has an adapter; leave it out of "
                "adapter.targets or of adapter.train_also."
            )
        found |= dict.fromkeys(matched)
    for name in found:
        parameters[name].requires_grad_(True)
    return list(found)


def _matches_parameter(name: str, pattern: str) -> bool:
    """`lm_head`, `norm` and `*.norm` name modules, `*.bias` a parameter."""
    module = name.rpartition(".")[0]
    return fnmatch(name, pattern) or fnmatch(module, pattern) or module.rpartition(".")[2] == pattern

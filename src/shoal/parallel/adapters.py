"""Make adapted layers use their adapters, and quantized ones their stored weights, whatever else is patched."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.catalogue.families import PLANS
from shoal.config.mesh import Mesh
from shoal.config.schema import Config
from shoal.models.adapters import DOWN, MAGNITUDE, adapted_layers, add_adapter_output
from shoal.models.anatomy import Anatomy
from shoal.models.nf4_layers import is_quantized, parts_of, quantized_layers, replace_storage
from shoal.models.nf4_linear import nf4_linear, nf4_lora_linear
from shoal.parallel.patch import patch
from shoal.parallel.tensor import RowParallel
from shoal.plan.check import check_adapter, check_nf4_shard


def check_adapters(model: Any, config: Config, mesh: Mesh) -> None:
    """Raise a UserMistake if the mesh or the precision does not support the adapter."""
    check_adapter(config.adapter, config.train.precision, mesh.tp)
    plan = PLANS.get(model.config.model_type)
    for row in plan.row if plan is not None and mesh.tp > 1 else ():
        for layer in (module for name, module in model.named_modules() if name.endswith(f".{row}")):
            if hasattr(layer, "quantized"):
                check_nf4_shard(mesh.tp, row, layer.in_features)


def use_quantized(model: nn.Module, dtype: torch.dtype) -> None:
    """Give marked layers their quantized storage. In place, on meta, after tensor parallelism."""
    replace_storage(model, dtype)
    for layer in quantized_layers(model).values():
        patch(layer, _QuantizedRowParallel if isinstance(layer, RowParallel) else _Quantized)


def use_adapters(model: nn.Module, anatomy: Anatomy, *, together: bool) -> None:
    """In place. After everything that replaces the matmuls of base layers. `together`: the weights of a block are
    gathered together, so that a layer may use those of another."""
    for layer in adapted_layers(model).values():
        row_parallel = isinstance(layer, RowParallel)
        if together or not is_quantized(layer) or layer.adapter_dropout or MAGNITUDE in layer._modules:
            patch(layer, _AdaptedRowParallel if row_parallel else _Adapted)
        else:
            patch(layer, _AdaptedQuantizedRowParallel if row_parallel else _AdaptedQuantized)
    if together:
        for layers in _layers_with_one_input(model, anatomy):
            shared = SharedInput(layers)
            for index, layer in enumerate(layers):
                layer.shared_input, layer.shared_index = shared, index


def _layers_with_one_input(model: Any, anatomy: Anatomy) -> Iterator[list[Any]]:
    """The adapted layers of each block that read the same tensor: queries, keys and values; gate and up."""
    plan = PLANS.get(model.config.model_type)
    for block in anatomy.block_modules(model) if plan is not None else ():
        groups: dict[str, list[Any]] = {}
        for name in plan.column if plan is not None else ():
            layer: Any = block.get_submodule(name)
            if DOWN in layer._modules and not layer.adapter_dropout:  # each has a dropout of its own
                groups.setdefault(name.rpartition(".")[0], []).append(layer)
        yield from (layers for layers in groups.values() if len(layers) > 1)


class SharedInput:
    """Multiplies one input by the `A` of several layers at once: in the backward pass, too, one matmul takes the place
    of several, whose results would have to be added."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.inputs: Tensor | None = None
        self.results: dict[int, Tensor] = {}

    def multiply(self, layer: Any, inputs: Tensor) -> Tensor:
        """`A inputs` of `layer`; computed for all layers when the first asks."""
        index = layer.shared_index
        if self.inputs is not inputs or index not in self.results:
            matrices = [one.lora_A.weight for one in self.layers]
            found = torch.split(F.linear(inputs, torch.cat(matrices)), [len(one) for one in matrices], dim=-1)
            self.inputs, self.results = inputs, dict(enumerate(found))
        result = self.results.pop(index)
        if not self.results:
            self.inputs = None
        return result


class _Quantized:
    bias: Tensor | None
    quantized: str

    def forward(self, inputs: Tensor) -> Tensor:
        return nf4_linear(inputs, parts_of(self), self.bias, self.quantized)


class _QuantizedRowParallel:
    quantized: str

    def matmul(self, inputs: Tensor) -> Tensor:
        return nf4_linear(inputs, parts_of(self), None, self.quantized)


class _Adapted:
    def forward(self, inputs: Tensor) -> Tensor:
        return add_adapter_output(self, super().forward(inputs), inputs)  # type: ignore[misc]


class _AdaptedRowParallel:
    """A row-parallel layer: each rank adds the output of its columns of `A`, before the partial results are summed."""

    def matmul(self, inputs: Tensor) -> Tensor:
        return add_adapter_output(self, super().matmul(inputs), inputs)  # type: ignore[misc]


class _AdaptedQuantized:
    """Without dropout and DoRA, base and adapter of a quantized layer are one operator, which needs less memory."""

    bias: Tensor | None
    adapter_enabled: bool

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.adapter_enabled:
            return super().forward(inputs)  # type: ignore[no-any-return, misc]
        return _nf4_lora(self, inputs, self.bias)


class _AdaptedQuantizedRowParallel:
    adapter_enabled: bool

    def matmul(self, inputs: Tensor) -> Tensor:
        if not self.adapter_enabled:
            return super().matmul(inputs)  # type: ignore[no-any-return, misc]
        return _nf4_lora(self, inputs, None)


def _nf4_lora(layer: Any, inputs: Tensor, bias: Tensor | None) -> Tensor:
    down, up = layer.lora_A.weight, layer.lora_B.weight
    return nf4_lora_linear(inputs, parts_of(layer), down, up, layer.adapter_scale, bias, layer.quantized)

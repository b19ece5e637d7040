"""Make adapted layers use their adapters, whatever computes the matmul of the frozen base."""

from typing import Any

from torch import Tensor, nn

from shoal.config.mesh import Mesh
from shoal.config.schema import AdapterConfig
from shoal.mistakes import UserMistake
from shoal.models.adapters import adapted_layers, add_adapter_output
from shoal.parallel.patch import patch
from shoal.parallel.tensor import RowParallel


def check_adapters(adapter: AdapterConfig, mesh: Mesh) -> None:
    """Raise a UserMistake if the mesh does not support the adapter."""
    if adapter.kind != "none" and adapter.dora and mesh.tp > 1:
        raise UserMistake(
            f"adapter.dora needs the norm of whole weight matrices, which parallel.tp {mesh.tp} splits; use "
            "parallel.strategy fsdp, or adapter.dora false."
        )


def use_adapters(model: nn.Module) -> None:
    """In place. After tensor parallelism and float8, whose matmuls adapters add to."""
    for layer in adapted_layers(model).values():
        patch(layer, _AdaptedRowParallel if isinstance(layer, RowParallel) else _Adapted)


class _Adapted:
    def forward(self, inputs: Tensor) -> Tensor:
        return add_adapter_output(self, super().forward(inputs), inputs)  # type: ignore[misc]


class _AdaptedRowParallel:
    """A row-parallel layer: each rank adds the output of its columns of `A`, before the partial results are summed."""

    def matmul(self, inputs: Tensor) -> Tensor:
        base: Any = super()
        return add_adapter_output(self, base.matmul(inputs), inputs)

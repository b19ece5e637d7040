"""The weights and the optimizer state in DeepSpeed's engine, on their way to and from a checkpoint.

They go in and out parameter by parameter, through DeepSpeed's documented functions. Between the engine and a checkpoint
each rank keeps its rows of every tensor in host memory.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.parallel.zero_rows import gather_rows, own_rows, place_rows

STEP = "step"  # the step counter of an optimizer


class ZeroEngine:
    """DeepSpeed's engine with ZeRO 1 to 3, and this rank's rows of weights and state on their way in or out."""

    engine: Any  # set when it is started

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, tuple[int, ...]],
        mesh: DeviceMesh,
    ) -> None:
        """`optimizer`: torch's, which DeepSpeed calls with its own shards. `parameters`: those that are saved, and
        `shapes` theirs before DeepSpeed has sharded them."""
        self.optimizer = optimizer
        self.parameters = parameters
        self.trained = {name: one for name, one in parameters.items() if one.requires_grad}
        self.mesh = mesh
        self.shapes = shapes
        self.weights: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}  # by 'field.parameter_name', as `NamedOptimizer.state` has it
        self.has_state = False  # DeepSpeed makes optimizer state, and its places in the engine, in the first step
        self.state_waits = False  # it was loaded, and is put in after such a step

    def step(self, lr: float) -> tuple[Tensor, Tensor]:
        """Clip the gradients and update the weights; returns their norm, and whether it was finite. If it was not,
        nothing has changed."""
        self.weights, self.state = {}, {}
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self.engine.step()
        device = self.engine.device
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=device)
        applied = self.engine.was_step_applied()
        self.has_state = self.has_state or applied
        return norm.detach(), torch.tensor(applied, device=device)

    def scale_loss(self, scale: float) -> None:
        """Before the backward passes: the loss is multiplied by `scale`, and the gradients are divided by it."""
        self.engine.optimizer.override_loss_scale(scale)

    def take_out(self) -> None:
        """Copy this rank's rows of all weights and state to host memory. All ranks call it."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        self.weights = {}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                self.weights[name] = self._rows(safe_get_full_fp32_param(parameter))
            else:
                with _gathered(parameter):
                    self.weights[name] = self._rows(parameter.detach())
        if self.state_waits:
            return
        self.state = {}
        if not self.has_state:
            return
        for field in self._fields():
            for name, parameter in self.trained.items():
                self.state[f"{field}.{name}"] = self._rows(safe_get_full_optimizer_state(parameter, field))
        if counters := self._counters():
            steps = float(counters[0][STEP])
            self.state |= {f"{STEP}.{name}": torch.tensor(steps) for name in self.trained}

    def allocate(self) -> None:
        """Host memory for this rank's rows of the weights that are about to be loaded."""
        self.weights = {name: self.empty(name) for name in self.parameters}

    def empty(self, name: str, field: str | None = None) -> Tensor:
        """Host memory for this rank's rows of a parameter, or of a field of its state."""
        shape = self.shapes[name]
        if field == STEP or not shape:
            return torch.zeros(())
        begin, end = own_rows(shape, self.mesh)
        return place_rows(torch.zeros((end - begin, *shape[1:])), shape, self.mesh)

    def keep_weights(self, rows: Mapping[str, Tensor]) -> None:
        """Before the trained weights are cast: DeepSpeed would make its fp32 weights from the cast ones. `rows`: those
        of this rank, if the weights are sharded already."""
        self.weights = {name: rows[name] if rows else self._rows(one) for name, one in self.trained.items()}

    def put_weights(self) -> None:
        """Put the weights that were loaded into the engine. All ranks call it."""
        for name, rows in self.weights.items():
            parameter, value = self.parameters[name], self._whole(rows)
            if parameter.requires_grad:
                self._put(parameter, value, None)
            with _gathered(parameter, changed=True), torch.no_grad():  # what the forward pass uses
                parameter.copy_(value)
        self.weights = {}

    def put_state(self) -> None:
        """Put the optimizer state that was loaded into the engine, which has made a place for it."""
        for key, rows in self.state.items():
            field, _, name = key.partition(".")
            if field != STEP:
                self._put(self.trained[name], self._whole(rows), field)
        steps = [float(value) for key, value in self.state.items() if key.startswith(f"{STEP}.")]
        for fields_ in self._counters() if steps else ():
            counter = fields_[STEP]
            fields_[STEP] = counter.fill_(max(steps)) if isinstance(counter, Tensor) else int(max(steps))
        self.state, self.state_waits = {}, False

    def _put(self, parameter: nn.Parameter, value: Tensor, field: str | None) -> None:
        """Set the fp32 weight of a trained parameter, or a field of its state."""
        from deepspeed import utils

        if not hasattr(parameter, "ds_id"):
            if field is None:
                utils.safe_set_full_fp32_param(parameter, value)
            else:
                utils.safe_set_full_optimizer_state(parameter, value, field)
            return
        # ZeRO-3's shards are of one size, with padding in the last, which the functions for whole tensors do not have.
        size = utils.safe_get_local_fp32_param(parameter).numel()
        rank, ranks = self.mesh.get_local_rank(), self.mesh.size()
        shard = nn.functional.pad(value.flatten(), (0, size * ranks - value.numel())).narrow(0, size * rank, size)
        if field is None:
            utils.safe_set_local_fp32_param(parameter, shard)
        else:
            utils.safe_set_local_optimizer_state(parameter, shard, field)

    def _fields(self) -> list[str]:
        """The fields of the optimizer state that have the shape of a parameter."""
        states = self.optimizer.state.values()
        return sorted({field for one in states for field, value in one.items() if field != STEP and value is not None})

    def _counters(self) -> list[dict[str, Any]]:
        return [one for one in self.optimizer.state.values() if STEP in one]

    def _rows(self, whole: Tensor) -> Tensor:
        """A copy of this rank's rows, in host memory."""
        if not whole.dim():
            return whole.detach().cpu().clone()
        shape = tuple(whole.shape)
        begin, end = own_rows(shape, self.mesh)
        return place_rows(whole.detach()[begin:end].cpu().clone(), shape, self.mesh)

    def _whole(self, rows: Tensor) -> Tensor:
        return gather_rows(rows, self.engine.device)


def _gathered(parameter: nn.Parameter, *, changed: bool = False) -> Any:
    """The whole parameter that the forward pass uses, if ZeRO-3 has sharded it. `changed`: it is written to."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if changed else None)

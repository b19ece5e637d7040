"""`parallel.engine: deepspeed`: a model in DeepSpeed's engine, and its weights and optimizer state for checkpoints.

With ZeRO 1 to 3 the engine has the fp32 weights, the gradients and the optimizer state, in shards of its own. It also
clips: its step measures the norm of the gradients where they are, and ours would have to gather each one first. Weights
and state go in and out parameter by parameter, through DeepSpeed's documented functions; between the engine and a
checkpoint each rank keeps its rows of every tensor in host memory.

ZeRO 0 is DeepSpeed's forward pass, backward pass and all-reduce: gradients and weights are whole on every rank, and the
step is ours.
"""

import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.config.engine import find_unsupported
from shoal.config.schema import Config, OffloadConfig
from shoal.data.loader import MicroBatch
from shoal.mistakes import UserMistake
from shoal.models.loss import LossSums
from shoal.models.tensor_slices import local_tensor, placed_like
from shoal.parallel.collectives import all_gather_single
from shoal.parallel.micro_batches import MicroBatchRunner, Prepare
from shoal.parallel.model import ParallelModel
from shoal.paths import user_path

NEVER = sys.maxsize  # steps between DeepSpeed's own progress lines
BUCKET = 500_000_000  # DeepSpeed's default: elements of a bucket, which it allocates even for smaller models
STEP = "step"  # the step counter of an optimizer


def check_deepspeed(config: Config) -> None:
    """A UserMistake if DeepSpeed is not installed, or cannot do what `auto` has become."""
    if sentence := next((sentence for _, sentence in find_unsupported(config)), None):
        raise UserMistake(sentence)
    if importlib.util.find_spec("deepspeed") is None:
        raise UserMistake(
            "parallel.engine deepspeed needs the package deepspeed, which is not installed: pip install "
            "'shoal[deepspeed]'."
        )


def engine_settings(
    config: Config, stage: int, *, parameters: int, micro_batch: int, grad_accum_steps: int
) -> dict[str, Any]:
    """DeepSpeed's own config of a run that is resolved, for a model of this many parameters."""
    train, bucket = config.train, min(BUCKET, parameters)
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": grad_accum_steps,
        "steps_per_print": NEVER,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            **_offload(config),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW updates offloaded state too, and needs no compiler
    }
    if stage == 0:  # the step is ours, and so is mixed precision
        return found
    found["gradient_clipping"] = train.clip or 0.0
    if train.precision == "32-true":
        return found
    found["communication_data_type"] = train.reduce_dtype
    found["data_types"] = {"grad_accum_dtype": "fp32"}
    if train.precision == "bf16-mixed":
        found["bf16"] = {"enabled": True}
    else:  # the scale is our loss scaler's, set before every step
        found["fp16"] = {"enabled": True, "loss_scale": 1.0}
    return found


def _offload(config: Config) -> dict[str, Any]:
    offload = config.parallel.offload
    if offload == "none":
        return {}
    if not isinstance(offload, OffloadConfig):
        optimizer, parameters = "cpu", "cpu" if offload == "cpu" else "none"
    else:
        optimizer, parameters = offload.places
    folder: dict[str, Any] = {}
    if isinstance(offload, OffloadConfig) and offload.path is not None:
        folder = {"nvme_path": str(user_path(offload.path, "parallel.offload.path"))}
    pinned = {"pin_memory": torch.cuda.is_available()}
    places = {"offload_optimizer": optimizer, "offload_param": parameters}
    return {
        key: {"device": place, **pinned, **(folder if place == "nvme" else {})}
        for key, place in places.items()
        if place != "none"
    }


def import_deepspeed(device: torch.device) -> Any:
    """The package, which is imported only where it is used. It logs to standard output, which is ours."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    import deepspeed
    import deepspeed.ops

    if device.type == "cpu":
        # It would compile collectives in shared memory, for minutes, where gloo's do.
        deepspeed.ops.__compatible_ops__ = {}
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
    return deepspeed


class EngineRunner(MicroBatchRunner):
    """Runs micro-batches in DeepSpeed's engine, which reduces gradients itself."""

    def __init__(self, engine: Any, prepare: Prepare) -> None:
        super().__init__(engine, prepare, keeps_weights=False)

    def run(self, batch: MicroBatch, factor: Tensor | float, *, last: bool) -> Tensor:
        engine: Any = self.module
        engine.set_gradient_accumulation_boundary(last)
        found: LossSums = engine(self.prepare(batch))
        engine.backward(found.trained * factor, scale_wrt_gas=False)
        return torch.stack([one.double() for one in found.sums])


@dataclass(kw_only=True)
class EngineModel(ParallelModel):
    """A model whose weights are in DeepSpeed's engine, as ZeRO 1 to 3 shard them."""

    zero: "ZeroEngine"

    @property
    def saved(self) -> dict[str, Tensor]:
        buffers = {name: one for name, one in self.buffers.items() if name in self.placement.shapes}
        return {**self.zero.weights, **buffers}

    def before_save(self) -> None:
        self.zero.take_out()

    def reshard(self) -> None:
        self.zero.allocate()

    def weights_changed(self) -> None:
        self.zero.put_weights()


class ZeroEngine:
    """DeepSpeed's engine with ZeRO 1 to 3, and this rank's rows of weights and state on their way in or out."""

    def __init__(
        self, engine: Any, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh
    ) -> None:
        """`optimizer`: torch's, which DeepSpeed calls with its own shards. `parameters`: those that are saved."""
        self.engine = engine
        self.optimizer = optimizer
        self.parameters = parameters
        self.trained = {name: one for name, one in parameters.items() if one.requires_grad}
        self.mesh = mesh
        self.shapes = {name: _shape(one) for name, one in parameters.items()}
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
        begin, end = self._span(shape)
        return self._placed(torch.zeros((end - begin, *shape[1:])), shape)

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

    def _span(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """This rank's rows of a tensor."""
        size, rank = math.ceil(shape[0] / self.mesh.size()), self.mesh.get_local_rank()
        return min(size * rank, shape[0]), min(size * (rank + 1), shape[0])

    def _rows(self, whole: Tensor) -> Tensor:
        """A copy of this rank's rows, in host memory."""
        if not whole.dim():
            return whole.detach().cpu().clone()
        begin, end = self._span(tuple(whole.shape))
        return self._placed(whole.detach()[begin:end].cpu().clone(), tuple(whole.shape))

    def _placed(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        meta = torch.empty(shape, device="meta")
        like = DTensor.from_local(
            meta[: len(rows)], self.mesh, [Shard(0)], run_check=False, shape=meta.shape, stride=meta.stride()
        )
        return placed_like(rows, like)

    def _whole(self, rows: Tensor) -> Tensor:
        """The whole tensor on the device, from the rows of all ranks."""
        device = self.engine.device
        if not isinstance(rows, DTensor):
            return rows.to(device)
        shape, local = tuple(rows.shape), local_tensor(rows).to(device)
        size = math.ceil(shape[0] / self.mesh.size())
        mine = local.new_zeros((size, *shape[1:]))
        mine[: len(local)] = local
        everyone = local.new_empty((size * self.mesh.size(), *shape[1:]))
        all_gather_single(everyone, mine, group=self.mesh.get_group())
        return everyone[: shape[0]]


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _gathered(parameter: nn.Parameter, *, changed: bool = False) -> Any:
    """The whole parameter that the forward pass uses, if ZeRO-3 has sharded it. `changed`: it is written to."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if changed else None)


def start_all_reduce(model: ParallelModel, settings: dict[str, Any]) -> ParallelModel:
    """ZeRO 0: the same model, with DeepSpeed's forward pass, backward pass and all-reduce."""
    # The engine wants an optimizer to let gradients flow. It never steps.
    idle = torch.optim.SGD([one for one in model.parameters.values() if one.requires_grad], lr=0.0)
    engine = _initialize(model, idle, settings)
    runner = model.runner
    assert isinstance(runner, MicroBatchRunner)
    model.modules, model.runner = [engine], EngineRunner(engine, runner.prepare)
    return model


def start_zero(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    *,
    make_state: Callable[[Tensor], dict[str, Tensor]],
    values: bool,
) -> EngineModel:
    """ZeRO 1 to 3: hand the model and torch's optimizer to DeepSpeed. `make_state`: the optimizer's state of a tensor
    before its first step. `values`: the model's weights are initialized."""
    device, saved = model.parallel_dims.device, model.placement.shapes
    parameters = {name: one for name, one in model.parameters.items() if name in saved}
    zero = ZeroEngine(None, optimizer, parameters, model.parallel_dims.replicas)
    zero.shapes = {name: saved[name] for name in parameters}
    if values and model.precision.compute != torch.float32:
        # DeepSpeed would make its fp32 weights from the cast ones.
        zero.weights = {name: zero._rows(one) for name, one in zero.trained.items()}
    for parameter in _once(model.parameters.values()):
        parameter.data = parameter.data.to(model.precision.compute)
    if settings["zero_optimization"]["stage"] == 3:
        deepspeed = import_deepspeed(device)
        deepspeed.init_distributed(dist_init_required=False)
        for module in model.modules:  # parameter by parameter: no device holds the whole model
            deepspeed.zero.Init(module=module, config_dict_or_path=settings, mem_efficient_linear=False)
    zero.engine = _initialize(model, optimizer, settings)
    for group in optimizer.param_groups:  # DeepSpeed's shards now; ZeRO-3 has no list of them
        for shard in group["params"]:
            # It looks for the state of all groups when it has updated the first.
            optimizer.state[shard] = make_state(shard)
    if zero.weights:
        zero.put_weights()
    runner = model.runner
    assert isinstance(runner, MicroBatchRunner)
    held = {one.name: getattr(model, one.name) for one in fields(model)}
    held |= {"modules": [zero.engine], "runner": EngineRunner(zero.engine, runner.prepare)}
    return EngineModel(**held, zero=zero)


def _once(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameters))


def _initialize(model: ParallelModel, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> Any:
    deepspeed = import_deepspeed(model.parallel_dims.device)
    if "fp16" in settings and not deepspeed.get_accelerator().is_fp16_supported():
        raise UserMistake(
            "train.precision 16-mixed cannot be used with parallel.engine deepspeed on this device, for which DeepSpeed "
            "has no fp16; use bf16-mixed, or 32-true."
        )
    (module,) = model.modules
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=settings, dist_init_required=False
    )
    return engine



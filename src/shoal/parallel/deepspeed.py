"""`parallel.engine: deepspeed`: a model in DeepSpeed's engine, and its weights and optimizer state for checkpoints.

With ZeRO 1 to 3 the engine has the fp32 weights, the gradients and the optimizer state, in shards of its own. It also
clips: its step measures the norm of the gradients where they are, and ours would have to gather each one first.

ZeRO 0 is DeepSpeed's forward pass, backward pass and all-reduce: gradients and weights are whole on every rank, and the
step is ours.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from threading import Timer
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config.engine import find_unsupported
from shoal.config.schema import Config, OffloadConfig
from shoal.data.loader import MicroBatch
from shoal.mistakes import UserMistake, shortened
from shoal.models.loss import LossSums
from shoal.parallel.extension_lock import abandoned_lock
from shoal.parallel.gradients import Gradients
from shoal.parallel.micro_batches import MicroBatchRunner, Prepare, joined
from shoal.parallel.model import ParallelModel
from shoal.parallel.zero_engine import ZeroEngine
from shoal.parallel.zero_rows import whole_parameters
from shoal.paths import user_path

LOGGER = logging.getLogger(__name__)
PATIENCE = 2.0  # seconds without a word
NEVER = sys.maxsize  # steps between DeepSpeed's own progress lines
BUCKET = 500_000_000  # DeepSpeed's default: elements of a bucket, which it allocates even for smaller models
SWAP_BUFFER = 100_000_000  # the same of a buffer for parameters on disk, of which it has five


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
    train, bucket = config.train, min(BUCKET, parameters + parameters % 2)  # it refuses an odd one
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": grad_accum_steps,
        "steps_per_print": NEVER,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            **_offload(config, parameters),
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


def _offload(config: Config, model_size: int) -> dict[str, Any]:
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
    found = {
        key: {"device": place, **pinned, **(folder if place == "nvme" else {})}
        for key, place in places.items()
        if place != "none"
    }
    if parameters == "nvme":
        found["offload_param"]["buffer_size"] = min(SWAP_BUFFER, model_size)
    return found


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
        return joined(found.sums)


@dataclass(kw_only=True)
class EngineModel(ParallelModel):
    """A model whose weights are in DeepSpeed's engine, as ZeRO 1 to 3 shard them."""

    zero: ZeroEngine

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
    compute, shapes = model.precision.compute, model.placement.shapes
    _check_device(settings, model.parallel_dims.device)
    rows = _partition(model, optimizer, settings) if settings["zero_optimization"]["stage"] == 3 else {}
    parameters = {name: one for name, one in model.parameters.items() if name in shapes}
    zero = ZeroEngine(optimizer, parameters, shapes, model.parallel_dims.replicas)
    if values and compute != torch.float32:
        zero.keep_weights(rows)
    if not rows:
        for parameter in _once(model.parameters.values()):
            parameter.data = parameter.data.to(compute)
    del rows
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
    # Of DeepSpeed's parameters: those that they were made from would stay in memory.
    held["gradients"] = Gradients(model.parameters, model.placement, averages=[], in_place=False)
    return EngineModel(**held, zero=zero)


def _partition(model: ParallelModel, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> dict[str, Tensor]:
    """ZeRO-3: make each parameter whole from the rows of all ranks, and hand it to DeepSpeed before the next one.
    Returns this rank's rows."""
    device, (module,) = model.parallel_dims.device, model.modules
    deepspeed = import_deepspeed(device)
    deepspeed.init_distributed(dist_init_required=False)
    first: list[Any] = []

    def partition(parameter: nn.Parameter) -> None:
        if first:  # the functions that the first parameter has got
            first[0].convert_to_zero_parameters(param_list=[parameter])
        else:
            holder = nn.ParameterList([parameter])
            deepspeed.zero.Init(module=holder, config_dict_or_path=settings, mem_efficient_linear=False)
            first.append(parameter)

    rows = {name: one.detach() for name, one in model.parameters.items()}
    replaced = whole_parameters(
        module, model.parameters, device=device, dtype=model.precision.compute, partition=partition
    )
    for group in optimizer.param_groups:
        group["params"] = [replaced[one] for one in group["params"]]
    return rows


def _once(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameters))


def _check_device(settings: dict[str, Any], device: torch.device) -> None:
    """A UserMistake if DeepSpeed cannot do on this machine what `settings` ask for."""
    deepspeed = import_deepspeed(device)
    if "fp16" in settings and not deepspeed.get_accelerator().is_fp16_supported():
        raise UserMistake(
            "train.precision 16-mixed cannot be used with parallel.engine deepspeed on this device, for which "
            "DeepSpeed has no fp16; use bf16-mixed, or 32-true."
        )
    if any("nvme_path" in one for one in settings["zero_optimization"].values() if isinstance(one, dict)):
        _load_disk_kernel()


def _load_disk_kernel() -> None:
    """Load DeepSpeed's kernel for offload to disk, which it compiles the first time, for minutes."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise UserMistake(
            "parallel.offload to nvme with parallel.engine deepspeed needs libaio, which is not installed: apt "
            "install libaio-dev, or use offload cpu."
        )
    if (sentence := abandoned_lock(builder.name)) is not None:
        LOGGER.warning("%s", sentence)
    said = Timer(PATIENCE, lambda: LOGGER.warning("DeepSpeed compiles its kernel for disks, once: this takes minutes."))
    said.start()
    try:
        builder.load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if "error" in line.lower()), str(error))
        raise UserMistake(
            "parallel.offload to nvme with parallel.engine deepspeed needs a kernel that DeepSpeed could not compile "
            f"with g++ and ninja ({shortened(reason)}); use offload cpu."
        ) from None
    finally:
        said.cancel()


def _initialize(model: ParallelModel, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> Any:
    deepspeed = import_deepspeed(model.parallel_dims.device)
    (module,) = model.modules
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
    return engine

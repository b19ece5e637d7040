"""How single keys of DeepSpeed's JSON are translated; `deepspeed.py` has the tables."""

from typing import Any

from shoal.convert.configs.rules import Key, rule
from shoal.convert.configs.values import count, number, optimizer, precision, put_schedule, truth

BUILT_IN = "built in: communication overlaps with compute, in buckets of the size of a block"
AUTO = "auto: the value of the Trainer's arguments"
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
DEFAULT_STEPS = 1000  # of warmup
DEFAULT_WINDOW = 2000
ZERO = "zero_optimization"


@rule("parallel.strategy", says="ddp, zero1, zero2, zero3")
def stage(key: Key) -> None:
    """A stage of ZeRO."""
    wanted = count(key.value) if not isinstance(key.value, str) or key.value.isdigit() else -1
    if 0 <= wanted < len(STRATEGIES):
        key.become("parallel.strategy", STRATEGIES[wanted])
    else:
        key.not_carried("ZeRO has the stages 0 to 3")


def put_offload(key: Key, optimizer_to: Any, parameters_to: Any, path: Any) -> None:
    """`offload_optimizer` and `offload_param`, from either of them."""
    optimizer_to, parameters_to = (str(device or "none").lower() for device in (optimizer_to, parameters_to))
    if optimizer_to == "nvme":
        if path is None:
            key.not_carried("nvme needs a folder: set parallel.offload: {optimizer: nvme, path: FOLDER}")
            return
        says = "" if parameters_to == "none" else "parameters stay on the device: only the optimizer state is on disk"
        key.become("parallel.offload", {"optimizer": "nvme", "path": str(path)}, says)
    elif parameters_to in ("cpu", "nvme"):
        says = "" if parameters_to == "cpu" else "parameters are kept in host memory, not on disk"
        says = says or ("" if optimizer_to == "cpu" else "the optimizer state too")
        key.become("parallel.offload", "cpu", says)
    elif optimizer_to == "cpu":
        key.become("parallel.offload", "optimizer")
    elif {optimizer_to, parameters_to} == {"none"}:
        key.no_meaning("off")
    else:
        key.not_carried("offload goes to cpu or nvme")


@rule("parallel.offload", says="cpu, optimizer, or {optimizer: nvme, path}")
def offload_rule(key: Key) -> None:
    put_offload(
        key,
        key.get(f"{ZERO}.offload_optimizer.device"),
        key.get(f"{ZERO}.offload_param.device") if stage_rule(key) == 3 else None,
        key.get(f"{ZERO}.offload_optimizer.nvme_path"),
    )


def stage_rule(key: Key) -> int:
    return int(key.get(f"{ZERO}.stage", 0)) if str(key.get(f"{ZERO}.stage", 0)).isdigit() else 3


@rule("parallel.offload")
def old_offload_rule(key: Key) -> None:
    """`cpu_offload` and `cpu_offload_param`, of before the blocks."""
    if truth(key.value):
        parameters = "cpu_offload_param" in key.last or truth(key.get(f"{ZERO}.cpu_offload_param", False))
        put_offload(key, "cpu", "cpu" if parameters and stage_rule(key) == 3 else None, None)
    else:
        key.no_meaning("off")


@rule("train.precision")
def half_rule(key: Key) -> None:
    """`fp16.enabled` and `bf16.enabled`."""
    block = key.name.partition(".")[0]
    other = "fp16" if block != "fp16" else "bf16"
    if truth(key.value):
        key.become("train.precision", "16-mixed" if block == "fp16" else "bf16-mixed")
    elif key.get(f"{other}.enabled") in (None, False):
        key.become("train.precision", "32-true", "neither fp16 nor bf16")
    else:
        key.no_meaning("off")


@rule("train.precision", says="bf16-true")
def pure_bf16_rule(key: Key) -> None:
    if not truth(key.value) or key.get("bf16.enabled", False) is False:
        key.no_meaning("off")
    elif key.get("bf16.bf16_optimizer_states", False):
        key.become("train.precision", "bf16-true", "no fp32 master weights")
    else:
        key.become("train.precision", "bf16-true", "the optimizer state is in bf16 too")


@rule("train.precision", says="mixed precision, in torch_autocast.dtype")
def autocast_rule(key: Key) -> None:
    if truth(key.value):
        key.become("train.precision", precision(key.get("torch_autocast.dtype", "bf16")))
    else:
        key.no_meaning("off")


def needs_fp16_rule(key: Key) -> bool:
    if key.get("fp16.enabled", True) is False:
        key.no_meaning("fp16 is off")
        return False
    return True


@rule("train.loss_scale", says="0 is a dynamic scale")
def loss_scale_rule(key: Key) -> None:
    if not needs_fp16_rule(key):
        return
    if number(key.value) == 0:
        key.no_meaning("0: dynamic, as 16-mixed is")
    else:
        key.become("train.loss_scale.initial", number(key.value))
        key.become("train.loss_scale.fixed", True)


@rule("train.loss_scale.initial", says="two to the power of it")
def scale_power_rule(key: Key) -> None:
    if needs_fp16_rule(key):
        if number(key.get("fp16.loss_scale", 0) or 0) != 0:
            key.no_meaning("the loss scale is fixed")
        else:
            key.become("train.loss_scale.initial", 2.0 ** count(key.value))


@rule(says="the scale doubles after 2000 steps here")
def scale_window_rule(key: Key) -> None:
    if needs_fp16_rule(key):
        if number(key.value) == DEFAULT_WINDOW:
            key.no_meaning("the loss scale doubles after 2000 steps here too")
        else:
            key.not_carried("the loss scale doubles after 2000 steps without an overflow, and halves after each")


@rule(says="the loss scale halves after each overflow")
def scale_detail_rule(key: Key) -> None:
    if needs_fp16_rule(key):
        key.no_meaning("the loss scale halves after each overflow, and a step with one is skipped")


@rule("train.optimizer.name")
def optimizer_rule(key: Key) -> None:
    name, says = optimizer(key.value)
    params = key.get("optimizer.params", {})
    if str(key.value).lower() == "adam" and params.get("adam_w_mode") is False and params.get("weight_decay"):
        says = "its weight decay is AdamW's, not added to the gradient"
    key.become("train.optimizer.name", name, says)


@rule("train.lr", says="the learning rate of Muon's matrices")
def muon_lr_rule(key: Key) -> None:
    key.become("train.lr", number(key.value))


@rule(says="all parameters have train.lr")
def adam_lr_rule(key: Key) -> None:
    if number(key.value) == key.get("optimizer.params.muon_lr", key.get("optimizer.params.lr")):
        key.no_meaning("all parameters have train.lr")
    else:
        key.not_carried("all parameters have train.lr, those of Muon's AdamW too")


@rule("parallel.tp")
def tensor_parallel_rule(key: Key) -> None:
    key.become("parallel.tp", count(key.value)) if count(key.value) > 0 else key.no_meaning("off")


@rule("train.compile")
def compile_off_rule(key: Key) -> None:
    key.become("train.compile", not truth(key.value))


@rule(says="mean")
def mean_rule(key: Key) -> None:
    if str(key.value).lower() == "mean":
        key.no_meaning("gradients are averaged")
    else:
        key.not_carried("gradients are averaged over the loss tokens; multiply train.lr instead")


@rule("train.schedule.name", "train.schedule.min_ratio")
def scheduler_rule(key: Key) -> None:
    if not put_schedule(key):
        return
    given = key.get("scheduler.params", {}) or {}
    if given.get("warmup_type", "log") == "log" and "cosine" not in str(key.value).lower():
        key.draft.remarks.append(
            f"The warmup of {key.value} is logarithmic unless warmup_type is linear; shoal's is linear."
        )


@rule(says="shoal's warmup is linear")
def warmup_type_rule(key: Key) -> None:
    if key.value == "linear":
        key.no_meaning("the warmup is linear")
    else:
        key.not_carried("the warmup is linear")


@rule(says="the warmup begins at 0")
def warmup_from_rule(key: Key) -> None:
    if number(key.value) == 0:
        key.no_meaning("0: where the warmup begins")
    else:
        key.not_carried("the warmup begins near 0")


@rule("log.to")
def monitor_rule(key: Key) -> None:
    name = {"csv_monitor": "csv"}.get(key.name.partition(".")[0], key.name.partition(".")[0])
    if truth(key.value):
        key.collect("log.to", name)
    else:
        key.no_meaning("off")


@rule("train.optimizer.betas")
def betas_rule(key: Key) -> None:
    key.become("train.optimizer.betas", [number(one) for one in key.value])


@rule("train.reduce_dtype")
def reduce_rule(key: Key) -> None:
    key.become("train.reduce_dtype", str(key.value).lower())


@rule("train.clip", says="0: no clipping")
def clip(key: Key) -> None:
    """The largest gradient norm, where 0 means none."""
    if key.value is None or number(key.value) == 0:
        key.become("train.clip", None, "no clipping")
    else:
        key.become("train.clip", number(key.value))


@rule(says="train.recompute: full is activation checkpointing")
def checkpointing_rule(key: Key) -> None:
    key.not_carried(
        "configures the checkpointing that a model calls itself; train.recompute: full is activation checkpointing"
    )

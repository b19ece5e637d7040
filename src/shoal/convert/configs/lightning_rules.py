"""How single keys of Lightning are translated; `lightning.py` has the table."""

from collections.abc import Callable
from typing import Any

from shoal.convert.configs.deepspeed_rules import STRATEGIES, put_offload
from shoal.convert.configs.fsdp import put_sharding
from shoal.convert.configs.linked import follow
from shoal.convert.configs.rules import Key, rule
from shoal.convert.configs.values import count, number, precision, put_schedule, text, truth

PYTHON = "an argument of your Python code: its model and its data are set in model and data"
STATE_DICTS = ("full", "sharded")


def class_and_arguments(value: Any) -> tuple[str, dict[str, Any]]:
    """A class as LightningCLI (`class_path`, `init_args`) or Hydra (`_target_`) writes it: its name and arguments."""
    if isinstance(value, str):
        return value.rpartition(".")[2], {}
    given = dict(value)
    path = given.pop("class_path", None) or given.pop("_target_", None)
    arguments = given.pop("init_args", None) or given
    return str(path or "").rpartition(".")[2], dict(arguments)


def _part(key: Key, name: str, value: Any) -> Key:
    return Key(key.source, f"{key.name}.{name}", value, key.draft, above=key.above)


@rule("parallel.strategy", "parallel.sharding", "parallel.offload", "parallel.tp", says="a name, or a class")
def strategy(key: Key) -> None:
    """How devices share the work."""
    name, arguments = class_and_arguments(key.value)
    plain = name.lower().removesuffix("strategy")
    if plain == "auto":
        key.no_meaning("auto chooses here too")
    elif plain.startswith("deepspeed"):
        _deepspeed(key, plain, arguments)
    elif plain in ("fsdp", "fsdp_cpu_offload", "modelparallel"):
        key.become("parallel.strategy", "fsdp")
        if plain == "fsdp_cpu_offload":
            key.become("parallel.offload", "cpu")
    elif plain.startswith("ddp"):
        key.become("parallel.strategy", "ddp")
    elif plain in ("single_device", "singledevice"):
        key.become("parallel.strategy", "single")
    else:
        key.not_carried("parallel.strategy has ddp, fsdp and zero1 to zero3")
        return
    if plain.startswith("deepspeed"):
        return
    for option, value in arguments.items():
        _option(_part(key, option, value))


def _option(key: Key) -> None:
    """An argument of DDPStrategy, FSDPStrategy or ModelParallelStrategy."""
    if key.value is None:
        key.no_meaning("not set")
    elif key.last == "sharding_strategy":
        put_sharding(key, str(key.value))
    elif key.last == "cpu_offload":
        key.become("parallel.offload", "cpu") if key.value else key.no_meaning("off")
    elif key.last == "tensor_parallel_size" and key.value != "auto":
        key.become("parallel.tp", count(key.value))
    elif key.last == "auto_wrap_policy" and isinstance(key.value, list):
        key.become("parallel.wrap", {"classes": [text(one).rpartition(".")[2] for one in key.value]})
    elif key.last in ("activation_checkpointing", "activation_checkpointing_policy"):
        key.become("train.recompute", "full", "every transformer layer")
    elif key.last == "state_dict_type" and key.value in STATE_DICTS:
        key.become("checkpoint.format", key.value)
    else:
        key.no_meaning("built in")


def _deepspeed(key: Key, name: str, arguments: dict[str, Any]) -> None:
    """`deepspeed_stage_3_offload`, or DeepSpeedStrategy with its arguments."""
    digits = [one for one in name if one.isdigit()]
    stage = int(digits[0]) if digits else count(arguments.pop("stage", 2))
    config = arguments.pop("config", None)
    if isinstance(config, str) and not follow(_part(key, "config", config)):
        _part(key, "config", config).not_carried("names DeepSpeed's JSON, which is not there: give it as another FILE")
    if config is None:
        key.become("parallel.strategy", STRATEGIES[stage])
    offloads = "offload" in name
    state = "cpu" if offloads or arguments.pop("offload_optimizer", False) else None
    weights = "cpu" if (offloads and stage == 3) or arguments.pop("offload_parameters", False) else None
    if name.endswith("nvme") or "nvme" in str(arguments.pop("offload_optimizer_device", "")):
        state = "nvme"
    if state is not None or weights is not None:
        put_offload(key, state, weights if stage == 3 else None, arguments.pop("nvme_path", "/local_nvme"))
    for option, value in arguments.items():
        _part(key, option, value).no_meaning("an option of DeepSpeed's own code, or built in")


@rule("hardware.devices", says="per node; auto and -1: all of them")
def devices(key: Key) -> None:
    """A number, a list of indices, or auto."""
    if key.value in ("auto", -1, "-1"):
        key.no_meaning("all GPUs of a node are used")
    elif isinstance(key.value, list):
        key.become("hardware.devices", len(key.value), "CUDA_VISIBLE_DEVICES chooses among the GPUs")
    else:
        key.become("hardware.devices", count(key.value))


@rule(says="a GPU is used where there is one")
def accelerator(key: Key) -> None:
    if key.value in ("auto", "gpu", "cuda"):
        key.no_meaning("a GPU is used where there is one")
    else:
        key.not_carried("shoal uses NVIDIA GPUs, and the CPU where it sees none")


@rule("train.precision", says="the same names; transformer-engine: fp8")
def precision_rule(key: Key) -> None:
    given = "fp8" if str(key.value).startswith("transformer-engine") else key.value
    key.become("train.precision", precision(given))


@rule("train.steps", says="-1: the epochs count")
def most(key: Key) -> None:
    """`max_steps` and `max_epochs`, of which -1 means no limit."""
    if count(key.value) < 0:
        key.no_meaning("-1: no limit of this kind")
    else:
        key.become("train.steps" if key.last == "max_steps" else "train.epochs", count(key.value))


@rule("eval.every", says="batches there, steps here")
def evaluation_interval(key: Key) -> None:
    """Batches between two evaluations; a fraction is of an epoch."""
    batches = number(key.value)
    accumulated = count(key.get("trainer.accumulate_grad_batches", 1))
    if isinstance(key.value, float) and batches <= 1:
        key.not_carried("eval.every counts steps, and how many an epoch has is known when the data is")
    elif batches % accumulated:
        key.not_carried(f"counts batches, of which a step has {accumulated}: set eval.every")
    else:
        key.become("eval.every", int(batches) // accumulated)


@rule("eval.batches", says="0: no evaluation")
def evaluation_batches(key: Key) -> None:
    limit = number(key.value)
    if limit == 0:
        key.become("data.validation", 0.0, "no evaluation")
    elif isinstance(key.value, float):
        key.no_meaning("all of it") if limit == 1 else key.not_carried("eval.batches is a number of batches")
    else:
        key.become("eval.batches", count(key.value))


def off_unless(*usual: Any) -> Callable[[str], Any]:
    """Keys that mean something unless they have their usual value."""

    def made(why: str) -> Any:
        @rule(says=why)
        def translated(key: Key) -> None:
            key.no_meaning("as usual") if key.value in usual else key.not_carried(why)

        return translated

    return made


@rule("checkpoint.keep_best", "checkpoint.every", "train.early_stop.patience", says="ModelCheckpoint, EarlyStopping")
def callbacks(key: Key) -> None:
    """A list of LightningCLI, or Hydra's mapping."""
    given = key.value.items() if isinstance(key.value, dict) else enumerate(key.value)
    for name, one in given:
        if one is not None:
            _callback(_part(key, str(name), one))


def _callback(key: Key) -> None:
    name, arguments = class_and_arguments(key.value)
    if name not in ("ModelCheckpoint", "EarlyStopping"):
        known = name.endswith(("Monitor", "ProgressBar", "Summary", "Timer"))
        key.no_meaning("progress, memory and speed are recorded") if known else key.not_carried(f"{name}: see hooks")
        return
    for option, value in arguments.items():
        part = _part(key, option, value)
        if value is None:
            part.no_meaning("not set")
        elif option in ("monitor", "mode"):
            usual = "loss" in str(value) or value == "min"
            part.no_meaning("the evaluation loss") if usual else part.not_carried("the evaluation loss, and lower")
        elif name == "EarlyStopping" and option == "patience":
            part.become("train.early_stop.patience", count(value), "evaluations")
        elif option == "save_top_k":
            best = count(value)
            if best >= 0:
                part.become("checkpoint.keep_best", best)
            else:
                part.not_carried("all of them: set checkpoint.keep to their number")
        elif option == "every_n_train_steps":
            part.become("checkpoint.every", count(value))
        elif option == "dirpath":
            part.no_meaning("checkpoints are in the folder of the run")
        elif option in ("every_n_epochs", "train_time_interval", "stopping_threshold", "divergence_threshold"):
            part.not_carried("steps are counted, and how many an epoch has is known when the data is")
        else:
            part.no_meaning("built in")


@rule("log.to")
def loggers(key: Key) -> None:
    """True, a class, a list of them, or Hydra's mapping."""
    if isinstance(key.value, bool):
        key.no_meaning("metrics.jsonl is always written")
        return
    several = isinstance(key.value, dict) and not {"class_path", "_target_"} & key.value.keys()
    given = list(key.value.values()) if several else key.value if isinstance(key.value, list) else [key.value]
    for one in given:
        name = class_and_arguments(one)[0].removesuffix("Logger").lower()
        if name in ("tensorboard", "wandb", "mlflow", "csv"):
            key.collect("log.to", name)
        else:
            _part(key, name, one).not_carried(f"{name}: no such logger here")


@rule("train.schedule.name", says="none: constant")
def schedule(key: Key) -> None:
    """LightningCLI's scheduler; without one the learning rate stays as it is."""
    if key.value == "constant":
        key.become("train.schedule.name", "constant")
        key.become("train.schedule.warmup", 0)
    else:
        put_schedule(key)


@rule("seed", says="false: none")
def seed(key: Key) -> None:
    """A number, or whether to draw one."""
    if isinstance(key.value, bool):
        key.no_meaning("a run always has a seed")
    else:
        key.become("seed", count(key.value))


@rule("train.deterministic", says="true or warn")
def deterministic(key: Key) -> None:
    key.become("train.deterministic", True if key.value == "warn" else truth(key.value))

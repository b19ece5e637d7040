"""Values of other systems in our words: numbers, optimizers, schedules, precisions, folders, datasets."""

import re
from pathlib import PurePath
from typing import Any

from shoal.catalogue.optimizers import ALIASES, OPTIMIZERS
from shoal.convert.configs.rules import Key


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("is not a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("is not a number") from None


def count(value: Any) -> int:
    found = number(value)
    if found != int(found):
        raise ValueError("is not a whole number")
    return int(found)


def truth(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "1", "0", "on", "off"):
        return value.lower() in ("true", "yes", "1", "on")
    if not isinstance(value, bool):
        raise ValueError("is neither true nor false")
    return value


def on(value: Any) -> bool:
    """Whether a switch is on; `auto`, as in axolotl's `bf16: auto`, counts."""
    return value == "auto" or (value is not None and _true(value))


def _true(value: Any) -> bool:
    try:
        return truth(value)
    except ValueError:
        return False


def text(value: Any) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError("is not text")
    return str(value)


def texts(value: Any) -> list[str]:
    """A list, or one text with commas or spaces."""
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return list(value)
    raise ValueError("is not a list of names")


OURS_INSTEAD = "train.optimizer.name has adamw, adamw8bit, lion, sgd and muon"
_PAGED = "state does not move to the host when the GPU is full; parallel.offload: optimizer keeps it there"


def optimizer(value: Any) -> tuple[str, str]:
    """Our name of an optimizer, and what differs. Names of transformers, DeepSpeed, torch and bitsandbytes."""
    plain = text(value).rpartition(".")[2].lower().replace("-", "_")
    paged = "paged" in plain
    core = plain.replace("paged_", "").replace("paged", "")
    core = re.sub(r"_(torch|hf|apex|anyprecision|fused|xla|npu|bnb|32bit)(?=_|$)", "", core)
    core = {"adam": "adamw", "fusedadam": "adamw", "cpuadam": "adamw", "deepspeedcpuadam": "adamw"}.get(core, core)
    core = {"adamw_8bit": "adamw8bit", "adam8bit": "adamw8bit", "lion_8bit": "lion8bit"}.get(core, core)
    core = ALIASES.get(core, core)
    says = _PAGED if paged else ""
    if core == "lion8bit":
        core, says = "lion", "its state is not quantized to 8 bits here"
    if core not in OPTIMIZERS:
        raise ValueError(f"{value} is not built; {OURS_INSTEAD}")
    return core, says


def put_optimizer(key: Key) -> None:
    """A key that names the optimizer."""
    name, says = optimizer(key.value)
    key.become("train.optimizer.name", name, says)


# The schedules of transformers, torchtune, axolotl, LitGPT: our name, and the last learning rate as a share.
SCHEDULES = {
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "cosine_warmup": ("cosine", 0.0),
    "get_cosine_schedule_with_warmup": ("cosine", 0.0),
    "cosine_with_min_lr": ("cosine", 0.0),
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
    "warmup_stable_decay": ("wsd", 0.0),
    "wsd": ("wsd", 0.0),
    "warmuplr": ("constant", None),
    "warmupdecaylr": ("linear", 0.0),
    "warmupcosinelr": ("cosine", 0.0001),
}


def put_schedule(key: Key, *, min_ratio: bool = True) -> bool:
    """A key that names the schedule. Whether there is one of ours for it."""
    name = text(key.value).rpartition(".")[2].lower()
    if name not in SCHEDULES:
        key.not_carried(f"{key.value} is not built; train.schedule.name has cosine, linear, constant and wsd")
        return False
    ours, lowest = SCHEDULES[name]
    key.become("train.schedule.name", ours)
    if min_ratio and lowest is not None:
        key.become("train.schedule.min_ratio", lowest)
    return True


def put_warmup_steps(key: Key) -> None:
    """Warmup in steps; transformers takes a share of the run in the same key."""
    steps = number(key.value)
    key.become("train.schedule.warmup", steps if 0 < steps < 1 else int(steps))


def put_epochs(key: Key) -> None:
    epochs = number(key.value)
    if epochs != int(epochs) or epochs < 1:
        key.not_carried("shoal counts whole epochs; set train.steps or train.tokens instead")
    else:
        key.become("train.epochs", int(epochs))


PRECISIONS = {
    "bf16": "bf16-mixed",
    "bfloat16": "bf16-mixed",
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "half": "16-mixed",
    "no": "32-true",
    "fp32": "32-true",
    "float32": "32-true",
    "fp8": "fp8",
    "bf16-mixed": "bf16-mixed",
    "bf16-true": "bf16-true",
    "16-mixed": "16-mixed",
    "32-true": "32-true",
    "32": "32-true",
    "16": "16-mixed",
}


def precision(value: Any) -> str:
    name = str(value).lower().removeprefix("torch.")
    if value is False:  # YAML's `no`
        name = "no"
    if name not in PRECISIONS:
        raise ValueError(f"{value} is not built; train.precision has bf16-mixed, bf16-true, 16-mixed, 32-true and fp8")
    return PRECISIONS[name]


def put_folder(key: Key) -> None:
    """The folder of a run: ours is RUN_DIR/NAME."""
    path = PurePath(text(key.value))
    name = re.sub(r"[^\w.+-]+", "-", path.name).strip("-.")
    if not name:
        key.not_carried("is not the name of a folder; set name and run_dir")
        return
    key.become("run_dir", str(path.parent))
    key.become("name", name if re.match(r"\w", name) else f"run{name}")


def put_name(key: Key) -> None:
    name = re.sub(r"[^\w.+-]+", "-", str(key.value)).strip("-.+")
    key.become("name", name) if name else key.not_carried("is not a name for a run")


LOGGERS = ("tensorboard", "wandb", "mlflow", "csv")


def put_loggers(key: Key) -> None:
    """Names of loggers; `none` and `all`, as in transformers."""
    names = [name.lower().rpartition(".")[2].removesuffix("logger") for name in texts(key.value)]
    if names in (["none"], [""]) or not names:
        key.become("log.to", [])
        return
    known = [name for name in names if name in LOGGERS]
    if "all" in names:
        known = ["tensorboard"]
    unknown = [name for name in names if name not in (*LOGGERS, "all", "none", "disk", "stdout")]
    says = f"{', '.join(unknown)}: no such logger here" if unknown else ""
    if "disk" in names or "stdout" in names:
        says = "metrics.jsonl is always written"
    key.become("log.to", known, says)


def put_recompute(key: Key) -> None:
    """Activation checkpointing that is on or off."""
    wanted = truth(key.value)
    if wanted or key.default:
        key.become("train.recompute", "full" if wanted else "none")
    elif key.draft.get("train.recompute") is None:
        key.become("train.recompute", "none")
    else:
        key.no_meaning("off")


GATED = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "projection": "o_proj", "head": "lm_head"}
MLP = ("gate_proj", "up_proj", "down_proj")

"""Hydra configs of a project that trains with the Hugging Face Trainer: `trainer.dist`, and submitit as launcher."""

from typing import Any

from shoal.convert.configs.fsdp import FSDP_KEYS, fsdp_words
from shoal.convert.configs.rules import Key, Rule, System, nothing, rule, to, under, words
from shoal.convert.configs.trainer import ADAPTER, ARGUMENTS, DATA_AND_MODEL
from shoal.convert.configs.values import count, number, text, texts


@rule("parallel.strategy", says="ddp, fsdp")
def _mode(key: Key) -> None:
    name = str(key.value).lower()
    if name in ("ddp", "fsdp"):
        key.become("parallel.strategy", name)
    elif name in ("none", "single"):
        key.become("parallel.strategy", "single")
    else:
        key.not_carried("the modes are ddp and fsdp")


@rule("parallel.sharding", "parallel.offload")
def _fsdp(key: Key) -> None:
    if str(key.get("trainer.dist.mode", "fsdp")).lower() == "ddp":
        key.no_meaning("mode ddp decides")
    else:
        fsdp_words.translate(key)


def _if_fsdp(inner: Rule) -> Rule:
    def translate(key: Key) -> None:
        if str(key.get("trainer.dist.mode", "fsdp")).lower() == "ddp":
            key.no_meaning("mode ddp decides")
        else:
            inner.translate(key)

    return Rule(translate, inner.ours, inner.says)


def _minutes(value: Any) -> str:
    minutes = count(value)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


@rule("slurm.extra")
def _extra(key: Key) -> None:
    key.become("slurm.extra", [f"--{name.replace('_', '-')}={value}" for name, value in dict(key.value).items()])


SUBMITIT = {
    "partition": to("slurm.partition", text),
    "account": to("slurm.account", text),
    "qos": to("slurm.qos", text),
    "constraint": to("slurm.constraint", text),
    "timeout_min": to("slurm.time", _minutes),
    "nodes": to("hardware.nodes", count),
    "gpus_per_node": to("hardware.devices", count),
    "cpus_per_task": to("slurm.cpus_per_task", count),
    "mem_gb": to("slurm.mem", lambda value: f"{count(number(value))}G"),
    "mem_per_gpu": nothing("slurm.mem is per node", "x")["x"],
    "setup": to("slurm.setup", lambda value: [value] if isinstance(value, str) else texts(value)),
    "signal_delay_s": to("slurm.signal", count),
    "additional_parameters": _extra,
    "name": nothing("the job has the name of the run", "x")["x"],
    **nothing("one task per device", "tasks_per_node ntasks_per_node gpus_per_task"),
    **nothing("shoal submit requeues a run that was stopped or preempted", "max_num_timeout"),
    **nothing(
        "shoal submit writes the script", "_target_ submitit_folder stderr_to_stdout array_parallelism comment exclude"
    ),
}

KEYS = {
    "trainer.dist.mode": _mode,
    "trainer.dist.fsdp": _fsdp,
    **under("trainer.dist.fsdp_config", {name: _if_fsdp(one) for name, one in FSDP_KEYS.items()}),
    **under("trainer", ARGUMENTS),
    **under("trainer", {name: one for name, one in DATA_AND_MODEL.items() if name != "streaming"}),
    **under("training", ARGUMENTS),
    **under("trainer.args", ARGUMENTS),
    **under("model", {"name": to("model.from", text), "name_or_path": to("model.from", text)}),
    **under(
        "model",
        {name: DATA_AND_MODEL[name] for name in ("model_name_or_path", "attn_implementation", "dtype", "torch_dtype")},
    ),
    **under("model.lora", {"r": to("adapter.rank", count), "alpha": to("adapter.alpha", number)}),
    **under("lora", ADAPTER),
    **under("data", {"max_length": to("data.max_length", count), **words("dataset_name max_seq_length train_file")}),
    "max_length": to("data.max_length", count),
    "seed": to("seed", count),
    "compute.gpus_per_node": to("hardware.devices", count),
    "compute.nodes": to("hardware.nodes", count),
    "compute.partition": to("slurm.partition", text),
    "compute.cpus_per_task": to("slurm.cpus_per_task", count),
    "compute.mem_gb": SUBMITIT["mem_gb"],
    "compute.timeout_min": SUBMITIT["timeout_min"],
    **under("hydra.launcher", SUBMITIT),
    **nothing("Hydra's composition: shoal has include", "defaults"),
    **nothing("shoal sweep varies keys", "hydra.sweep hydra.sweeper hydra.mode"),
    **nothing("a run's folder is RUN_DIR/NAME", "hydra.run hydra.job hydra.output_subdir"),
}

HYDRA = System(
    "a Hydra config with trainer.dist",
    KEYS,
    marks=frozenset(
        {"trainer.dist", "trainer.dist.mode", "trainer.dist.fsdp", "hydra.launcher", "compute.gpus_per_node"}
    ),
)

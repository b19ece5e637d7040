"""What starts a run elsewhere: torchrun, accelerate launch, deepspeed, srun and sbatch."""

import re

from shoal.convert.configs.accelerate import KEYS as ACCELERATE_KEYS
from shoal.convert.configs.draft import WORLD
from shoal.convert.configs.linked import linked
from shoal.convert.configs.rules import Key, Rule, System, cannot, nothing, rule, to
from shoal.convert.configs.shell import gpus_per_node
from shoal.convert.configs.values import count, put_name, text

MEETING = "ranks find each other by themselves: under srun and torchrun, and in shoal submit"


@rule("hardware.devices")
def _per_node(key: Key) -> None:
    if str(key.value) in ("auto", "gpu", "cpu"):
        key.become("hardware.devices", "auto")
    else:
        key.become("hardware.devices", count(key.value))


@rule("hardware.nodes", says="MIN:MAX of torchrun: the most")
def _nodes(key: Key) -> None:
    fewest, _, most = str(key.value).partition(":")
    if most:
        key.become("hardware.nodes", count(most), "torchrun may also start with fewer; a shoal run resumes on fewer")
    else:
        key.become("hardware.nodes", count(fewest))


@rule("hardware.devices", "slurm.gpu_type", says="a type becomes slurm.gpu_type")
def _gpus(key: Key) -> None:
    options = {name.rpartition(".")[2]: str(value) for name, value in key.source.tree.get("sbatch", {}).items()}
    devices = gpus_per_node(options)
    if devices is None:
        key.not_carried("the number of GPUs per node cannot be told from it: set hardware.devices")
        return
    key.become("hardware.devices", devices)
    if (match := re.match(r"(?:gpu:)?([A-Za-z][\w.-]*):\d+", str(key.value))) and match[1] != "gpu":
        key.become("slurm.gpu_type", match[1])


@rule("hardware.devices", says="one task per device")
def _tasks(key: Key) -> None:
    options = {name: str(value) for name, value in key.source.tree.get("sbatch", {}).items()}
    if gpus_per_node(options) is not None or count(key.value) == 1:
        key.no_meaning("shoal submit starts one task per device")
    elif key.last == "ntasks-per-node":
        key.become("hardware.devices", count(key.value), "one task per device")
    else:
        key.become(WORLD, count(key.value), "one task per device")


@rule("slurm.cpus_per_task", says="per device here")
def _cpus(key: Key) -> None:
    options = {name: str(value) for name, value in key.source.tree.get("sbatch", {}).items()}
    devices = gpus_per_node(options) or 1
    nodes = count(options.get("nodes", "1"))
    tasks = (
        count(options["ntasks-per-node"])
        if "ntasks-per-node" in options
        else count(options.get("ntasks", nodes)) // nodes
    )
    each = max(1, count(key.value) * max(1, tasks) // devices)
    says = "" if each == count(key.value) else f"{key.value} × {tasks} tasks on {devices} devices"
    key.become("slurm.cpus_per_task", each, says)


@rule("slurm.signal")
def _signal(key: Key) -> None:
    _, at, seconds = str(key.value).partition("@")
    if at and seconds.isdigit():
        key.become("slurm.signal", count(seconds))
    else:
        key.not_carried("slurm.signal is the seconds before the time limit")


def _switch(ours: str, value: object) -> Rule:
    return rule(ours)(lambda key: key.become(ours, value))


def _extra(name: str) -> Rule | None:
    """Other options of sbatch are passed on as they are."""
    if not name.startswith("sbatch."):
        return ENVIRONMENT if name.startswith("env.") else None

    def translate(key: Key) -> None:
        key.collect("slurm.extra", f"--{key.last}={key.value}" if key.value != "" else f"--{key.last}")

    return Rule(translate, ("slurm.extra",), verbatim=True)


def _environment(key: Key) -> None:
    if key.last in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"):
        key.no_meaning(MEETING)
    elif "sbatch" in key.source.tree:
        key.become(f"slurm.env.{key.last}", str(key.value))
    else:
        key.no_meaning("the environment is passed on to all processes")


ENVIRONMENT = Rule(_environment, ("slurm.env",))

SBATCH = {
    "job-name": rule("name")(put_name),
    "nodes": _nodes,
    "gpus-per-node": _gpus,
    "gres": _gpus,
    "gpus": _gpus,
    "gpus-per-task": _gpus,
    "ntasks": _tasks,
    "ntasks-per-node": _tasks,
    "cpus-per-task": _cpus,
    **{name: to(f"slurm.{name}", text) for name in ("partition", "account", "qos", "constraint", "mem", "time")},
    "signal": _signal,
    "requeue": _switch("slurm.requeue", True),
    "no-requeue": _switch("slurm.requeue", False),
    **nothing("output is in RUN/logs", "output error open-mode"),
    **nothing("the folder in which shoal submit is called", "chdir"),
    **cannot("shoal sweep --on slurm submits arrays", "array"),
}
# Kept as they are: %x and %j in names are Slurm's.
_TORCHRUN = {
    "nproc_per_node": _per_node,
    "nnodes": _nodes,
    "max_restarts": nothing("shoal train --max-restarts N", "x")["x"],
    **nothing(
        MEETING,
        "node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf "
        "standalone local_addr start_method virtual_local_rank shutdown_timeout signals_to_handle",
    ),
    **nothing("output is in RUN/logs", "log_dir tee redirects local_ranks_filter role monitor_interval"),
    **nothing(
        "output is in RUN/logs", "duplicate_stdout_filters duplicate_stderr_filters logs_specs event_log_handler"
    ),
    **nothing("processes are bound to the cores next to their GPU by srun: slurm.cpu_bind", "numa_binding"),
}
_DEEPSPEED = {
    "num_gpus": to("hardware.devices", count, "per node"),
    "num_accelerators": to("hardware.devices", count, "per node"),
    "num_nodes": to("hardware.nodes", count),
    **nothing(MEETING, "hostfile include exclude master_addr master_port node_rank launcher no_ssh bind_cores_to_rank"),
    **nothing(MEETING, "launcher_args no_ssh_check force_multi bind_core_list ssh_port venv_script"),
    **nothing("output is in RUN/logs", "enable_each_rank_log save_pid log_level quiet"),
    **nothing("shoal plan chooses, in a second and without a GPU", "autotuning"),
}
DYNAMO = ("mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
_FLAGS = {
    "multi_gpu": _switch("parallel.strategy", "ddp"),
    "use_fsdp": _switch("parallel.strategy", "fsdp"),
    **nothing("the stage of ZeRO decides", "use_deepspeed"),
    "config_file": linked("Accelerate's config"),
    "cpu": ACCELERATE_KEYS["use_cpu"],
    **{f"dynamo_{name}": ACCELERATE_KEYS[f"dynamo_config.dynamo_{name}"] for name in DYNAMO},
    **nothing("the degrees of parallelism_config decide", "use_parallelism_config"),
    **nothing("output is in RUN/logs", "tee log_dir role quiet monitor_interval"),
    **nothing(MEETING, "rdzv_conf mpirun_hostfile"),
    "max_restarts": nothing("shoal train --max-restarts N", "x")["x"],
}

LAUNCHER = System(
    "a launcher",
    {
        **{f"sbatch.{name}": one for name, one in SBATCH.items()},
        **{f"torchrun.{name}": one for name, one in _TORCHRUN.items()},
        **{f"deepspeed.{name}": one for name, one in _DEEPSPEED.items()},
        **{f"accelerate.{name}": one for name, one in {**ACCELERATE_KEYS, **_FLAGS}.items()},
        "setup": Rule(
            lambda key: (
                key.become("slurm.setup", key.value)
                if "sbatch" in key.source.tree
                else key.no_meaning("prepare the shell as before")
            ),
            ("slurm.setup",),
            verbatim=True,
        ),
        "commands": nothing("not a command that trains", "x")["x"],
        "srun": nothing("shoal submit starts the tasks, or srun shoal train run.yaml", "x")["x"],
    },
    marks=frozenset(),
    other=_extra,
)

"""Accelerate's YAML, which `accelerate config` writes."""

from shoal.convert.configs.deepspeed_rules import clip, put_offload, stage
from shoal.convert.configs.draft import WORLD
from shoal.convert.configs.fsdp import FSDP_KEYS
from shoal.convert.configs.linked import linked
from shoal.convert.configs.rules import Key, Rule, System, cannot, nothing, rule, to, under, word
from shoal.convert.configs.values import count, precision, truth

LAUNCHED = "a matter of the launcher: shoal train, torchrun or srun start the processes"
TYPES = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp"}


@rule("parallel.strategy", says="NO, MULTI_GPU, FSDP, DEEPSPEED")
def _distributed_type(key: Key) -> None:
    kind = "NO" if key.value is False else str(key.value).upper().replace("DISTRIBUTEDTYPE.", "")
    if kind in TYPES:
        key.become("parallel.strategy", TYPES[kind])
    elif kind == "DEEPSPEED":
        if key.get("deepspeed_config.zero_stage") is None and key.get("deepspeed_config.deepspeed_config_file") is None:
            key.become("parallel.strategy", "zero2", "Accelerate's default stage")
        else:
            key.no_meaning("the stage of ZeRO decides")
    else:
        key.not_carried(f"{kind} is not built; parallel.strategy has ddp, fsdp and zero1 to zero3")


@rule("hardware.devices", says="of all nodes, and ours per node")
def _processes(key: Key) -> None:
    key.become(WORLD, count(key.value))


@rule("parallel.offload")
def _offload(key: Key) -> None:
    put_offload(
        key,
        key.get("deepspeed_config.offload_optimizer_device"),
        key.get("deepspeed_config.offload_param_device"),
        key.get("deepspeed_config.offload_optimizer_nvme_path"),
    )


@rule("parallel.replicate", "parallel.sharding")
def _replicate(key: Key) -> None:
    if count(key.value) > 1:
        key.become("parallel.strategy", "fsdp")
        key.become("parallel.sharding", "hybrid_shard")
        key.become("parallel.replicate", count(key.value))
    else:
        key.no_meaning("one replica")


@rule("parallel.cp", "parallel.cp_method")
def _sequence_parallel(key: Key) -> None:
    if count(key.value) > 1:
        key.become("parallel.cp", count(key.value))
        key.become("parallel.cp_method", "ulysses")
    else:
        key.no_meaning("off")


def _degree(ours: str) -> Rule:
    @rule(ours)
    def translate(key: Key) -> None:
        key.become(ours, count(key.value)) if count(key.value) > 1 else key.no_meaning("1: off")

    return translate


@rule("train.compile")
def _dynamo(key: Key) -> None:
    backend = str(key.value).lower()
    if backend in ("no", "false"):
        key.become("train.compile", False)
    elif backend == "inductor":
        key.become("train.compile", True)
    else:
        key.not_carried(f"the backend {key.value} is not built; train.compile: true compiles with inductor")


@rule(says="shoal uses the CPU where there is no GPU")
def _use_cpu(key: Key) -> None:
    if truth(key.value):
        key.not_carried("shoal uses the CPU where it sees no GPU: set CUDA_VISIBLE_DEVICES to nothing")
    else:
        key.no_meaning("off")


PARALLELISM = {
    "dp_replicate_size": _replicate,
    **nothing("follows from the other degrees and the number of devices", "dp_shard_size"),
    "tp_size": _degree("parallel.tp"),
    "cp_size": _degree("parallel.cp"),
    "sp_size": _sequence_parallel,
    **nothing("parallel.cp_method: gather all-gathers keys and values", "cp_comm_strategy cp_backend"),
    **nothing(
        "parallel.cp_method: ulysses", "sp_backend sp_attn_implementation sp_seq_length sp_seq_length_is_variable"
    ),
}

KEYS = {
    "distributed_type": _distributed_type,
    "num_processes": _processes,
    "num_machines": word("num_machines", count),
    "mixed_precision": to("train.precision", precision),
    "gradient_accumulation_steps": word("gradient_accumulation_steps", count),
    **under("fsdp_config", FSDP_KEYS),
    "deepspeed_config.zero_stage": stage,
    "deepspeed_config.offload_optimizer_device": _offload,
    "deepspeed_config.offload_param_device": _offload,
    "deepspeed_config.gradient_accumulation_steps": word("gradient_accumulation_steps", count),
    "deepspeed_config.gradient_clipping": clip,
    "deepspeed_config.deepspeed_config_file": linked("DeepSpeed's JSON"),
    **nothing(
        "parallel.offload has the folder", "offload_optimizer_nvme_path offload_param_nvme_path", "deepspeed_config"
    ),
    **nothing("each rank loads its own shards", "zero3_init_flag", "deepspeed_config"),
    **nothing("shoal export writes the whole model", "zero3_save_16bit_model", "deepspeed_config"),
    **nothing(
        LAUNCHED,
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter deepspeed_exclusion_filter",
        "deepspeed_config",
    ),
    **nothing("context parallelism communicates in the precision of training", "seq_parallel_communication_data_type"),
    **nothing(
        "context parallelism communicates in the precision of training",
        "seq_parallel_communication_data_type",
        "deepspeed_config",
    ),
    **nothing("experts are sharded like all weights", "deepspeed_moe_layer_cls_names", "deepspeed_config"),
    **under("parallelism_config", PARALLELISM),
    **under("parallelism_config", {f"parallelism_config_{name}": one for name, one in PARALLELISM.items()}),
    "dynamo_backend": _dynamo,
    "dynamo_config.dynamo_backend": _dynamo,
    **nothing(
        "blocks are compiled one by one",
        "dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation",
        "dynamo_config",
    ),
    **nothing(
        LAUNCHED,
        "machine_rank main_process_ip main_process_port rdzv_backend same_network main_training_function command_file "
        "commands mpirun_config num_cpu_threads_per_process",
    ),
    **nothing("CUDA_VISIBLE_DEVICES chooses among the GPUs", "gpu_ids"),
    **nothing("where the job runs", "compute_environment"),
    **nothing("for TPUs and clouds", "tpu_env tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm downcast_bf16"),
    **nothing(
        "for TPUs and clouds",
        "additional_args base_job_name ec2_instance_type iam_role_name image_uri profile py_version pytorch_version "
        "region sagemaker_inputs_file sagemaker_metrics_file transformers_version",
    ),
    **nothing("processes are bound to the cores next to their GPU by srun: slurm.cpu_bind", "enable_cpu_affinity"),
    **nothing("shoal checks collectives by itself", "debug"),
    "use_cpu": _use_cpu,
    **cannot("train.precision: fp8 has no options", "fp8_config", unless=({},)),
    **cannot("Megatron-LM is not used; parallel.tp and parallel.pp", "megatron_lm_config", unless=({},)),
}

ACCELERATE = System(
    "an Accelerate config",
    KEYS,
    marks=frozenset(
        {"distributed_type", "compute_environment", "num_machines", "num_processes", "machine_rank", "mixed_precision"}
        | {"main_training_function", "parallelism_config"}
    ),
    defaults={"mixed_precision": "no"},
    auto="auto: the value of the Trainer's arguments",
)

"""Where and beside what training runs: `parallel`, `hardware`, `checkpoint`, `log` and `slurm`."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import Field, Strict, model_validator

from shoal.catalogue.gpus import find_gpu, find_link
from shoal.config.schema_base import Block, Count, CountOrZero, Positive, Texts, contradiction, spelled
from shoal.mistakes import UserMistake

Strategy = Annotated[
    Literal["auto", "single", "ddp", "fsdp", "zero1", "zero2", "zero3"],
    spelled(
        ("auto", "single", "ddp", "fsdp", "zero1", "zero2", "zero3"),
        {"fsdp2": "fsdp", "zero_1": "zero1", "zero_2": "zero2", "zero_3": "zero3"},
    ),
]
Sharding = Annotated[
    Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"],
    spelled(("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")),
]
PipelineSchedule = Annotated[
    Literal["1f1b", "interleaved", "zero-bubble"],
    spelled(
        ("1f1b", "interleaved", "zero-bubble"),
        {"interleaved1f1b": "interleaved", "zerobubble": "zero-bubble", "zbvzerobubble": "zero-bubble"},
    ),
]


class WrapConfig(Block):
    """Which modules are gathered and freed as one."""

    min_params: Count | None = Field(None, description="Wrap every module with at least so many parameters.")
    classes: Texts = Field((), description="Wrap every module of these classes.")

    @model_validator(mode="after")
    def _one_rule(self) -> "WrapConfig":
        if (self.min_params is None) == (not self.classes):
            raise contradiction("parallel.wrap takes either min_params or classes.", "classes", "min_params")
        return self


class OffloadConfig(Block):
    """Where the optimizer's state lives when it is not on the device."""

    optimizer: Literal["cpu", "nvme"] = Field("cpu", description="Main memory, or a fast disk.")
    path: str | None = Field(None, description="Folder on the fast disk.")

    @model_validator(mode="after")
    def _disk_needs_a_folder(self) -> "OffloadConfig":
        if self.optimizer == "nvme" and self.path is None:
            raise contradiction("parallel.offload to nvme needs path, a folder on the disk.", "optimizer")
        if self.optimizer == "cpu" and self.path is not None:
            raise contradiction("parallel.offload to cpu has no path: give optimizer nvme, or leave path out.", "path")
        return self


class ParallelConfig(Block):
    """How the work is divided over devices."""

    strategy: Strategy = Field("auto", description="How data parallelism is done; auto chooses from what fits.")
    sharding: Sharding = Field(
        "full_shard", description="What fsdp shards: everything, all but the weights in use, within a node, nothing."
    )
    replicate: Count | Literal["auto"] = Field("auto", description="Replicas under hybrid_shard; auto: one a node.")
    tp: Count = Field(1, description="Devices that share each layer (tensor parallel).")
    pp: Count = Field(1, description="Devices that each hold a run of layers (pipeline parallel).")
    pp_schedule: PipelineSchedule = Field("1f1b", description="The order of the pipeline's passes.")
    cp: Count = Field(1, description="Devices that share each sequence (context parallel).")
    cp_method: Literal["gather", "ulysses"] = Field("gather", description="How context parallel attention exchanges.")
    wrap: Literal["auto"] | WrapConfig = Field(
        "auto", description="What fsdp gathers as one, of what lies between embedding and head; auto: each block."
    )
    prefetch: CountOrZero = Field(
        1,
        description="Blocks gathered ahead of use, which is also the limit on gathers in flight; 0: none ahead in the "
        "forward pass, and one in the backward pass, which FSDP2 always does.",
    )
    reshard: Literal["auto"] | bool | Annotated[int, Ge(2)] = Field(
        "auto", description="Whether fsdp frees weights after the forward pass; a number: keep them sharded that wide."
    )
    offload: Literal["none", "cpu", "optimizer"] | OffloadConfig = Field(
        "none", description="What lives outside the device: nothing, all that is sharded, or the optimizer's state."
    )
    compress: Literal["none", "bf16", "fp16", "powersgd"] = Field(
        "none", description="How ddp shrinks gradients on the wire; lossy."
    )
    engine: Literal["native", "deepspeed"] = Field("native", description="Who carries the strategy out.")

    @model_validator(mode="after")
    def _single_has_one_device(self) -> "ParallelConfig":
        for key in ("tp", "pp", "cp"):
            if self.strategy == "single" and getattr(self, key) > 1:
                raise contradiction(f"parallel.{key} above 1 contradicts parallel.strategy single.", key, "strategy")
        return self


class GpuConfig(Block):
    """A device that the catalogue does not have, or has otherwise."""

    like: str = Field("a100-80gb", description="The device of the catalogue that it is most like.")
    memory_gib: Positive | None = Field(None, description="GiB of its memory; null: as the other's.")
    gb_per_second: Positive | None = Field(None, description="GB a second of its memory; null: as the other's.")
    tflops: Positive | None = Field(None, description="Dense 16-bit TFLOP/s at their peak; null: as the other's.")

    @model_validator(mode="after")
    def _known(self) -> "GpuConfig":
        try:
            find_gpu(self.like)
        except UserMistake as mistake:
            raise contradiction(str(mistake), "like") from None
        return self


class LinkConfig(Block):
    """A connection that the catalogue does not have."""

    gb_per_second: Positive = Field(50.0, description="GB a second in each direction, for each device.")
    latency_us: Positive = Field(10.0, description="Microseconds that a small message takes.")


class HardwareConfig(Block):
    """What the run has, or is planned for."""

    devices: Count | Literal["auto"] = Field("auto", description="Devices in each node; auto: those that are there.")
    nodes: Count = Field(1, description="Machines.")
    gpu: str | GpuConfig = Field("auto", description="Kind of device to plan for; auto: the one that is there.")
    link: str | LinkConfig = Field(
        "auto", description="Connection in a machine to plan for; auto: what the device usually has."
    )
    network: str | LinkConfig = Field(
        "auto", description="Connection between machines to plan for; auto: what such devices usually have."
    )
    host_gib: Positive | None = Field(None, description="GiB of main memory of a machine, to plan for; null: unknown.")
    price: Positive | None = Field(None, description="What an hour of one device costs, to plan for.")

    @model_validator(mode="after")
    def _names_are_known(self) -> "HardwareConfig":
        named = (("gpu", self.gpu, find_gpu), ("link", self.link, find_link), ("network", self.network, find_link))
        for key, name, find in named:
            if isinstance(name, str) and name != "auto":
                try:
                    find(name)
                except UserMistake as mistake:
                    raise contradiction(str(mistake), key) from None
        return self


class CheckpointConfig(Block):
    """When the run is saved, and what is kept."""

    every: Count = Field(200, description="Steps between checkpoints.")
    at_end: bool = Field(True, description="Save after the last step; false: for runs that only measure something.")
    keep: Count = Field(2, description="Newest checkpoints that are kept.")
    keep_best: CountOrZero = Field(3, description="Best checkpoints that are kept besides.")
    keep_every: Count | None = Field(None, description="Checkpoints of every so many steps are kept for ever.")
    metric: Literal["eval_loss", "loss"] = Field("eval_loss", description="What best means: the lowest of this.")
    format: Literal["sharded", "full"] = Field(
        "sharded", description="sharded: each process writes its own part; full: one process writes it all."
    )
    async_: bool = Field(
        True, alias="async", description="Write while training goes on, from a copy in the host's memory."
    )
    fallback: str | None = Field(
        None, description="Folder to save under (in FOLDER/NAME) when the run's own is full or gone."
    )


class LogConfig(Block):
    """What is reported while training."""

    every: Count = Field(10, description="Steps between reports.")
    to: Annotated[tuple[Literal["tensorboard", "csv", "wandb", "mlflow"], ...], Strict(False)] = Field(
        ("tensorboard",), description="Where metrics go besides metrics.jsonl, which is always written."
    )


class SlurmConfig(Block):
    """What `shoal submit` asks the cluster for."""

    partition: str | None = Field(None, description="Partition to submit to; null: the cluster's default.")
    account: str | None = Field(None, description="Account that pays.")
    qos: str | None = Field(None, description="Quality of service.")
    time: str = Field("02:00:00", description="Longest wall time, as Slurm writes it.")
    cpus_per_task: Count = Field(8, description="CPU cores for each device.")
    mem: str | None = Field(None, description="Memory for each node, as Slurm writes it (64G).")
    setup: Texts = Field((), description="Shell lines run before training, such as module load.")
    container: str | None = Field(None, description="Container image to run in.")
    extra: Texts = Field((), description="Further lines for sbatch, as they are.")

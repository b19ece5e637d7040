"""The blocks `parallel`, `checkpoint` and `log`."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field, Strict, model_validator

from shoal.catalogue.strategies import ALIASES, SHARDINGS, STRATEGIES
from shoal.config.schema_base import (
    MOST_IN_SIZE,
    Block,
    Count,
    CountOrZero,
    Degree,
    Size,
    Texts,
    contradiction,
    spelled,
)

# A type checker needs the literals; a test compares them with the table.
Strategy = Annotated[
    Literal["auto", "single", "ddp", "fsdp", "zero1", "zero2", "zero3"],
    spelled(("auto", *STRATEGIES), ALIASES),
]
Sharding = Annotated[
    Literal["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"],
    spelled(tuple(SHARDINGS)),
]
Engine = Annotated[Literal["native", "deepspeed"], spelled(("native", "deepspeed"), {"shoal": "native"})]
PipelineSchedule = Annotated[
    Literal["1f1b", "interleaved", "zero-bubble"],
    spelled(
        ("1f1b", "interleaved", "zero-bubble"),
        {"interleaved1f1b": "interleaved", "zerobubble": "zero-bubble", "zbvzerobubble": "zero-bubble"},
    ),
]


class WrapConfig(Block):
    """Which modules become FSDP units."""

    min_params: Count | None = Field(None, description="Wrap every module with at least this many parameters.")
    classes: Texts = Field((), description="Wrap every module of these classes.")

    @model_validator(mode="after")
    def _one_rule(self) -> "WrapConfig":
        if (self.min_params is None) == (not self.classes):
            raise contradiction("parallel.wrap takes either min_params or classes.", "classes", "min_params")
        return self


class OffloadConfig(Block):
    """Where the optimizer state is offloaded to and, with DeepSpeed's engine, the parameters."""

    optimizer: Literal["cpu", "nvme"] = Field("cpu", description="Host memory (cpu) or a local disk (nvme).")
    parameters: Literal["none", "cpu", "nvme"] = Field(
        "none", description="The same for the sharded parameters, with parallel.engine deepspeed."
    )
    path: str | None = Field(None, description="Folder on the disk, for nvme.")

    @property
    def places(self) -> tuple[str, str]:
        return self.optimizer, self.parameters

    @model_validator(mode="after")
    def _disk_needs_a_folder(self) -> "OffloadConfig":
        if "nvme" in self.places and self.path is None:
            key = "optimizer" if self.optimizer == "nvme" else "parameters"
            raise contradiction("parallel.offload to nvme needs path, a folder on the disk.", key)
        if "nvme" not in self.places and self.path is not None:
            raise contradiction("parallel.offload to cpu has no path: give optimizer nvme, or leave path out.", "path")
        return self


class ParallelConfig(Block):
    """Parallelism: how the model and the data are distributed over devices."""

    strategy: Strategy = Field("auto", description="Data-parallel strategy; auto: the fastest that fits in memory.")
    sharding: Sharding = Field(
        "full_shard",
        description="FSDP sharding strategy: weights, gradients and optimizer state; all but the weights in use; "
        "all, within a node; nothing. Set without a strategy, it means strategy fsdp.",
    )
    replicate: Size | Literal["auto"] = Field("auto", description="Replicas under hybrid_shard; auto: one per node.")
    tp: Degree = Field(1, description="Tensor-parallel degree: devices that share each layer.")
    pp: Degree = Field(1, description="Pipeline-parallel degree: devices that each hold a range of layers.")
    sequence_parallel: bool = Field(
        True,
        description="Whether tensor-parallel ranks also share the tokens of norms and residual stream; false: each has "
        "all of them, and all-reduces (Megatron before 2022).",
    )
    pp_schedule: PipelineSchedule = Field("1f1b", description="Pipeline schedule.")
    pp_stages: Literal["auto"] | Count = Field(
        "auto", description="Pipeline stages per rank; auto: 1 with 1f1b, 2 with the other schedules."
    )
    optimizer_ranks: Literal["auto"] | Count = Field(
        "auto",
        description="Ranks that zero1 shards the optimizer state over, replicated beyond; auto: all. As many as a node "
        "has devices: updated weights are all-gathered within each node.",
    )
    cp: Degree = Field(1, description="Context-parallel degree: devices that share each sequence.")
    cp_method: Literal["gather", "ulysses"] = Field(
        "gather",
        description="Context-parallel attention: all-gather of keys and values, or all-to-all over heads.",
    )
    wrap: Literal["auto"] | WrapConfig = Field(
        "auto", description="FSDP units between embedding and head; auto: each transformer layer."
    )
    prefetch: CountOrZero = Field(
        1,
        description="FSDP units to all-gather ahead of use, also the limit on all-gathers in flight; 0: none ahead in "
        "the forward pass, and one in the backward pass, as FSDP2 always does.",
    )
    reshard: Literal["auto"] | bool | Annotated[int, Ge(2), Le(MOST_IN_SIZE)] = Field(
        "auto",
        description="Whether FSDP reshards weights after the forward pass; a number: reshard to groups of this size.",
    )
    offload: Literal["none", "cpu", "optimizer"] | OffloadConfig = Field(
        "none",
        description="What is offloaded to host memory: nothing, all sharded state (cpu), or the optimizer state.",
    )
    compress: Literal["none", "bf16", "fp16", "powersgd"] = Field(
        "none", description="DDP gradient compression; lossy."
    )
    engine: Engine = Field(
        "native",
        description="Implementation of the strategy: PyTorch's DDP and FSDP2 (native, or shoal), or DeepSpeed's ZeRO 0 "
        "to 3 for ddp, zero1, zero2 and zero3 or fsdp.",
    )

    @model_validator(mode="before")
    @classmethod
    def _sharding_means_fsdp(cls, given: Any) -> Any:
        """Who sets what FSDP shards, and no strategy, means FSDP."""
        if isinstance(given, dict) and given.get("sharding") is not None and "strategy" not in given:
            return {**given, "strategy": "fsdp"}
        return given

    @model_validator(mode="after")
    def _single_has_one_device(self) -> "ParallelConfig":
        for key in ("tp", "pp", "cp"):
            if self.strategy == "single" and getattr(self, key) > 1:
                raise contradiction(f"parallel.{key} above 1 contradicts parallel.strategy single.", key, "strategy")
        return self


class CheckpointConfig(Block):
    """When checkpoints are saved and which are kept."""

    every: Count | Literal["auto"] = Field(
        200,
        description="Steps between checkpoints; auto: the interval that loses least time to interruptions and saves, "
        "by hardware.mtbf_hours and the time of a step and of a save.",
    )
    at_end: bool = Field(True, description="Save a checkpoint after the last step; false: for benchmarks.")
    keep: Count = Field(2, description="Number of newest checkpoints to keep.")
    keep_best: CountOrZero = Field(3, description="Number of best checkpoints to keep in addition.")
    keep_every: Count | None = Field(
        None, description="Keep the checkpoints at multiples of this many steps permanently."
    )
    metric: Literal["eval_loss", "loss"] = Field("eval_loss", description="Metric of keep_best; lower is better.")
    format: Literal["sharded", "full"] = Field(
        "sharded", description="sharded: each rank writes its own shards; full: one rank writes everything."
    )
    async_: bool = Field(
        True, alias="async", description="Checkpoints are written asynchronously, from a copy in host memory."
    )
    fallback: str | None = Field(
        None, description="Folder for checkpoints (in FOLDER/NAME) when the disk of the run directory is full or gone."
    )


class WandbConfig(Block):
    """Weights & Biases, of which what is null here comes from its own environment variables."""

    project: str | None = Field(None, description="Project; null: WANDB_PROJECT, or shoal.")
    entity: str | None = Field(None, description="User or team; null: WANDB_ENTITY, or the account's own.")
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline: written to RUN/logs/wandb, for wandb sync; null: WANDB_MODE, or online."
    )


class MlflowConfig(Block):
    """MLflow. Runs go to the store of MLFLOW_TRACKING_URI; without it, to the database mlflow.db beside the runs."""

    experiment: str | None = Field(None, description="Experiment; null: MLFLOW_EXPERIMENT_NAME, or shoal.")


class LogConfig(Block):
    """Logging during training."""

    every: Count = Field(10, description="Steps between log lines.")
    to: Annotated[tuple[Literal["tensorboard", "csv", "wandb", "mlflow"], ...], Strict(False)] = Field(
        ("tensorboard",), description="Additional loggers; metrics.jsonl is always written."
    )
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Of log.to wandb.")
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig, description="Of log.to mlflow.")
    level: Literal["debug", "info", "warning"] = Field(
        "info", description="Least level of what is printed, and of the records in RUN/logs."
    )

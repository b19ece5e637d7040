"""The complete config. Its blocks are defined in the other schema_*.py files and exported from here."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from annotated_types import Ge, Le
from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from shoal.config.schema_base import Block, Texts, contradiction
from shoal.config.schema_data import DataBlockConfig, DataConfig, MixingConfig, StreamingConfig
from shoal.config.schema_hardware import GpuConfig, HardwareConfig, LinkConfig
from shoal.config.schema_model import AdapterConfig, ModelConfig, ShapeConfig
from shoal.config.schema_run import (
    CheckpointConfig,
    LogConfig,
    OffloadConfig,
    ParallelConfig,
    WrapConfig,
)
from shoal.config.schema_slurm import SlurmConfig
from shoal.config.schema_train import (
    EarlyStopConfig,
    EvalConfig,
    OptimizerConfig,
    PreferenceConfig,
    RecomputeConfig,
    ScheduleConfig,
    SpikeConfig,
    TrainConfig,
)

__all__ = [
    "AdapterConfig",
    "Block",
    "CheckpointConfig",
    "Config",
    "DataBlockConfig",
    "DataConfig",
    "EarlyStopConfig",
    "EvalConfig",
    "GpuConfig",
    "HardwareConfig",
    "LinkConfig",
    "LogConfig",
    "MixingConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PreferenceConfig",
    "RecomputeConfig",
    "ScheduleConfig",
    "ShapeConfig",
    "SlurmConfig",
    "SpikeConfig",
    "StreamingConfig",
    "TrainConfig",
    "WrapConfig",
    "blocks_in",
    "every_key",
    "key_name",
]


class Config(Block):
    """The complete description of a run."""

    name: str = Field("run", description="Name of the run; its directory is RUN_DIR/NAME.")
    run_dir: str = Field("runs", description="The folder for runs, such as one on a scratch disk.")
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = Field(1234, description="Random seed of the run.")
    include: Texts = Field(
        (), description="YAML files that this one overrides, relative to it; later ones take precedence."
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model is trained.")
    adapter: AdapterConfig = Field(
        default_factory=AdapterConfig, description="Low-rank adapters on a frozen model (LoRA and its variants)."
    )
    data: DataConfig = Field(default_factory=DataConfig, description="What the model is trained on.")
    train: TrainConfig = Field(
        default_factory=TrainConfig, description="Length, batch size, optimizer and precision of training."
    )
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Evaluation during training.")
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig,
        description="Parallelism: how the model and the data are distributed over devices.",
    )
    hardware: HardwareConfig = Field(
        default_factory=HardwareConfig, description="The hardware of the run, or the hardware to plan for."
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="When checkpoints are saved and which are kept."
    )
    log: LogConfig = Field(default_factory=LogConfig, description="Logging during training.")
    slurm: SlurmConfig = Field(default_factory=SlurmConfig, description="What shoal submit requests from the cluster.")

    @field_validator("name")
    @classmethod
    def _names_one_folder(cls, name: str) -> str:
        # The name becomes a folder under runs/: a slash or a leading dot would put the run somewhere else.
        if not re.fullmatch(r"\w[\w.+-]*", name):
            plain = re.sub(r"[^\w.+-]+", "-", name).strip(".+-")
            hint = f", as in {plain}" if plain else ""
            raise PydanticCustomError("unfit", f"made of letters, digits, and . _ + - after the first{hint}")
        return name

    @model_validator(mode="after")
    def _has_a_model(self, info: ValidationInfo) -> "Config":
        # Not in ModelConfig, whose defaults must be valid for a config without the block.
        needed = info.context is None or info.context.get("needs_model", True)
        if needed and self.model.from_ is None and self.model.shape is None:
            raise contradiction(
                "model.from or model.shape must be given: from loads weights, shape initializes random ones."
            )
        return self

    @model_validator(mode="after")
    def _single_runs_on_one_device(self) -> "Config":
        for key in ("devices", "nodes"):
            wanted = getattr(self.hardware, key)
            if self.parallel.strategy == "single" and wanted not in ("auto", 1):
                raise contradiction(
                    f"hardware.{key} {wanted} contradicts parallel.strategy single, which uses one device.",
                    f"hardware.{key}",
                    "parallel.strategy",
                )
        return self


def key_name(attribute: str, field: FieldInfo) -> str:
    """The YAML key of an attribute: `from` for `from_`."""
    return field.alias or attribute


def blocks_in(annotation: Any) -> Iterator[type[Block]]:
    """The blocks a value of this type may be, inside unions and lists too."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    for inner in get_args(annotation):
        yield from blocks_in(inner)


def every_key(block: type[Block] = Config, above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Each key of the config as `train.lr`, with its type, default and description; a block before its keys."""
    for attribute, field in block.model_fields.items():
        dotted = above + key_name(attribute, field)
        yield dotted, field
        for inner in blocks_in(field.annotation):
            yield from every_key(inner, f"{dotted}.")

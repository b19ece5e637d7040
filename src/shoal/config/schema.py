"""The config as a whole. Its blocks are in the schema_*.py files beside this one, and are exported from here."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from annotated_types import Ge, Le
from pydantic import Field, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from shoal.config.schema_base import Block, Texts, contradiction
from shoal.config.schema_model import (
    AdapterConfig,
    DataBlockConfig,
    DataConfig,
    ModelConfig,
    ShapeConfig,
    StreamingConfig,
)
from shoal.config.schema_run import (
    CheckpointConfig,
    GpuConfig,
    HardwareConfig,
    LinkConfig,
    LogConfig,
    OffloadConfig,
    ParallelConfig,
    SlurmConfig,
    WrapConfig,
)
from shoal.config.schema_train import (
    EarlyStopConfig,
    EvalConfig,
    OptimizerConfig,
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
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
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
    """The only description of a run."""

    name: str = Field("run", description="Name of the run; it lives in runs/NAME.")
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = Field(1234, description="Where all randomness of the run starts.")
    include: Texts = Field((), description="Other YAML files that lie under this one, relative to it; later ones win.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="Which model is trained.")
    adapter: AdapterConfig = Field(
        default_factory=AdapterConfig, description="Small trained additions to a frozen model (LoRA and its kin)."
    )
    data: DataConfig = Field(default_factory=DataConfig, description="What the model is trained on.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="How long, how large, how fast, how exactly.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="When and how much is evaluated while training.")
    parallel: ParallelConfig = Field(
        default_factory=ParallelConfig, description="How the work is divided over devices."
    )
    hardware: HardwareConfig = Field(default_factory=HardwareConfig, description="What the run has, or is planned for.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="When the run is saved, and what is kept."
    )
    log: LogConfig = Field(default_factory=LogConfig, description="What is reported while training.")
    slurm: SlurmConfig = Field(default_factory=SlurmConfig, description="What shoal submit asks the cluster for.")

    @field_validator("name")
    @classmethod
    def _names_one_folder(cls, name: str) -> str:
        # The name becomes a folder under runs/: a slash or a leading dot would put the run somewhere else.
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise PydanticCustomError("unfit", "made of letters, digits, and . _ + - after the first")
        return name

    @model_validator(mode="after")
    def _has_a_model(self) -> "Config":
        # Here and not in ModelConfig, whose defaults must stand on their own for a config without the block.
        if self.model.from_ is None and self.model.shape is None:
            raise contradiction(
                "model.from or model.shape must be given: from starts from weights, shape from random ones."
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

"""The block `slurm`: what `shoal submit` requests from a cluster, and how a job begins there."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from shoal.config.schema_base import Block, Count, Texts, contradiction, spelled

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<fields>\d+(?::\d+){0,2})")
_NO_LIMIT = ("infinite", "unlimited")
_MEMORY = re.compile(r"\d+[KMGTkmgt]?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MINUTE, HOUR, DAY = 60, 3600, 86400


def _as_text(value: Any) -> Any:
    # `time: 90`, `mem: 0` and `NCCL_IB_DISABLE: 1` are numbers in YAML.
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_as_text)]


class SlurmConfig(Block):
    """What `shoal submit` requests from the cluster, and how the job begins there."""

    partition: str | None = Field(None, description="Partition to submit to; null: the cluster's default.")
    account: str | None = Field(None, description="Account to charge.")
    qos: str | None = Field(None, description="Quality of service.")
    constraint: str | None = Field(None, description="Features that the nodes must have, in Slurm's notation (a100).")
    time: Text = Field("02:00:00", description="Time limit, in Slurm's notation: MINUTES, H:M:S or DAYS-H:M:S.")
    signal: Count = Field(
        120, description="Seconds before the time limit at which the run is asked to save a checkpoint and stop."
    )
    requeue: bool = Field(
        True, description="Put the job back into the queue when it was stopped or preempted; it then resumes."
    )
    gpu_type: str | None = Field(
        None, description="Type of the GPUs, as the cluster calls it (--gpus-per-node TYPE:N)."
    )
    cpus_per_task: Count = Field(8, description="CPU cores per device.")
    mem: Text | None = Field(
        None, description="Memory per node, in Slurm's notation (64G); null: the cluster's default."
    )
    cpu_bind: str | None = Field(
        None, description="Binding of processes to cores (srun --cpu-bind), such as cores; null: the cluster's default."
    )
    setup: Texts = Field((), description="Shell lines run on the first node before training, such as module load.")
    env: dict[str, Text] = Field(
        default_factory=dict, description="Environment variables of the job, such as NCCL_SOCKET_IFNAME: ib0."
    )
    python: str | None = Field(
        None, description="Python of the job; null: the one that runs shoal submit, or python in a container."
    )
    container: str | None = Field(None, description="Container image to run in: a file, or a name in a registry.")
    container_runtime: Annotated[
        Literal["auto", "apptainer", "pyxis"],
        spelled(("auto", "apptainer", "pyxis"), {"singularity": "apptainer", "enroot": "pyxis"}),
    ] = Field("auto", description="What runs the container; auto: pyxis for a .sqsh file, else apptainer.")
    container_mounts: Texts = Field(
        (), description="Folders to mount in the container, as SOURCE:TARGET, besides the working and the run folder."
    )
    extra: Texts = Field((), description="Additional options of sbatch, verbatim, such as --exclusive.")

    @property
    def seconds(self) -> float:
        """The time limit in seconds; infinite if there is none."""
        return time_limit(self.time)

    @property
    def runtime(self) -> str | None:
        """What runs the container; None: there is no container."""
        if self.container is None or self.container_runtime != "auto":
            return None if self.container is None else self.container_runtime
        return "pyxis" if self.container.endswith(".sqsh") else "apptainer"

    @field_validator("time")
    @classmethod
    def _is_a_time(cls, time: str) -> str:
        if read_time(time) is None:
            raise PydanticCustomError(
                "unfit", "a time in Slurm's notation, such as 90 (minutes), 02:00:00 or 1-12:00:00"
            )
        return time

    @field_validator("mem")
    @classmethod
    def _is_a_size(cls, mem: str | None) -> str | None:
        if mem is not None and not _MEMORY.fullmatch(mem):
            raise PydanticCustomError("unfit", "a size in Slurm's notation, such as 64G")
        return mem

    @field_validator("env")
    @classmethod
    def _are_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not _VARIABLE.fullmatch(name):
                raise PydanticCustomError("unfit", "a mapping of names of environment variables to values")
        return env

    @field_validator("partition", "account", "qos", "constraint", "gpu_type", "cpu_bind", "python", "container")
    @classmethod
    def _fits_a_line(cls, text: str | None) -> str | None:
        # In an option, a line break would begin another line of the script.
        if text is not None and (not text.strip() or not text.isprintable()):
            raise PydanticCustomError("unfit", "printable text in one line")
        return text

    @model_validator(mode="after")
    def _has_time_to_save(self) -> "SlurmConfig":
        if self.seconds <= self.signal:
            raise contradiction(
                f"slurm.time {self.time} is too short: the run is asked to save slurm.signal {self.signal} seconds "
                "before the limit, which is before it starts; raise slurm.time or lower slurm.signal.",
                "time",
                "signal",
            )
        return self


def time_limit(time: str) -> float:
    """Seconds of a time limit in Slurm's notation; infinite if there is none."""
    seconds = read_time(time)
    assert seconds is not None, "the schema demands it"
    return seconds


def read_time(time: str) -> float | None:
    """The same; None if it is not in that notation: MINUTES[:SECONDS], H:M:S, DAYS-H[:M[:S]]."""
    if time.lower() in _NO_LIMIT:
        return float("inf")
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    fields = [int(field) for field in match["fields"].split(":")]
    if match["days"] is not None or len(fields) == 3:
        hours, minutes, seconds = [*fields, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*fields, 0][:2]
    return int(match["days"] or 0) * DAY + hours * HOUR + minutes * MINUTE + seconds

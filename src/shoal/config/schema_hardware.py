"""The block `hardware`."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from shoal.catalogue.gpus import find_gpu, find_link
from shoal.config.schema_base import Block, Count, Quantity, Size, contradiction
from shoal.mistakes import UserMistake


class GpuConfig(Block):
    """A device that is not in the catalogue, or differs from its entry."""

    like: str = Field("a100-80gb", description="The most similar device in the catalogue.")
    memory_gib: Quantity | None = Field(None, description="Memory in GiB; null: as that device.")
    gb_per_second: Quantity | None = Field(None, description="Memory bandwidth in GB/s; null: as that device.")
    tflops: Quantity | None = Field(None, description="Peak dense 16-bit TFLOP/s; null: as that device.")
    name: str | None = Field(
        None,
        description="Name that the driver prints. Training takes this block for the devices of that name; null: it is "
        "for planning only.",
    )
    matmul_tflops: Quantity | None = Field(
        None,
        description="TFLOP/s that large 16-bit matmuls reach, as shoal bench hardware measures them, like the next "
        "four keys; null: the share of the peak that such devices reach.",
    )
    fp32_matmul_tflops: Quantity | None = Field(None, description="The same in fp32.")
    fp8_matmul_tflops: Quantity | None = Field(None, description="The same in fp8.")
    attention_tflops: Quantity | None = Field(
        None, description="TFLOP/s of causal attention over long sequences in 16 bits, both passes."
    )
    copy_gb_per_second: Quantity | None = Field(
        None, description="GB/s that a copy of a large tensor reads and writes together."
    )
    multiprocessors: Count | None = Field(None, description="Number of multiprocessors; null: as that device.")
    compute_capability: str | None = Field(
        None, pattern=r"^\d+\.\d+$", description="Compute capability, such as '9.0'; null: as that device."
    )

    @field_validator("compute_capability", mode="before")
    @classmethod
    def _a_number_is_one(cls, capability: Any) -> Any:
        return str(capability) if isinstance(capability, float) else capability  # 9.0, which YAML reads as a number

    @model_validator(mode="after")
    def _known(self) -> "GpuConfig":
        try:
            find_gpu(self.like)
        except UserMistake as mistake:
            raise contradiction(str(mistake), "like") from None
        return self


class LinkConfig(Block):
    """An interconnect that is not in the catalogue."""

    gb_per_second: Quantity = Field(50.0, description="Bandwidth per device and direction in GB/s.")
    latency_us: Quantity = Field(10.0, description="Latency of a small message in microseconds.")
    measured: bool = Field(
        False,
        description="gb_per_second is what collectives reach (their bus bandwidth), as shoal bench hardware measures "
        "it within a node, not what the link is sold with.",
    )


class HardwareConfig(Block):
    """The hardware of the run, or the hardware to plan for."""

    devices: Size | Literal["auto"] = Field("auto", description="Devices per node; auto: all that are present.")
    nodes: Size = Field(1, description="Number of nodes.")
    gpu: str | GpuConfig = Field("auto", description="Device to plan for; auto: the one that is present.")
    link: str | LinkConfig = Field(
        "auto", description="Interconnect within a node to plan for; auto: the usual one of the device."
    )
    network: str | LinkConfig = Field(
        "auto", description="Network between nodes to plan for; auto: the usual one of the device."
    )
    host_gib: Quantity | None = Field(None, description="Host memory per node in GiB to plan for; null: unknown.")
    host_block_ms: Quantity | None = Field(
        None,
        description="Milliseconds that the host takes to launch the kernels of an uncompiled Llama block, forward and "
        "backward, as shoal bench hardware measures it; null: 2, and 3.5 or more with a Grace.",
    )
    price: Quantity | None = Field(None, description="Price per device-hour, to plan for.")
    mtbf_hours: Quantity | None = Field(
        None,
        description="Mean device-hours between unexpected interruptions of a run (MTBF of a device); null: 50,677, as "
        "published of Llama 3.",
    )
    restart_minutes: Quantity | None = Field(
        None, description="Minutes from an interruption until the last checkpoint is loaded again; null: 15."
    )
    disk_gb_per_second: Quantity | None = Field(
        None, description="Speed at which a node writes checkpoints, in GB/s; null: 1."
    )

    @property
    def gpu_name(self) -> str | None:
        """The device's name: of the catalogue, or as its driver prints it; None: not set."""
        return (isinstance(self.gpu, GpuConfig) and self.gpu.name) or self.like

    @property
    def like(self) -> str | None:
        """The device of the catalogue that it is, or is like; None: not set."""
        if isinstance(self.gpu, GpuConfig):
            return self.gpu.like
        return None if self.gpu == "auto" else self.gpu

    @property
    def is_cpu(self) -> bool:
        """Whether the device is set to be a CPU."""
        return self.like == "cpu"

    @field_validator("gpu", mode="before")
    @classmethod
    def _a_number_is_a_name(cls, gpu: Any) -> Any:
        return str(gpu) if type(gpu) is int else gpu  # 4090, which YAML reads as a number; rtx4090 is then suggested

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

"""One run as arithmetic sees it: everything that memory and time depend on, and nothing else."""

from dataclasses import dataclass, replace

from shoal.catalogue.gpus import Gpu, Link
from shoal.catalogue.shapes import ModelShape
from shoal.config.mesh import Mesh
from shoal.plan.systems import OURS, SystemTraits

ONE = Mesh()
SHARDED = ("fsdp", "zero2", "zero3")  # the strategies that FSDP2 carries out


@dataclass(frozen=True)
class Adapter:
    """Small trained matrices beside frozen ones."""

    rank: int
    targets: tuple[str, ...]  # names of linear layers of a block, as `blocks.linears` calls them
    quantize: str | None = None  # nf4, fp4, int8: how the frozen matrices are stored
    double_quantized: bool = False  # the scales of the 4-bit blocks are themselves stored in 8 bits
    dora: bool = False
    dropout: bool = False  # of their inputs


@dataclass(frozen=True)
class Trained:
    """Shares of the model's own parameters that are trained."""

    embedding: float = 1.0
    blocks: float = 1.0
    head: float = 1.0


FROZEN = Trained(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Run:
    """A training run. Defaults are those of the config."""

    shape: ModelShape
    gpu: Gpu
    link: Link  # between the devices of a node
    network: Link  # between nodes, for each device
    length: int
    mesh: Mesh = ONE
    devices: int = 1  # in each node
    strategy: str = "single"
    micro_batch: int = 1
    grad_accum_steps: int = 1
    precision: str = "bf16-mixed"
    reduce_bytes: int = 4
    optimizer: str = "adamw"
    momentum: bool = True  # sgd may have none
    clips: bool = True
    recompute: str | int = "none"  # none, cheap, selective, full; a number: every so many-th block
    compiled: bool = True
    loss: str = "chunked"  # plain, chunked, fused
    attention: str = "flash"  # eager: scores are stored
    packed: bool = False  # rows hold several documents, whose mask is stored
    dropout: bool = False
    reshard: bool | int = True
    prefetch: int = 1
    offload: str = "none"  # cpu, optimizer, nvme
    compress_bytes: int = 0  # ddp: bytes of a gradient on the wire, where they are shrunk
    schedule: str = "1f1b"
    cp_method: str = "gather"
    adapter: Adapter | None = None
    trained: Trained = Trained()
    # Bytes of a gradient in the replicated layouts; 0: those of the weight.
    gradient_bytes: int = 0
    async_checkpoint: bool = False
    traits: SystemTraits = OURS

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.devices)

    @property
    def mixed(self) -> bool:
        """Whether what is trained and what is computed with are different numbers."""
        return self.precision in ("bf16-mixed", "16-mixed", "fp8")

    @property
    def weight_bytes(self) -> int:
        return 2 if self.precision == "bf16-true" else 4

    @property
    def compute_bytes(self) -> int:
        return 4 if self.precision == "32-true" else 2

    @property
    def stream_bytes(self) -> int:
        """Bytes of a number between blocks."""
        return self.weight_bytes if self.traits.wide_stream else self.compute_bytes

    @property
    def forgets_cheap(self) -> bool:
        """Whether compiled blocks make again, out of what they keep, what the compiler would keep for convenience."""
        return self.compiled and self.recompute != "none" and self.traits.forgets_cheap

    @property
    def repeats_forward(self) -> bool:
        """Whether whole blocks are computed again in the backward pass."""
        return self.recompute == "full" or isinstance(self.recompute, int)

    @property
    def sharded(self) -> bool:
        return self.strategy in SHARDED

    @property
    def shards(self) -> int:
        """Ranks over which FSDP shards."""
        return self.mesh.dp_shard * self.mesh.cp if self.sharded else 1

    @property
    def replicas(self) -> int:
        """Ranks that have the same weights and average their gradients, whatever shards them."""
        return self.mesh.dp_replicate if self.sharded else self.mesh.dp_replicate * self.mesh.dp_shard * self.mesh.cp

    @property
    def keeps_weights(self) -> bool:
        """Whether gathered weights stay from the forward to the backward pass."""
        return self.reshard is False or self.mesh.pp > 1 or self.strategy == "zero2"

    @property
    def ends_apart(self) -> bool:
        """Whether embedding and head are gathered each for itself. A weight that they share is held for the pass, and
        so is a head that is more than one matrix."""
        return self.traits.ends_apart and not self.shape.tied and self.shape.family != "bert"

    @property
    def tokens(self) -> int:
        """Tokens of one pass on one rank, before tensor parallelism cuts some of its tensors."""
        return self.micro_batch * self.length // self.mesh.cp

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.grad_accum_steps * self.mesh.data_parallel

    @property
    def peak(self) -> float:
        """Operations a second that the device promises for this precision, as MFU counts."""
        if self.precision == "32-true":
            return self.gpu.fp32
        return self.gpu.fp16 if self.precision == "16-mixed" else self.gpu.bf16 or self.gpu.fp16

    def with_(self, **changes: object) -> "Run":
        return replace(self, **changes)  # type: ignore[arg-type]

"""What a training run is told, and how its mesh shards and replicates it."""

from dataclasses import dataclass

from shoal.catalogue.attention import Path
from shoal.catalogue.gpus import Gpu, Link
from shoal.catalogue.shapes import ModelShape
from shoal.catalogue.strategies import Strategy, find_strategy
from shoal.config.mesh import Mesh
from shoal.plan.run.trained import EVERYTHING, Adapter, Trained
from shoal.plan.systems.modelled import OURS
from shoal.plan.systems.traits import SystemTraits

ONE = Mesh()
# The year in which Megatron began to save parts of inputs (`SystemTraits.gathers_inputs_again`).
GATHERED_AGAIN = 2022
# And in which its layers became Transformer Engine's.
ENGINE_SINCE = 2023


@dataclass(frozen=True)
class Settings:
    """The settings of a training run, with the config's defaults."""

    shape: ModelShape
    gpu: Gpu
    link: Link  # between the devices of a node
    network: Link  # between nodes, per device
    length: int
    mesh: Mesh = ONE
    devices: int = 1  # per node
    host_block_ms: float | None = None  # host time of an uncompiled Llama block; None: as is usual for such devices
    strategy: str = "single"
    micro_batch: int = 1
    grad_accum_steps: int = 1
    precision: str = "bf16-mixed"
    fp8_head: bool = False
    reduce_bytes: int = 4
    optimizer: str = "adamw"
    momentum: bool = True  # sgd may have none
    optimizer_in_backward: bool = False  # each parameter is updated and its gradient freed in the backward pass
    paged_optimizer: bool = False  # its state is in unified memory, and moved to the device by page faults
    optimizer_ranks: int = 0  # zero1: ranks that the state is sharded over, replicated beyond; 0: all
    clips: bool = True
    # none, cheap, selective, full, offload, offload-all, parts; an integer n: every n-th block
    recompute: str | int = "none"
    recomputed_parts: tuple[str, ...] = ()  # with `parts`: attention, norm, activation, mlp
    recomputed_blocks: int = 0  # with `full`: only the first this many blocks of each rank; 0: all
    compiled: bool = True
    cuda_graphs: bool | str = "auto"
    loss: str = "chunked"  # plain, chunked, fused
    attention: Path = "fused"  # of the layers with a sliding window, if any have
    attention_dropout: bool = False
    dropout: bool = False
    reshard: bool | int = True
    prefetch: int = 1
    offload: str = "none"  # cpu, optimizer, nvme
    compress_bytes: int = 0  # ddp: bytes per compressed gradient element; 0: not compressed
    schedule: str = "1f1b"
    virtual_stages: int = 0  # stages per pipeline rank; 0: as the schedule has them
    # Tensor-parallel ranks also share the tokens of norms and residual stream; else every rank has all of them.
    sequence_parallel: bool = True
    cp_method: str = "gather"
    head_share: float = 1.0  # of the tokens, those that the head computes logits of; of a classifier, one per sequence
    varied_lengths: bool = False  # sequences are padded to the longest of their micro-batch, not packed to `length`
    # Tokens of a packed document, beyond which attention does not reach; 0: not known, as if it were `length`.
    document_length: int = 0
    of_answers: bool = False  # the loss compares answers: a chunk of logits is computed in both passes
    reference_pass: bool = False  # every micro-batch also has a forward pass without the adapter and gradients
    adapter: Adapter | None = None
    trained: Trained = EVERYTHING
    # Bytes per gradient element in replicated layouts; 0: same as the weight.
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
    def repeats_forward(self) -> bool:
        """Whether blocks run their forward pass again in the backward pass."""
        return self.recompute in ("full", "offload") or isinstance(self.recompute, int)

    @property
    def repeated_share(self) -> float:
        """The share of blocks that do so."""
        if not self.repeats_forward:
            return 0.0
        if isinstance(self.recompute, int):
            return -(-self.shape.layers // self.recompute) / self.shape.layers
        return min(1.0, self.recomputed_blocks * self.mesh.pp / self.shape.layers) if self.recomputed_blocks else 1.0

    @property
    def has_engine(self) -> bool:
        """Whether layers are modules of Transformer Engine."""
        traits = self.traits
        return traits.transformer_engine and not traits.planned_memory and not 0 < traits.software < ENGINE_SINCE

    @property
    def keeps_dummies(self) -> bool:
        """Whether autograd is given tensors that stay in place of weight gradients that matmuls have added up."""
        return self.traits.dummy_gradients and self.traits.accumulates_in_matmuls and self.has_engine

    @property
    def offloads_activations(self) -> bool:
        """Whether everything that blocks save is kept in host memory, and nothing is recomputed."""
        return self.recompute == "offload-all" and not self.gpu.is_cpu

    @property
    def offloads_inputs(self) -> bool:
        """Whether the inputs of checkpointed blocks are kept in host memory. A CPU has no other."""
        return self.recompute == "offload" and not self.gpu.is_cpu

    @property
    def data_parallelism(self) -> Strategy:
        """What `strategy` shards and how it is implemented. `sharding` is in `mesh` and `reshard`."""
        return find_strategy(self.strategy)

    @property
    def sharded(self) -> bool:
        """Whether FSDP shards the weights."""
        return self.data_parallelism.fully_shard

    @property
    def gathers_weights(self) -> bool:
        """Whether weights are all-gathered to be used. DeepSpeed's ZeRO-2 and Megatron's keep all of them."""
        # On one rank ZeRO-3 has nothing to gather, unless it is on the host: NoGatherHandle in
        # deepspeed/runtime/zero/partition_parameters.py.
        if self.traits.hooks_gradients and self.shards == 1 and self.offload != "cpu":
            return False
        return self.sharded and (self.data_parallelism.shards_weights or not self.traits.masters_with_optimizer)

    @property
    def accumulates_unsharded(self) -> bool:
        """Whether FSDP holds unsharded gradients from micro-batch to micro-batch."""
        return self.sharded and self.traits.unsharded_accumulation and self.grad_accum_steps > 1

    @property
    def shards(self) -> int:
        """Number of FSDP shards."""
        return self.mesh.shards if self.sharded else 1

    @property
    def replicas(self) -> int:
        """Ranks that all-reduce the gradients of the same weights or shards."""
        return self.mesh.sharded_replicas if self.sharded else self.mesh.gradient_ranks

    @property
    def optimizer_shards(self) -> int:
        """Number of ranks that the optimizer state is sharded over."""
        if self.data_parallelism.partitions_update:
            return min(self.replicas, self.optimizer_ranks or self.replicas)
        return self.shards

    @property
    def keeps_weights(self) -> bool:
        """Whether all-gathered weights stay unsharded between forward and backward pass."""
        return self.reshard is False or self.mesh.pp > 1 or self.data_parallelism.keeps_weights

    @property
    def separate_head_unit(self) -> bool:
        """Whether embedding and head are separate FSDP units. Tied weights are one unit, and so is a head with
        more than one matrix."""
        separate = self.traits.separate_head_unit
        if separate == "trained":
            separate = self.adapter is None
        return separate and not self.shape.tied and not self.shape.traits.head_transform

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch and rank, before sequence parallelism shards some tensors."""
        return self.micro_batch * self.length // self.mesh.cp

    @property
    def head_tokens(self) -> float:
        """Of these, the ones with logits."""
        return self.tokens * self.head_share

    @property
    def stream_tokens(self) -> float:
        """Tokens of the residual stream and the norms on a rank."""
        return self.tokens / self.mesh.tp if self.sequence_parallel else float(self.tokens)

    @property
    def gathers_inputs_again(self) -> bool:
        """Whether tensor-parallel ranks save their parts of inputs, and sum the gradients of these beside matmuls."""
        early = 0 < self.traits.software < GATHERED_AGAIN
        return self.traits.gathers_inputs_again and self.mesh.tp > 1 and self.adapter is None and not early

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.grad_accum_steps * self.mesh.data_parallel

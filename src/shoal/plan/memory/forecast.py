"""Memory of one rank at several moments of a step; the peak is computed, not assumed."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from shoal.catalogue.attention import AMPERE
from shoal.plan.memory.activations import block_kept, buffer_bytes
from shoal.plan.memory.buffers import flat_gradients, gradient_bucket
from shoal.plan.memory.expandable import RECOMPUTED_SLACK, gaps_between_blocks
from shoal.plan.memory.fragmentation import fragmented, is_replayed
from shoal.plan.memory.head import LOSS_BYTES, head
from shoal.plan.memory.moments import Moment, moments, recomputation
from shoal.plan.memory.states import states, trained_parameters
from shoal.plan.memory.transient import left_by_forward
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import Rank, count, different_ranks, micro_batches_in_flight, ranks_of
from shoal.plan.run.run import Run
from shoal.plan.terms import GIB, Term, group, leaf

# Fragmentation of the caching allocator: it reserves full pages, with gaps between blocks of different sizes.
ALLOCATOR_SLACK = 0.02
# FSDP's streams and the main one do not share freed memory, and FSDP units of different sizes leave more gaps.
SHARDED_SLACK = 0.10
# Either way with expandable segments; streams still do not share freed memory.
EXPANDABLE_SLACK = 0.005
# Sequences of varied length: a longer one does not fit the blocks that shorter ones have left, which stay reserved.
# That is about this share of a plain loss's tensors (16 bytes per logit), half of it where a micro-batch has many
# sequences, of which the longest hardly varies; or this share of all that a step needs for a time:
# benchmarks/plan/allocator.py.
VARIED_LOSS_SLACK = 1.3
MANY_SEQUENCES = 16
VARIED_SLACK = 0.3
# CUDA context with loaded kernels. Before version 1.13, of the end of 2022, PyTorch loaded all kernels at once: 1,271
# MiB on a V100 and 1,573 MiB on an A100 (train/tr11-176B-ml/chronicles-prequel.md in bigscience-workshop/bigscience).
CONTEXT_GIB = 0.6
EARLY_CONTEXT_GIB = 1.3
LOADED_CONTEXT_GIB = 1.5
LAZY_LOADING = 2023
# Buffers of a communicator of NCCL: 544 to 688 MB on A100 with NVLink (NVIDIA/nccl, issue 964). They are proportional
# to its channels (issue 986), of which slower links need fewer: 24 for an A100's 300 GB/s, 12 for a V100's 150.
COMMUNICATION_GIB = 0.6
CHANNELS_FOR = 300e9


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank; the same on all data- and tensor-parallel ranks of it."""

    run: Run
    rank: Rank
    moments: tuple[Moment, ...]

    @property
    def pipeline_rank(self) -> int:
        return self.rank.pipeline_rank

    @cached_property
    def reserve(self) -> float:
        """Reserved by the allocator but unused, at the peak."""
        return _reserve(self.run, self.rank, self.moments)

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.tree.amount)

    @property
    def allocated(self) -> float:
        return self.peak.tree.amount

    @property
    def reserved(self) -> float:
        return self.allocated + self.reserve


@dataclass(frozen=True)
class Memory:
    """The memory forecast of every pipeline rank, and of the host."""

    run: Run
    context: float  # bytes on the device outside PyTorch

    @cached_property
    def pipeline_ranks(self) -> tuple[RankMemory, ...]:
        return tuple(RankMemory(self.run, rank, moments(self.run, rank)) for rank in ranks_of(self.run))

    @cached_property
    def _fullest(self) -> tuple[RankMemory, ...]:
        """Of the ranks with the same stages the first, which has the most micro-batches in flight."""
        return tuple(RankMemory(self.run, rank, moments(self.run, rank)) for rank in different_ranks(self.run))

    @cached_property
    def host(self) -> Term:
        """Bytes of host memory per rank."""
        run = self.run
        return _host(run, ranks_of(run)[0])

    @property
    def worst(self) -> RankMemory:
        if len(self._fullest) == 1:
            return self._fullest[0]
        return max(self._fullest, key=lambda pipeline_rank: pipeline_rank.reserved)

    @property
    def allocated(self) -> float:
        return max(pipeline_rank.allocated for pipeline_rank in self._fullest)

    @property
    def reserved(self) -> float:
        return self.worst.reserved

    def exceeds(self, gib: float) -> bool:
        """Whether `gib` of memory are too few even without what the allocator reserves beyond the peak."""
        return (self.allocated + self.context) / GIB > gib

    def fits(self, gib: float) -> bool:
        """Whether a device with `gib` of memory is enough, including the CUDA context."""
        if self.exceeds(gib):
            return False
        # A replay takes time, and no step leaves gaps that are larger than all that it needs for a time.
        room = gib * GIB - self.context - self.allocated
        if is_replayed(self.run) and self._needed_for_a_time < room:
            return True
        return (self.reserved + self.context) / GIB <= gib

    @property
    def _needed_for_a_time(self) -> float:
        """Bytes at the peak that are neither weights nor optimizer state, and those on FSDP's own streams again."""
        held = states(self.run, ranks_of(self.run)[0])
        side = max(moment.side for moment in self._fullest[0].moments)
        temporary = self.allocated - held.weights.amount - held.optimizer.amount
        return temporary * max(1.0, VARIED_LOSS_SLACK if self.run.varied_lengths else 0.0) + side


@lru_cache(maxsize=4096)
def forecast_memory(run: Run) -> Memory:
    """The memory of every pipeline rank of `run`."""
    return Memory(run, _context(run))


def _reserve(run: Run, rank: Rank, found: tuple[Moment, ...]) -> float:
    """Bytes that the allocator reserves beyond the peak of what is allocated."""
    if run.traits.planned_memory:
        return 0.0
    highest = max(moment.tree.amount for moment in found)
    # FSDP's own streams do not share freed memory with the main one.
    streams = run.gathers_weights or (run.traits.hooks_modules and run.data_parallelism.shards_weights)
    main = max(moment.tree.amount - moment.side for moment in found) if streams else highest
    side = max(moment.side for moment in found) if streams else 0.0
    slack, gaps = SHARDED_SLACK if streams else ALLOCATOR_SLACK, 0.0
    if is_replayed(run):
        slack = 0.0
        room = run.gpu.memory_gib * GIB - _context(run) - side
        # Varied lengths leave more. On a device that is full, segments without a block in use are returned, so that a
        # run whose tensors alone do not fit has hardly any gaps; and a replay takes time.
        if not run.varied_lengths and main <= room:
            gaps = fragmented(run, room)
    elif run.traits.expandable_segments:
        slack, gaps = EXPANDABLE_SLACK, gaps_between_blocks(run, rank, found)
    elif not run.gathers_weights:
        gaps = RECOMPUTED_SLACK * recomputation(run, rank) * (0.5 if run.offloads_inputs else 1.0)
        if max(found, key=lambda moment: moment.tree.amount).name == "loss":
            gaps = max(gaps, left_by_forward(run))
    if run.varied_lengths and not run.traits.expandable_segments:
        gaps += _left_by_shorter_sequences(run, rank, found, highest * (1 + slack) + gaps)
    solid = 0.0  # trained weights and their state, if they are one tensor each
    if run.traits.flattens_gradients:
        held = states(run, rank)
        solid = held.optimizer.amount + (held.weights.amount if run.adapter is None else 0.0)
    gaps += _beside_flat_gradients(run, rank, found)
    return max(0.0, main + (main - solid) * slack + side - highest) + gaps


def _beside_flat_gradients(run: Run, rank: Rank, found: tuple[Moment, ...]) -> float:
    """Blocks that forward and backward pass have left and that DeepSpeed's step cannot use, because its tensors are
    larger. If the device is full, the allocator frees them first."""
    traits = run.traits
    if not traits.hooks_gradients or traits.expandable_segments or run.gathers_weights:
        return 0.0
    logits = 4 * run.head_tokens * run.shape.vocab if run.loss == "plain" else 0.0
    largest = max(logits, run.tokens * run.shape.ffn * run.compute_bytes / run.mesh.tp)
    bucket = gradient_bucket(run)

    def with_bucket(moment: Moment) -> float:
        """The bucket has a segment of its own too, also at moments at which it is not in use."""
        within = any(one.name == "gradient bucket" and one.amount for one in moment.tree.leaves())
        return moment.tree.amount + (0.0 if within or bucket <= largest else bucket)

    before_step = max(with_bucket(moment) for moment in found[:-1])
    highest = max(moment.tree.amount for moment in found)
    needed = before_step + sum(size for size in flat_gradients(run, rank) if size > largest)
    room = run.gpu.memory_gib * GIB - _context(run)
    return max(0.0, min(needed, room) - highest)


def _left_by_shorter_sequences(run: Run, rank: Rank, found: tuple[Moment, ...], needed: float) -> float:
    """Blocks that the allocator keeps from shorter sequences, beyond what a step needs at its peak. If the device is
    full, it frees them first."""
    held = states(run, rank)
    lasting = held.weights.amount + held.optimizer.amount
    # The optimizer's temporaries come after the activations, and use their blocks.
    peak = max(moment.tree.amount for moment in found if moment.name != "optimizer step")
    loss = 0.0
    if rank.last and run.loss == "plain":
        loss = min(head(run).peak.amount, LOSS_BYTES * run.head_tokens * run.shape.vocab / run.mesh.tp)
    if run.micro_batch >= MANY_SEQUENCES:
        loss /= 2
    kept = max(VARIED_LOSS_SLACK * loss, VARIED_SLACK * max(0.0, peak - lasting - held.gradients.amount))
    room = run.gpu.memory_gib * GIB - _context(run) - needed
    return max(0.0, min(room, peak + kept - needed))


def _context(run: Run) -> float:
    """Bytes on the device outside PyTorch."""
    if run.gpu.is_cpu:
        return 0.0
    gib = CONTEXT_GIB
    if (run.gpu.compute_capability or AMPERE) < AMPERE:
        gib = EARLY_CONTEXT_GIB
    elif 0 < run.traits.software < LAZY_LOADING:
        gib = LOADED_CONTEXT_GIB
    channels = min(1.0, run.link.bytes_per_second / CHANNELS_FOR)
    return (gib + COMMUNICATION_GIB * channels * _communicators(run)) * GIB


def _communicators(run: Run) -> int:
    """Groups of ranks that communicate: one for each axis of the device mesh in use, and, if these are several, one
    that spans them, for norms and barriers."""
    mesh = run.mesh
    used = sum(degree > 1 for degree in (mesh.pp, mesh.dp_replicate, mesh.dp_shard, mesh.cp, mesh.tp))
    return used + (used > 1)


def _host(run: Run, rank: Rank) -> Term:
    """Host memory per rank for state that is not on its device."""
    held, counts = states(run, rank), count(run, rank)
    # Weights are loaded tensor by tensor, so loading needs memory for one of them.
    largest = max(run.shape.vocab * run.shape.hidden, *(one.parameters for one in linears(run.shape)))
    copied = 0.0
    if run.async_checkpoint:
        trained = trained_parameters(run, rank)
        copied = (counts.all * run.weight_bytes if run.adapter is None else trained * run.weight_bytes) / run.shards
        copied += held.optimizer.amount
    inputs = 0.0
    if run.offloads_inputs:
        inputs = buffer_bytes(run) * rank.blocks * micro_batches_in_flight(run, rank)
    elif run.offloads_activations:
        inputs = block_kept(run).amount * rank.blocks * micro_batches_in_flight(run, rank)
    return group(
        "host",
        leaf("tensor being loaded", largest * run.weight_bytes),
        leaf("offloaded state", held.host if run.offload != "nvme" else 0.0),
        leaf("offloaded activations", inputs),
        leaf("checkpoint staging", copied),
    )

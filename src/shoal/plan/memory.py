"""Memory of one rank, moment by moment: when it is highest is computed, not assumed."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from shoal.plan.blocks import linears
from shoal.plan.layout import Rank, count, ranks
from shoal.plan.moments import Moment, moments
from shoal.plan.run import Run
from shoal.plan.states import states, trained_parameters
from shoal.plan.terms import GIB, Term, group, leaf

# The caching allocator holds a little more than is in use: whole pages, and gaps between blocks of unlike sizes.
ALLOCATOR_SLACK = 0.02
# FSDP's streams and the main one do not share freed memory, and a pass through unlike units leaves more gaps.
SHARDED_SLACK = 0.10
# Either way where memory grows in place; streams still do not share it.
GROWING_SLACK = 0.005
# The driver's own share on a device, once kernels are loaded; and NCCL's channels, where there are other ranks.
CONTEXT_GIB = 0.6
COMMUNICATION_GIB = 0.6


@dataclass(frozen=True)
class RankMemory:
    """One place of the pipeline; every rank at that place has the same."""

    place: int
    moments: tuple[Moment, ...]
    reserve: float  # what the allocator holds and nothing uses, at the highest moment

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
    """The forecast of memory: of every place of the pipeline, and outside the devices."""

    run: Run
    places: tuple[RankMemory, ...]
    context: float  # bytes on the device outside PyTorch

    @cached_property
    def host(self) -> Term:
        """Bytes of main memory for each rank."""
        return _host(self.run, ranks(self.run.shape, self.run.mesh.pp, self.run.schedule)[0])

    @property
    def worst(self) -> RankMemory:
        return max(self.places, key=lambda place: place.reserved)

    @property
    def allocated(self) -> float:
        return max(place.allocated for place in self.places)

    @property
    def reserved(self) -> float:
        return self.worst.reserved

    def fits(self, gib: float) -> bool:
        """Whether a device of this memory is enough, with the driver's share."""
        return (self.reserved + self.context) / GIB <= gib


@lru_cache(maxsize=4096)
def forecast_memory(run: Run) -> Memory:
    """The memory of every place of the pipeline of `run`."""
    everything = ranks(run.shape, run.mesh.pp, run.schedule)
    places = tuple(_rank_memory(run, rank) for rank in everything)
    context = 0.0
    if not run.gpu.is_cpu:
        context = (CONTEXT_GIB + (COMMUNICATION_GIB if run.world_size > 1 else 0.0)) * GIB
    return Memory(run, places, context)


def _rank_memory(run: Run, rank: Rank) -> RankMemory:
    found = moments(run, rank)
    highest = max(moment.tree.amount for moment in found)
    slack = SHARDED_SLACK if run.sharded else ALLOCATOR_SLACK
    if run.traits.grows_in_place:
        slack = GROWING_SLACK
    if not run.sharded:
        return RankMemory(rank.place, found, highest * slack)
    main = max(moment.tree.amount - moment.side for moment in found)
    side = max(moment.side for moment in found)
    return RankMemory(rank.place, found, max(0.0, main * (1 + slack) + side - highest))


def _host(run: Run, rank: Rank) -> Term:
    """Main memory that one rank needs for what does not live on its device."""
    held, counts = states(run, rank), count(run, rank)
    # Weights are read tensor by tensor, so that loading needs one of them.
    largest = max(run.shape.vocab * run.shape.hidden, *(one.parameters for one in linears(run.shape)))
    copied = 0.0
    if run.async_checkpoint:
        trained = trained_parameters(run, rank)
        copied = (counts.all * run.weight_bytes if run.adapter is None else trained * run.weight_bytes) / run.shards
        copied += held.optimizer.amount
    return group(
        "host",
        leaf("loading, one tensor", largest * run.weight_bytes),
        leaf("offloaded", held.host if run.offload != "nvme" else 0.0),
        leaf("checkpoint on its way", copied),
    )

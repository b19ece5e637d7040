"""Which part of the model a rank of the pipeline has, and how many passes it holds at once."""

from dataclasses import dataclass
from functools import lru_cache

from shoal.catalogue.shapes import ModelShape, block_matrices, embedding_parameters, head_parameters
from shoal.plan.blocks import block_parameters
from shoal.plan.run import Run
from shoal.plan.stages import divide_blocks


@dataclass(frozen=True)
class Stage:
    """A run of blocks; the first stage has the embedding, the last the head."""

    blocks: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Rank:
    """What one place of the pipeline has. Without a pipeline there is one place, and it has everything."""

    place: int
    stages: tuple[Stage, ...]

    @property
    def blocks(self) -> int:
        return sum(stage.blocks for stage in self.stages)

    @property
    def first(self) -> bool:
        return any(stage.first for stage in self.stages)

    @property
    def last(self) -> bool:
        return any(stage.last for stage in self.stages)


def stages_each(schedule: str) -> int:
    """Stages on each device of the pipeline."""
    return 1 if schedule == "1f1b" else 2


@lru_cache(maxsize=256)
def ranks(shape: ModelShape, pipeline: int, schedule: str) -> tuple[Rank, ...]:
    """The places of the pipeline, each with its stages."""
    if pipeline == 1:
        return (Rank(0, (Stage(shape.layers, True, True),)),)
    count = pipeline * stages_each(schedule)
    head = shape.vocab * shape.hidden / block_matrices(shape)
    divided = divide_blocks(shape.layers, count, head)
    stages = [Stage(len(blocks), index == 0, index == count - 1) for index, blocks in enumerate(divided)]
    return tuple(Rank(place, tuple(stages[place::pipeline])) for place in range(pipeline))


def micro_batches_in_flight(run: Run, rank: Rank) -> float:
    """How many passes' activations of all its blocks a rank holds at the worst moment, in passes of all its blocks."""
    pipeline = run.mesh.pp
    if pipeline == 1:
        return 1.0
    behind = pipeline - 1 - rank.place
    if run.schedule == "1f1b":
        return float(min(run.grad_accum_steps, behind + 1))
    # Interleaved: two stages a rank, so a forward through one of them counts half.
    warm = 2 * behind + pipeline
    return min(2 * run.grad_accum_steps, warm + 1) / 2


@dataclass(frozen=True)
class Counts:
    """Parameters on one rank, before sharding; after tensor parallelism."""

    embedding: float
    block: float
    blocks: float
    head: float

    @property
    def ends(self) -> float:
        return self.embedding + self.head

    @property
    def all(self) -> float:
        return self.embedding + self.blocks + self.head


def count(run: Run, rank: Rank) -> Counts:
    """The model's own parameters on a rank. A tied matrix is on both ends of a pipeline, and counts as embedding."""
    shape, cut = run.shape, run.mesh.tp
    block = block_parameters(shape, cut)
    table = shape.vocab * shape.hidden
    embedding, head = 0.0, 0.0
    if rank.first:
        embedding = table / cut + (embedding_parameters(shape) - table)
    if rank.last:
        matrix = 0 if shape.tied else table
        head = matrix / cut + (head_parameters(shape) - matrix)
        if shape.tied and not rank.first:
            embedding = table / cut
    return Counts(embedding, block, rank.blocks * block, head)

"""The part of the model on each pipeline rank, and its number of micro-batches in flight."""

from dataclasses import dataclass
from functools import lru_cache

from shoal.catalogue.shapes import ModelShape, block_matrices, embedding_parameters, head_parameters
from shoal.plan.run.blocks import block_parameters
from shoal.plan.run.run import Run
from shoal.plan.run.stages import divide_blocks


@dataclass(frozen=True)
class Stage:
    """Consecutive blocks; the first stage has the embedding, the last the head."""

    blocks: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Rank:
    """The stages of one pipeline rank. Without a pipeline there is one rank, with the full model."""

    pipeline_rank: int
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


def stages_each(schedule: str, virtual: int = 0) -> int:
    """Stages per pipeline rank: `virtual`, or as many as the schedule usually has."""
    return virtual or (1 if schedule == "1f1b" else 2)


@lru_cache(maxsize=256)
def ranks(
    shape: ModelShape, pipeline: int, schedule: str, virtual: int = 0, *, even: bool = False, modules: bool = False
) -> tuple[Rank, ...]:
    """The pipeline ranks, each with its stages. `even`: with as many blocks in each, wherever the head is; with
    `modules`, as many modules."""
    if pipeline == 1:
        return (Rank(0, (Stage(shape.layers, True, True),)),)
    count = pipeline * stages_each(schedule, virtual)
    head = shape.vocab * shape.hidden / block_matrices(shape)
    counts = [len(blocks) for blocks in divide_blocks(shape.layers, count, 0.0 if even else head)]
    if even:
        counts = _equal_modules(shape.layers, count) if modules else _equal_blocks(shape.layers, count) or counts
    stages = [Stage(blocks, index == 0, index == count - 1) for index, blocks in enumerate(counts)]
    return tuple(Rank(pipeline_rank, tuple(stages[pipeline_rank::pipeline])) for pipeline_rank in range(pipeline))


def _equal_blocks(layers: int, stages: int) -> list[int]:
    """Blocks of each stage; those that do not divide are missing in the last one: partition_balanced in
    deepspeed/runtime/utils.py. Empty if nothing would be left for it."""
    most = -(-layers // stages)
    left = layers - most * (stages - 1)
    return [most] * (stages - 1) + [left] if left > 0 else []


def _equal_modules(layers: int, stages: int) -> list[int]:
    """Blocks of each stage with an equal number of modules, the first stages with one more: the embedding, blocks, the
    last norm and the head."""
    each, more = divmod(layers + 3, stages)
    modules = [each + (stage < more) for stage in range(stages)]
    return [modules[0] - 1, *modules[1:-1], modules[-1] - 2]


def ranks_of(run: Run) -> tuple[Rank, ...]:
    """The pipeline ranks of a run, as its system partitions the model."""
    traits = run.traits
    even, modules = traits.even_stages, traits.stages_of_modules
    return ranks(run.shape, run.mesh.pp, run.schedule, run.virtual_stages, even=even, modules=modules)


def different_ranks(run: Run) -> tuple[Rank, ...]:
    """Of the pipeline ranks with the same stages, the first."""
    return tuple({rank.stages: rank for rank in reversed(ranks_of(run))}.values())


def micro_batches_in_flight(run: Run, rank: Rank) -> float:
    """Micro-batches whose activations a rank holds at the peak; one through a part of its stages counts in part."""
    pipeline = run.mesh.pp
    if pipeline == 1:
        return 1.0
    behind = pipeline - 1 - rank.pipeline_rank
    stages = stages_each(run.schedule, run.virtual_stages)
    if stages == 1:
        return float(min(run.grad_accum_steps, behind + 1))
    # Interleaved: a rank runs its first stages for `pipeline` micro-batches each before the first backward pass.
    warm = 2 * behind + (stages - 1) * pipeline
    return min(stages * run.grad_accum_steps, warm + 1) / stages


@dataclass(frozen=True)
class Counts:
    """Parameters on one rank after tensor parallelism and before FSDP."""

    embedding: float
    block: float
    blocks: float
    head: float

    @property
    def embedding_and_head(self) -> float:
        return self.embedding + self.head

    @property
    def all(self) -> float:
        return self.embedding + self.blocks + self.head


def count(run: Run, rank: Rank) -> Counts:
    """The model's parameters on a rank. A tied weight is on the first and the last stage, and counts as embedding."""
    shape, tp = run.shape, run.mesh.tp
    block = block_parameters(shape, tp)
    table = shape.vocab * shape.hidden
    embedding, head = 0.0, 0.0
    if rank.first:
        embedding = table / tp + (embedding_parameters(shape) - table)
    if rank.last:
        matrix = 0 if shape.tied else table
        head = matrix / tp + (head_parameters(shape) - matrix)
        if shape.tied and not rank.first:
            embedding = table / tp
    return Counts(embedding, block, rank.blocks * block, head)

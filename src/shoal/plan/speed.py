"""Seconds of a step: what devices compute, what they wait for, and what hides behind what."""

from dataclasses import dataclass

from shoal.catalogue.shapes import block_matrices
from shoal.plan.communication import Group, collective_seconds, spread
from shoal.plan.compute import block_compute, head_seconds, optimizer_seconds
from shoal.plan.layout import Rank, count, ranks
from shoal.plan.run import Run
from shoal.plan.stages import bubble_share
from shoal.plan.states import optimizer_bytes, trained_parameters
from shoal.plan.terms import Term, group, leaf, scaled

# Computing slows down while a collective runs beside it: they share the device's processors and its memory.
CONTENTION = 0.45
# Host time to start the kernels of a block, forward and backward; a device that is faster waits for its host.
EAGER_BLOCK_HOST = 2.0e-3
COMPILED_BLOCK_HOST = 0.6e-3
# Between a device and its host's memory, sixteen lanes of PCIe 4 shared by nobody.
HOST_LINK = 25e9
# A host that steps the optimizer itself reads and writes its memory at about this rate, all ranks of it together.
HOST_MEMORY = 100e9


@dataclass(frozen=True)
class Speed:
    """The forecast of time."""

    step: Term  # seconds, by what they are spent on
    tokens_per_step: int  # of all ranks
    world_size: int
    flops_per_token: float
    peak: float

    @property
    def step_seconds(self) -> float:
        return self.step.amount

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_step / self.step_seconds / self.world_size

    @property
    def mfu(self) -> float:
        return self.tokens_per_second_per_gpu * self.flops_per_token / self.peak


def flops_per_token(run: Run) -> float:
    """As the published tables count: 6 for each entry of a matrix (4 where it is frozen), and attention whole."""
    shape = run.shape
    blocks, head = shape.layers * block_matrices(shape), shape.vocab * shape.hidden
    trained_head = run.trained.embedding if shape.tied else run.trained.head
    products = 4 * (blocks + head) + 2 * (blocks * run.trained.blocks + head * trained_head)
    return products + 12 * shape.layers * shape.hidden * run.length


def forecast_speed(run: Run) -> Speed:
    """The time of one optimizer step of `run`."""
    places = ranks(run.shape, run.mesh.pp, run.schedule)
    slowest = max((_pass(run, rank) for rank in places), key=lambda term: term.amount)
    parts = list(scaled(slowest, run.grad_accum_steps).parts)
    worked = sum(part.amount for part in parts)
    if run.mesh.pp > 1:
        share = bubble_share(run.mesh.pp, run.grad_accum_steps, 1 if run.schedule == "1f1b" else 2)
        if run.schedule == "zero-bubble":
            share /= 2  # the weights' half of the backward fills most of the gaps
        parts.append(leaf("pipeline bubble", worked * share / (1 - share)))
    parts.extend(_once_a_step(run, places[0]))
    step = group("step", *parts)
    tokens = run.micro_batch * run.length * run.grad_accum_steps * run.mesh.data_parallel
    return Speed(step, tokens, run.world_size, flops_per_token(run), run.peak)


def _pass(run: Run, rank: Rank) -> Term:
    """One pass, forward and backward, on one place of the pipeline."""
    block, blocks = block_compute(run), rank.blocks
    loss = head_seconds(run) if rank.last else None
    compute = [
        leaf("matrix products", block.products.both * blocks),
        leaf("attention", block.attention.both * blocks),
        leaf("other kernels", block.moving.both * blocks),
        leaf("recomputation", block.recomputed * blocks),
        leaf("head and loss", loss.both if loss else 0.0),
    ]
    ahead = block.forward * blocks + (loss.forward if loss else 0.0)
    back = block.backward * blocks + (loss.backward if loss else 0.0)
    host = (COMPILED_BLOCK_HOST if run.compiled else EAGER_BLOCK_HOST) * blocks
    waiting = leaf("waiting for the host", max(0.0, host - ahead - back) if not run.gpu.is_cpu else 0.0)
    exposed, hidden = _sharding(run, rank, ahead, back)
    cutting = _cutting(run, rank)
    beside = leaf("collectives beside it", CONTENTION * hidden)
    return group("pass", *compute, waiting, group("communication", exposed, cutting, beside))


def _shard_group(run: Run) -> Group:
    return spread(run, run.shards, run.mesh.tp)


def _sharding(run: Run, rank: Rank, ahead: float, back: float) -> tuple[Term, float]:
    """FSDP's collectives of one pass: (what nothing hides, seconds that computing hides)."""
    if not run.sharded or run.shards == 1:
        return leaf("sharded weights", 0.0), 0.0
    counts, over = count(run, rank), _shard_group(run)

    def gathered(parameters: float) -> float:
        return collective_seconds(run, "all-gather", over, parameters * run.compute_bytes)

    def scattered(parameters: float) -> float:
        return collective_seconds(run, "reduce-scatter", over, parameters * run.reduce_bytes) if parameters else 0.0

    gather, scatter = gathered(counts.block), scattered(counts.block * run.trained.blocks)
    embedding, head = counts.embedding * run.trained.embedding, counts.head * run.trained.head
    ends = gathered(counts.ends) + scattered(embedding + head)
    if run.mesh.pp > 1:
        # Gathered and reduced once a step, before the first pass and after the last: shared out over the passes.
        return leaf("sharded weights", (ends + (gather + scatter) * rank.blocks) / run.grad_accum_steps), 0.0
    gathers = gather * rank.blocks / (run.grad_accum_steps if run.keeps_weights else 1)
    again = 0.0 if run.keeps_weights else gather * rank.blocks
    scatters = scatter * rank.blocks
    # The first gathers and the last reductions have nothing to hide behind: those of the embedding and a block; and of
    # the head, where it goes with the embedding.
    if run.ends_apart:
        gathers += gathered(counts.head)
        scatters += scattered(head)
        ends = gathered(counts.embedding) + scattered(embedding)
    exposed = max(0.0, gathers - ahead) + max(0.0, again + scatters - back) + ends + gather + scatter
    return leaf("sharded weights", exposed), max(0.0, gathers + again + scatters + ends - exposed)


def _cutting(run: Run, rank: Rank) -> Term:
    """Exchanges inside blocks, which the next kernel waits for."""
    mesh, shape = run.mesh, run.shape
    tensor, context = 0.0, 0.0
    if mesh.tp > 1:
        size = run.tokens * shape.hidden * run.compute_bytes
        over = spread(run, mesh.tp, 1)
        summed = collective_seconds(run, "reduce-scatter", over, size)
        halved = run.precision == "fp8" and run.traits.gathers_in_eight_bits
        gathered = collective_seconds(run, "all-gather", over, size / (2 if halved else 1))
        # Two gathers and two sums forward, the same backward; recomputation does all again but the last sum.
        tensor = 4 * gathered + 4 * summed
        if run.repeats_forward:
            tensor += 2 * gathered + summed
        tensor *= rank.blocks
    if mesh.cp > 1:
        keys_and_values = run.tokens * mesh.cp * 2 * shape.kv_width / mesh.tp * run.compute_bytes
        over = spread(run, mesh.cp, mesh.tp)
        each = collective_seconds(run, "all-gather", over, keys_and_values)
        context = (3 if run.repeats_forward else 2) * each * rank.blocks
    return group("exchanges in blocks", leaf("tensor parallel", tensor), leaf("context parallel", context))


def _once_a_step(run: Run, rank: Rank) -> list[Term]:
    """The optimizer, and what is exchanged once a step."""
    trained = trained_parameters(run, rank)
    own = trained / run.shards
    if run.strategy == "zero1":
        own = trained / run.replicas
    found = [leaf("optimizer", optimizer_seconds(run, own))]
    averaging = _averaging(run, rank, trained)
    found.append(group("communication of the step", *averaging))
    if run.offload in ("optimizer", "nvme"):
        moved = 2 * optimizer_bytes(run, rank) / (run.shards if run.strategy != "zero1" else run.replicas)
        found.append(leaf("offloaded state, there and back", moved / (HOST_LINK if run.offload != "nvme" else 3e9)))
    if run.offload == "cpu":
        # Gradients go to the host and weights come back in every pass; the host steps.
        counts = count(run, rank)
        moved = (2 * counts.all * run.weight_bytes + trained * run.weight_bytes) / run.shards * run.grad_accum_steps
        stepping = own * 28 * run.devices / HOST_MEMORY
        found.append(leaf("offloaded weights and step", moved / HOST_LINK + stepping))
    return found


def _averaging(run: Run, rank: Rank, trained: float) -> list[Term]:
    """Gradients averaged over replicas, behind the last pass's backward as far as it lasts."""
    if run.replicas == 1:
        return []
    stride = run.mesh.tp * (run.shards if run.sharded else 1)
    over = spread(run, run.replicas, stride)
    number = run.compress_bytes or (run.reduce_bytes if run.mixed else run.weight_bytes)
    seconds = collective_seconds(run, "all-reduce", over, trained / run.shards * number)
    block = block_compute(run)
    hides = block.backward * rank.blocks if run.mesh.pp == 1 else 0.0
    # The last bucket, or the last block's, begins when there is nothing left to compute.
    last = seconds / max(2, rank.blocks)
    found = [
        leaf("averaging gradients", max(last, seconds - hides)),
        leaf("averaging beside computing", CONTENTION * min(seconds, hides)),
    ]
    if run.strategy == "zero1":
        rows = collective_seconds(run, "all-gather", over, trained * run.weight_bytes)
        found.append(leaf("sending updated rows", rows))
    return found

"""Seconds of collectives over the links there are."""

from dataclasses import dataclass

from shoal.plan.ring import Operation, ring_factor
from shoal.plan.run import Run

# Of a wire's figure, what collectives of tens of megabytes reach (public NCCL measurements; our own over gloo).
LINK_SHARE = 0.80


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other: `ranks` in all, over `nodes` machines, `within` on each."""

    ranks: int
    nodes: int

    @property
    def within(self) -> int:
        return max(1, self.ranks // self.nodes)


def spread(run: Run, ranks: int, stride: int) -> Group:
    """A group of `ranks` whose neighbours are `stride` ranks apart: how many machines it goes over.

    Ranks are numbered tensor parallel first, then context, shards, replicas and stages.
    """
    near = max(1, min(ranks, run.devices // stride)) if stride < run.devices else 1
    return Group(ranks, max(1, -(-ranks // near)))


def collective_seconds(run: Run, operation: Operation, group: Group, size: float) -> float:
    """One collective over `size` bytes, which is the whole tensor."""
    if group.ranks == 1:
        return 0.0
    speed = run.link.bytes_per_second
    if group.nodes > 1:
        # Every device has a port of its own, and as many rings as the group has devices in a machine use them at once.
        speed = (
            min(speed, run.network.bytes_per_second * group.within)
            if group.within > 1
            else (run.network.bytes_per_second)
        )
    turns = 2 if operation == "all-reduce" else 1
    latency = (
        turns
        * (
            (group.ranks - group.nodes) * run.link.latency
            + (group.nodes * run.network.latency if group.nodes > 1 else 0.0)
        )
        * HOP_SHARE
    )
    return latency + ring_factor(operation, group.ranks) * size / (speed * LINK_SHARE)


# Of a link's latency, what one hop of a ring adds: the messages of a ring follow each other closely.
HOP_SHARE = 0.25

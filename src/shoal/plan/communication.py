"""Seconds that collectives take over the links within and between nodes."""

from dataclasses import dataclass
from typing import Protocol

from shoal.catalogue.gpus import Link
from shoal.plan.ring import Operation, ring_factor
from shoal.plan.run import Run

# Share of a link's nominal bandwidth that collectives of tens of megabytes reach (public NCCL measurements; our own
# over gloo).
LINK_SHARE = 0.80


class Links(Protocol):
    """What has links: a run, or a machine."""

    @property
    def link(self) -> Link: ...  # between the devices of a node

    @property
    def network(self) -> Link: ...  # between nodes, per device


@dataclass(frozen=True)
class Group:
    """A process group: `ranks` in total, over `nodes` nodes, `within` on each."""

    ranks: int
    nodes: int

    @property
    def within(self) -> int:
        return max(1, self.ranks // self.nodes)


def rank_group(run: Run, ranks: int, stride: int) -> Group:
    """The group of `ranks` ranks that are `stride` ranks apart, with the number of nodes it spans.

    Ranks are numbered tensor parallel first, then context, shards, replicas and stages.
    """
    near = max(1, min(ranks, run.devices // stride)) if stride < run.devices else 1
    return Group(ranks, max(1, -(-ranks // near)))


def collective_seconds(run: Links, operation: Operation, group: Group, size: float) -> float:
    """Seconds of one collective over a full tensor of `size` bytes."""
    if group.ranks == 1:
        return 0.0
    speed = run.link.bytes_per_second
    if group.nodes > 1:
        # Every device has its own network port, and NCCL builds one ring per device of the group in a node.
        speed = (
            min(speed, run.network.bytes_per_second * group.within)
            if group.within > 1
            else (run.network.bytes_per_second)
        )
    phases = 2 if operation == "all-reduce" else 1
    latency = (
        phases
        * (
            (group.ranks - group.nodes) * run.link.latency
            + (group.nodes * run.network.latency if group.nodes > 1 else 0.0)
        )
        * HOP_SHARE
    )
    return latency + ring_factor(operation, group.ranks) * size / (speed * LINK_SHARE)


# Share of a link's latency that one hop of a ring adds: the messages of a ring are pipelined.
HOP_SHARE = 0.25

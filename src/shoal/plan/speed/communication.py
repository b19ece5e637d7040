"""Seconds that collectives take over the links within and between nodes."""

from dataclasses import dataclass
from math import log, sqrt
from typing import Protocol

from shoal.catalogue.gpus import Link
from shoal.plan.run.run import Run
from shoal.plan.speed.ring import Operation, ring_factor

# Share of a link's nominal bandwidth that collectives of tens of megabytes reach (public NCCL measurements; our own
# over gloo).
LINK_SHARE = 0.80

# The same over PCI Express: among the devices of one socket, of which nodes have up to four, and across two. 35 of 63
# GB/s with four RTX 5090 and 28 with eight (NVIDIA/nccl, issue 1639), 20 of 31.5 with three A100 (nccl-tests, issue
# 178); NCCL itself expects 10 to 16 GB/s between sockets of the time of PCIe 4 (src/graph/topo.h).
PCIE_SHARE, PCIE_SOCKET_SHARE, SOCKET = 0.45, 0.60, 4
# Through host memory, as shares of what an all-gather reaches: 7.7 GB/s with two RTX 2080 Ti and 4.0 in an all-reduce
# (Anthony-Hoo.github.io, AutoDL_Multi-GPU_Interconnection_Test), whatever the generation of PCI Express: 5.2 with four
# A100 and 3.9 with two A40 if NCCL_P2P_DISABLE is set. A reduce-scatter reaches 1.5 times as much as an all-reduce with
# two RTX 4090. Across sockets all of it is less on some nodes: 1.4 GB/s with the A40, 0.9 with these 4090.
HOST = "pcie-host"
HOST_SHARES: dict[Operation, float] = {"all-gather": 1.0, "reduce-scatter": 0.78, "all-reduce": 0.52}

# The same over Infinity Fabric. 48 of the 64 GB/s of each link are left after its protocol (ROCm/rccl, issue 1210); in
# FSDP of Llama 70B on eight MI300X, all-gathers and reduce-scatters with nothing beside them reach 309 and 320 of 448
# (AMD-AGI/TraceLens, tests/traces/mi300/llama_70b_fsdp).
XGMI_SHARE = 0.70
# The eight devices of these have a link to each of the seven others, and no switch: a group of fewer has only the links
# within it (README of ROCm/rccl).
FULLY_CONNECTED, NEIGHBORS = ("xgmi3", "xgmi4"), 7

# Neither is there a switch between eight V100, which are a hybrid cube mesh: of the six links of each, as many are in
# rings of two, three and four neighbours (`nvidia-smi topo -m` of a DGX-1: one link between the first and the second
# and third, two to the fourth). Four have two links to each other; only nodes of sixteen have a switch.
MESH, MESH_RINGS, MESH_LINKS = "nvlink2", {2: 1, 3: 2, 4: 4, 5: 4, 6: 4, 7: 4}, 6

# The same over TCP where the devices of a node share its port: 14.7 and 22.5 of 32 Gbit/s on two and four nodes of
# eight; one device per node reaches 31 (NVIDIA/nccl, issue 209).
TCP_SHARE = 0.58

# NCCL's protocols: the share of the bandwidth that each reaches, its latency whatever the ranks, and that of a hop
# within a node over NVLink, over PCI Express, and between nodes, in seconds (src/graph/tuning.cc in NVIDIA/nccl 2.8).
# It takes the one that it expects to be the fastest.
PROTOCOLS = (
    (0.25, 3.6e-6, 0.85e-6, 1.8e-6, 2.7e-6),  # LL
    (0.92, 10.0e-6, 1.9e-6, 2.5e-6, 4.0e-6),  # LL128
    (1.0, 8.4e-6, 3.4e-6, 5.7e-6, 9.6e-6),  # Simple
)
# Share of a link's latency that one hop of a ring adds where NCCL is not used, or the network is TCP's.
HOP_SHARE = 0.25
NCCL_LATENCY = 20e-6
# The latencies of the catalogue's links, for which the protocols' are.
USUAL_NVLINK, USUAL_PCIE, USUAL_NETWORK = 5e-6, 10e-6, 10e-6
# What a collective takes from the kernels that it overlaps with. NCCL occupies about 12 of 108 to 132 multiprocessors,
# whatever the speed; and of each byte that arrives, memory is accessed 2.5 times (an all-gather writes it and reads it
# to send it on; a reduce-scatter also reads what it adds to).
OCCUPIED = 0.10
ACCESSES = 2.5

# Every step waits for the slowest device, and devices of one kind differ in speed: by 8% on average in five clusters,
# from the fastest to the slowest (arXiv 2208.11035). As a standard deviation, from the weak scaling of six models to
# 256 nodes, on which steps are 1 to 5% longer than on a few (NVIDIA/dgxc-benchmarking 24.11).
SPREAD = 0.013


class Links(Protocol):
    """What has links: a run, or a machine."""

    @property
    def link(self) -> Link: ...  # between the devices of a node

    @property
    def network(self) -> Link: ...  # between nodes, per device

    @property
    def devices(self) -> int: ...  # of a node


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
    phases = 2 if operation == "all-reduce" else 1
    within, between = group.ranks - group.nodes, group.nodes if group.nodes > 1 else 0
    moved = ring_factor(operation, group.ranks) * size / ring_speed(run, group)
    if run.link.name == HOST and group.within > 1 and not run.link.measured:
        moved /= HOST_SHARES[operation]
    if max(run.link.latency, run.network.latency if between else 0.0) > NCCL_LATENCY:
        return moved + phases * (within * run.link.latency + between * run.network.latency) * HOP_SHARE
    pcie = run.link.name.startswith("pcie")
    near = run.link.latency / (USUAL_PCIE if pcie else USUAL_NVLINK)
    far = run.network.latency / USUAL_NETWORK
    return min(
        moved / share + base + phases * (within * near * (over_pcie if pcie else over_nvlink) + between * far * network)
        for share, base, over_nvlink, over_pcie, network in PROTOCOLS
    )


def ring_speed(run: Links, group: Group) -> float:
    """Bytes per second that every link of a ring carries."""
    speed = run.link.bytes_per_second * _share(run.link, group.within)
    speed *= _connected(run, group.within)
    if group.nodes > 1:
        # Every device has its own network port, and NCCL builds one ring per device of the group in a node.
        shared = group.within > 1 and run.network.name.startswith("ethernet")
        share = 1.0 if run.network.measured else TCP_SHARE if shared else LINK_SHARE
        ports = run.network.bytes_per_second * group.within * share
        speed = ports if group.within == 1 else min(speed, ports)
    return speed


def _connected(run: Links, within: int) -> float:
    """Of the links of a device, the share that rings of `within` devices of a node use."""
    if run.link.name in FULLY_CONNECTED:
        return min(1.0, (within - 1) / NEIGHBORS)
    if run.link.name == MESH and run.devices == 4:
        return min(1.0, (within - 1) / 3)
    if run.link.name == MESH and run.devices <= 8:
        return MESH_RINGS.get(within, MESH_LINKS) / MESH_LINKS
    return 1.0


def _share(link: Link, within: int) -> float:
    if link.measured:
        return 1.0
    if link.name.startswith("xgmi"):
        return XGMI_SHARE
    if link.name == HOST:
        return 1.0
    if link.name.startswith("pcie"):
        return PCIE_SOCKET_SHARE if within <= SOCKET else PCIE_SHARE
    return LINK_SHARE


def exposed_reduction(seconds: float, overlap: float, last: float, bucket: float = 0.0) -> float:
    """The part of a reduction that a backward pass of `overlap` seconds does not hide. `last` is the share of it that
    there is nothing left to compute behind, and `bucket` that of the buckets which are filled before they are reduced.
    """
    if bucket >= 1:
        return seconds
    if bucket:
        last = max(last, 1 - int((1 - 1e-9) / bucket) * bucket)
    return max(last * seconds, seconds - (1 - bucket) * overlap)


def contention(run: Run, group: Group) -> float:
    """The slowdown of kernels per second of collectives of `group` that overlap with them."""
    return OCCUPIED + ACCESSES * ring_speed(run, group) / run.gpu.memory_bandwidth


def straggling(devices: int, nodes: int) -> float:
    """The expected slowdown of a step by the slowest of all devices, relative to one node of `devices`, whose own
    slowest one is part of every measurement: 1% on ten nodes of eight, 2.4% on 256, 3.1% on 2,048."""
    return SPREAD * (_extreme(devices * nodes) - _extreme(devices))


def _extreme(count: int) -> float:
    """About how many standard deviations the most extreme of `count` values is from their mean."""
    return sqrt(2 * log(count))

"""The checks of `shoal doctor` that need several processes: that they meet, agree, and communicate as fast as the plan
expects of their links."""

import json
import os
import socket
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.collectives_measure import measure
from shoal.bench.collectives_report import Measured
from shoal.bench.collectives_request import Request
from shoal.bench.sizes import show_seconds, show_size, show_speed
from shoal.config.schema_hardware import HardwareConfig
from shoal.launch.doctor.finding import Finding, failure, ok, warning
from shoal.launch.doctor.software import versions
from shoal.observe.progress import Reporter
from shoal.parallel.device import inspect_device
from shoal.parallel.ranks import Ranks
from shoal.plan.machine import Machine, machine_at_hand
from shoal.plan.speed.communication import Group, collective_seconds
from shoal.plan.speed.ring import ring_factor

LARGEST_ON_CUDA, LARGEST_ON_CPU = 256 * 2**20, 16 * 2**20
QUICK = Request(repeat=5, seconds=0.2)
# Shares of the expected speed. The forecast of a healthy link is within a third.
USUAL_SHARE, LOWEST_SHARE = 0.5, 0.2
# Seconds between the clocks of two nodes.
USUAL_SKEW, LARGEST_SKEW = 0.5, 10.0
PINGS = 8
# Seconds until a file that one node wrote is seen by the others: NFS caches what is in a folder.
SEEN_WITHIN = 5.0


@dataclass(frozen=True)
class Node:
    """What the ranks tell each other about the node they are on."""

    name: str
    versions: dict[str, str]
    device: str | None
    nccl: str | None
    sees_folder: bool = True


@dataclass(frozen=True)
class Asked:
    """What the ranks are told: the run directory, and the config's block `hardware`, which may name the links."""

    folder: str
    hardware: dict[str, Any] | None = None

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "Asked":
        return Asked(**json.loads(text))

    def read_hardware(self) -> HardwareConfig:
        return HardwareConfig.model_validate(self.hardware or {})


def examine_group(asked: Asked, ranks: Ranks, reporter: Reporter) -> list[Finding]:
    """All checks of a group, on every rank, with the same findings on each."""
    found: list[Finding] = []

    def note(check: str, finding: Finding) -> None:
        found.append(replace(finding, check=check))

    nodes = _meet(ranks, Path(asked.folder))
    leaders = [rank for rank, name in enumerate(nodes) if name.name not in {one.name for one in nodes[:rank]}]
    per_node = ranks.world_size // len(leaders)
    note("ranks", ok(f"{ranks.world_size} joined, on {len(leaders)} node{'s' * (len(leaders) > 1)}"))
    note("same versions", check_versions([nodes[rank] for rank in leaders]))
    if len(leaders) > 1:
        note("shared folder", _check_folder([nodes[rank] for rank in leaders], asked.folder))
        note("clock skew", _check_clocks(ranks, leaders, [nodes[rank].name for rank in leaders]))
    hardware, device = asked.read_hardware(), inspect_device(ranks.device)
    machine = machine_at_hand(device.name, device.memory_gib, per_node, len(leaders), hardware=hardware)
    guessed = machine.is_cpu and hardware.link == "auto"
    largest = LARGEST_ON_CUDA if ranks.device.type == "cuda" else LARGEST_ON_CPU
    if len(leaders) > 1 and per_node > 1:
        note("within nodes", _check_within(ranks, nodes, leaders, machine, largest, guessed, reporter))
    measured = measure(QUICK, largest, ranks, reporter, ("all-reduce",))
    note("all-reduce", judge(measured, machine, guessed=guessed))
    return found


def check_versions(nodes: list[Node]) -> Finding:
    """The same software and the same devices on every node."""
    first = nodes[0]
    for node in nodes[1:]:
        for name in sorted(first.versions.keys() | node.versions.keys()):
            here, there = first.versions.get(name, "missing"), node.versions.get(name, "missing")
            if here != there:
                remedy = "use one environment on all nodes, on a shared disk or in a container"
                found = f"{name} is {here} on {first.name}, but {there} on {node.name}"
                return failure(found, remedy) if name in ("torch", "shoal") else warning(found, remedy)
        if first.nccl != node.nccl:
            return failure(
                f"NCCL is {first.nccl} on {first.name}, but {node.nccl} on {node.name}",
                "use one environment on all nodes, and look for another NCCL in LD_LIBRARY_PATH",
            )
        if first.device != node.device:
            return warning(
                f"{first.name} has {first.device or 'no GPU'}, {node.name} {node.device or 'none'}",
                "ask the scheduler for equal nodes (Slurm: --constraint): the slowest decides",
            )
    return ok("torch " + first.versions.get("torch", "?") + ("" if first.nccl is None else f", NCCL {first.nccl}"))


def judge(measured: Measured, machine: Machine, *, guessed: bool, where: str = "") -> Finding:
    """The all-reduce against the forecast. `guessed`: the catalogue's bandwidth is only a guess, as for a CPU."""
    if measured.faults:
        return failure(
            f"the results are wrong: {measured.faults[0]}",
            "do not train here; look for a faulty GPU with nvidia-smi -q -d ECC, or leave nodes out one by one",
        )
    group = Group(machine.world_size, machine.nodes)
    # Large messages tell the bandwidth. The median of three, since others may use the link for a moment.
    large = sorted(measured.timings, key=lambda one: one.bytes)[-3:]
    share = statistics.median(
        collective_seconds(machine, "all-reduce", group, one.bytes) / one.seconds for one in large
    )
    last = large[-1]
    bandwidth = ring_factor("all-reduce", machine.world_size) * last.bytes / last.seconds
    link = machine.network if machine.nodes > 1 else machine.link
    found = (
        f"{where}{show_speed(bandwidth)} at {show_size(last.bytes)}, {share:.0%} of what the plan expects of "
        f"{link.name}; {show_seconds(measured.timings[0].seconds)} at {show_size(measured.timings[0].bytes)}"
    )
    if guessed:
        return ok(found + " (a guess, on a CPU)")
    remedy = _remedy(machine, measured.backend)
    if share < LOWEST_SHARE:
        return failure(found, remedy)
    return warning(found, remedy) if share < USUAL_SHARE else ok(found)


def _remedy(machine: Machine, backend: str) -> str:
    if machine.nodes > 1:
        return (
            "NCCL_DEBUG=INFO shows whether NCCL uses InfiniBand (NET/IB) or a socket (NET/Socket), and on which "
            "interface; if the network is what it is, set hardware.network, so that the plan forecasts it"
        )
    if backend == "gloo":
        return "other processes may use the cores; if the link is what it is, set hardware.link"
    return (
        "nvidia-smi topo -m and nvidia-smi nvlink -s show the links; unset NCCL_P2P_DISABLE; "
        "if the link is what it is, set hardware.link, so that the plan forecasts it"
    )


def _meet(ranks: Ranks, folder: Path) -> list[Node]:
    """The node of every rank, by rank. Rank 0 writes a file in the run directory, and each rank looks for it."""
    while not folder.is_dir():
        folder = folder.parent
    nccl = None
    if ranks.device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") if ranks.first else nullcontext("") as name:
        marked = Path(ranks.broadcast(str(name)))
        mine = Node(
            node_name(),
            versions(),
            torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else None,
            nccl,
            _appears(marked),
        )
        told = gather(json.dumps(asdict(mine)), ranks)  # and so the folder exists until all have looked
    return [Node(**json.loads(text)) for text in told]


def node_name() -> str:
    """Slurm may run several of its nodes on one machine."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _appears(folder: Path) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def gather(text: str, ranks: Ranks) -> list[str]:
    """The text of every rank, on every rank."""
    encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
    size = int(ranks.largest(len(encoded)))
    padded = torch.zeros(size, dtype=torch.uint8)
    padded[: len(encoded)] = encoded
    everyone = [torch.zeros_like(padded) for _ in range(ranks.world_size)]
    dist.all_gather(everyone, padded)
    return [bytes(one.tolist()).rstrip(b"\0").decode() for one in everyone]


def _check_folder(nodes: list[Node], folder: str) -> Finding:
    blind = [node.name for node in nodes if not node.sees_folder]
    if not blind:
        return ok(f"{folder} is the same on all nodes")
    return failure(
        f"{', '.join(blind[:4])} {'does' if len(blind) == 1 else 'do'} not see {folder} of {nodes[0].name}",
        "use a folder on a file system that all nodes share: run_dir in the file, or --runs",
    )


def _check_clocks(ranks: Ranks, leaders: list[int], names: list[str]) -> Finding:
    """The clock of each node against that of the first, by the fastest of a few messages to it and back."""
    skews = torch.zeros(len(leaders), dtype=torch.float64)
    for index, leader in enumerate(leaders[1:], start=1):
        if ranks.rank == leader:
            for _ in range(PINGS):
                dist.recv(torch.zeros(1, dtype=torch.float64), src=0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=0)
        elif ranks.first:
            skews[index] = min(_ping(leader) for _ in range(PINGS))[1]
    skews = ranks.sum(skews)  # zeros on the other ranks
    largest = int(skews.abs().argmax())
    skew = float(skews[largest])
    found = f"at most {abs(skew) * 1e3:.0f} ms"
    if abs(skew) > USUAL_SKEW:
        found = f"{names[largest]} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} {names[0]}"
        remedy = "synchronize the clocks of the nodes (chronyc tracking, timedatectl)"
        return failure(found, remedy) if abs(skew) > LARGEST_SKEW else warning(found, remedy)
    return ok(found)


def _ping(rank: int) -> tuple[float, float]:
    """(seconds there and back, the clock of `rank` less this one)."""
    answer = torch.zeros(1, dtype=torch.float64)
    began = time.time()
    dist.send(torch.zeros(1, dtype=torch.float64), dst=rank)
    dist.recv(answer, src=rank)
    ended = time.time()
    return ended - began, float(answer) - (began + ended) / 2


def _check_within(
    ranks: Ranks,
    nodes: list[Node],
    leaders: list[int],
    machine: Machine,
    largest: int,
    guessed: bool,
    reporter: Reporter,
) -> Finding:
    """The all-reduce within each node, all at once, and the slowest of them: a slow network and a slow node differ."""
    members = [[rank for rank, node in enumerate(nodes) if node.name == nodes[leader].name] for leader in leaders]
    groups = [dist.new_group(one) for one in members]  # by all ranks, also by those that are not in it
    mine = next(index for index, one in enumerate(members) if ranks.rank in one)
    inside = replace(ranks, rank=members[mine].index(ranks.rank), world_size=len(members[mine]), group=groups[mine])
    measured = measure(QUICK, largest, inside, reporter, ("all-reduce",))
    told = gather(json.dumps(measured.as_dict()), ranks)
    found = [Measured.from_dict(json.loads(told[leader])) for leader in leaders]
    slowest = max(range(len(found)), key=lambda index: _slowness(found[index]))
    return judge(
        found[slowest],
        replace(machine, nodes=1, devices=len(members[slowest])),
        guessed=guessed,
        where=f"{nodes[leaders[slowest]].name}: ",
    )


def _slowness(measured: Measured) -> float:
    return float("inf") if measured.faults else max(one.seconds for one in measured.timings)

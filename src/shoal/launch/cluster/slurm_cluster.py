"""What a Slurm cluster offers: its partitions and the nodes in them."""

import re
from dataclasses import dataclass

from shoal.config.schema_slurm import read_time
from shoal.launch.cluster.slurm_commands import ELSEWHERE, run_slurm

_FORMAT = "%P|%D|%c|%m|%l|%G|%f"
_GPU = re.compile(r"gpu(?::(?P<kind>[^:(,]+))??:(?P<count>\d+)")


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of a partition."""

    partition: str
    default: bool
    count: int
    cpus: int
    memory_mib: int
    limit: float  # seconds
    gpus: int
    gpu_type: str | None
    features: tuple[str, ...]


def read_cluster() -> list[Nodes]:
    """The nodes of all partitions."""
    doing = "The cluster's partitions cannot be read"
    printed = run_slurm(["sinfo", "--noheader", f"--format={_FORMAT}"], doing, hint=f"; {ELSEWHERE}")
    return [nodes for line in printed.splitlines() if (nodes := _read(line)) is not None]


def partition_names(cluster: list[Nodes]) -> list[str]:
    return list(dict.fromkeys(nodes.partition for nodes in cluster))


def _read(line: str) -> Nodes | None:
    fields = line.strip().split("|")
    if len(fields) != 7:
        return None
    partition, count, cpus, memory, limit, gres, features = fields
    found = [match for match in map(_GPU.match, gres.split(",")) if match is not None]
    return Nodes(
        partition=partition.removesuffix("*"),
        default=partition.endswith("*"),
        count=int(count),
        # Groups of unequal nodes are printed with a plus sign after the smallest.
        cpus=int(cpus.rstrip("+")),
        memory_mib=int(memory.rstrip("+")),
        limit=read_time(limit) or float("inf"),
        gpus=sum(int(match["count"]) for match in found),
        gpu_type=found[0]["kind"] if len(found) == 1 else None,
        features=tuple(features.split(",")),
    )

"""The one description of a run that is about to start or was planned: no `auto` is left, and its forecast is known."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from shoal.config.mesh import CONFIGURED_AXES, Mesh
from shoal.config.schema import Config
from shoal.plan.goodput import Goodput, forecast_goodput
from shoal.plan.machine import Machine
from shoal.plan.memory.forecast import Memory, forecast_memory
from shoal.plan.run.run import Run
from shoal.plan.speed.forecast import Speed, forecast_speed
from shoal.plan.terms import GIB


@dataclass(frozen=True)
class ResolvedRun:
    """How a run is carried out, and the memory and time it is expected to take.

    `config` is `requested` with every auto of the forecast's keys filled in. The run folder keeps `requested`, so that
    a run that is resumed on other devices is resolved for them.
    """

    requested: Config
    config: Config
    run: Run  # the sizes that the forecast depends on
    machine: Machine
    reason: str  # why this strategy, as a sentence
    exact: bool = True  # False: the forecast is for a model that only resembles this one

    @property
    def strategy(self) -> str:
        return self.run.strategy

    @property
    def mesh(self) -> Mesh:
        return self.run.mesh

    @property
    def world_size(self) -> int:
        return self.run.world_size

    @property
    def data_parallel(self) -> int:
        return self.run.mesh.data_parallel

    @property
    def micro_batch(self) -> int:
        return self.run.micro_batch

    @property
    def grad_accum_steps(self) -> int:
        return self.run.grad_accum_steps

    @property
    def global_batch(self) -> int:
        return self.run.global_batch

    @cached_property
    def memory(self) -> Memory:
        return forecast_memory(self.run)

    @cached_property
    def speed(self) -> Speed:
        return forecast_speed(self.run)

    @cached_property
    def fits(self) -> bool:
        return fits(self.run, self.machine)

    def goodput(self, steps: int | None = None) -> Goodput:
        """Interruptions, and the time spent on anything but training, of a run of `steps` steps."""
        return forecast_goodput(self.config, self.run, self.machine, self.speed.step_seconds, steps)

    @property
    def is_promise(self) -> bool:
        """Whether measurements are compared with the forecast."""
        return self.exact and not self.machine.is_cpu

    @property
    def name(self) -> str:
        """The strategy with its parallel degrees, for display."""
        hybrid = self.strategy == "fsdp" and self.mesh.dp_replicate > 1
        return ("hybrid" if hybrid else self.strategy) + describe_degrees(asdict(self.mesh))

    def describe(self) -> str:
        """The strategy with its parallel degrees, and why it was chosen."""
        return f"{self.strategy}{describe_degrees(asdict(self.mesh))} ({self.reason})"

    def as_dict(self) -> dict[str, Any]:
        """The `chosen` entry of `plan.json`."""
        return {
            "strategy": self.strategy,
            "reason": self.reason,
            "world_size": self.world_size,
            "data_parallel": self.data_parallel,
            "micro_batch": self.micro_batch,
            "grad_accum_steps": self.grad_accum_steps,
            "global_batch": self.global_batch,
            "mesh": asdict(self.mesh),
            "sharding": self.config.parallel.sharding,
            "recompute": shown_recompute(self.run),
            "checkpoint_every": self.config.checkpoint.every,
        }


def fits(run: Run, machine: Machine, share: float = 1.0) -> bool:
    """Whether a run fits into `share` of the device memory, and its offloaded state into host memory."""
    memory = forecast_memory(run)
    if not memory.fits(machine.gpu.memory_gib * share):
        return False
    return machine.host_gib is None or memory.host.amount * machine.devices / GIB <= machine.host_gib


def shown_recompute(run: Run) -> str:
    """`recompute` for display."""
    if run.recompute == "parts":
        return "+".join(run.recomputed_parts)
    if run.recomputed_blocks:
        return f"first {run.recomputed_blocks}"
    return f"every {run.recompute}" if isinstance(run.recompute, int) else run.recompute


def describe_degrees(mesh: Mapping[str, int]) -> str:
    """` × tp 2 × pp 4`, to append to the strategy; empty where these are 1."""
    return "".join(f" × {axis} {mesh[axis]}" for axis in CONFIGURED_AXES if mesh[axis] > 1)


def describe_accumulation(grad_accum_steps: int) -> str:
    return "1 accumulation step" if grad_accum_steps == 1 else f"{grad_accum_steps} accumulation steps"

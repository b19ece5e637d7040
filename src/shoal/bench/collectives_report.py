"""Measured collectives compared with the ring formula: as a table and as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.bench.fit import Fit, fit_link
from shoal.bench.output import envelope
from shoal.bench.sizes import show_seconds, show_size, show_speed
from shoal.catalogue.gpus import Link
from shoal.plan.speed.ring import OPERATIONS, Operation, ring_factor, ring_seconds


@dataclass(frozen=True)
class Timing:
    """One operation at one size: median and quartiles of its samples, in seconds per call."""

    operation: Operation
    bytes: int  # of the full tensor
    seconds: float
    low: float
    high: float
    samples: int
    calls: int  # per sample


@dataclass(frozen=True)
class Measured:
    """The measurements and the setup they were made on."""

    device: str
    backend: str
    torch: str
    cores: int
    ranks: int
    nodes: int
    dtype: str
    timings: list[Timing]
    faults: list[str] = field(default_factory=list)  # messages about wrong results

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(found: Mapping[str, Any]) -> "Measured":
        return Measured(**{**found, "timings": [Timing(**timing) for timing in found["timings"]]})


@dataclass(frozen=True)
class CollectivesReport:
    """The measured times, and the link whose bandwidth the ring formula uses; None: the best measured one."""

    measured: Measured
    link: Link | None

    @property
    def correct(self) -> bool:
        return not self.measured.faults

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None if nothing was measured and no link was given."""
        if self.link is not None:
            return self.link.bytes_per_second
        return max((self.bus_bandwidth(timing) for timing in self.measured.timings), default=None)

    def timings(self, operation: Operation) -> list[Timing]:
        return [timing for timing in self.measured.timings if timing.operation == operation]

    def ring_bytes(self, timing: Timing) -> float:
        return ring_factor(timing.operation, self.measured.ranks) * timing.bytes

    def bus_bandwidth(self, timing: Timing) -> float:
        """Bytes per second over each link: comparable between operations and numbers of ranks."""
        return self.ring_bytes(timing) / timing.seconds

    def share(self, timing: Timing) -> float:
        """The share of the ring formula's speed that was reached."""
        assert self.bandwidth is not None
        return self._formula(timing) / timing.seconds

    def fit(self, operation: Operation) -> Fit | None:
        return fit_link([(self.ring_bytes(timing), timing.seconds) for timing in self.timings(operation)])

    def _formula(self, timing: Timing) -> float:
        assert self.bandwidth is not None
        return ring_seconds(timing.operation, self.measured.ranks, timing.bytes, bytes_per_second=self.bandwidth)

    def fault(self) -> str:
        """An error message about wrong results."""
        faults = "; ".join(self.measured.faults)
        return f"The results are wrong: {faults}. Training on this hardware would silently compute wrong results."

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints and `--output` writes: seconds, bytes, and bytes per second."""
        found = self.measured
        return envelope(
            "collectives",
            machine={name: getattr(found, name) for name in ("device", "backend", "torch", "cores")},
            config={"ranks": found.ranks, "nodes": found.nodes, "dtype": found.dtype},
            rows=[self._row(timing) for operation in OPERATIONS for timing in self.timings(operation)],
            caveats=[self.fault()] if found.faults else [],
            correct=self.correct,
            faults=found.faults,
            link={"name": self.link.name if self.link else "measured", "bytes_per_second": self.bandwidth},
            operations={operation: self._operation(operation) for operation in OPERATIONS},
        )

    def _operation(self, operation: Operation) -> dict[str, Any]:
        fit = self.fit(operation)
        return {
            "ring_factor": ring_factor(operation, self.measured.ranks),
            "fit": None if fit is None else asdict(fit),
        }

    def _row(self, timing: Timing) -> dict[str, Any]:
        return {
            "operation": timing.operation,
            "bytes": timing.bytes,
            "seconds": timing.seconds,
            "seconds_low": timing.low,
            "seconds_high": timing.high,
            "samples": timing.samples,
            "calls": timing.calls,
            "algorithm_bandwidth": timing.bytes / timing.seconds,
            "bus_bandwidth": self.bus_bandwidth(timing),
            "formula_seconds": self._formula(timing),
            "share": self.share(timing),
        }

    def title(self) -> str:
        found = self.measured
        nodes = f" on {found.nodes} nodes" if found.nodes > 1 else ""
        cores = f", {found.cores} cores" if found.device == "cpu" else ""
        return f"{found.ranks} × {found.device}{nodes} ({found.backend}, {found.dtype}{cores})"

    def text(self) -> str:
        lines = [self.title(), ""]
        lines.append(_row("operation", "size", "time", "quartiles", "algorithm", "bus", "of the ring"))
        for operation in OPERATIONS:
            for timing in self.timings(operation):
                lines.append(
                    _row(
                        operation,
                        show_size(timing.bytes),
                        show_seconds(timing.seconds),
                        f"{show_seconds(timing.low)} – {show_seconds(timing.high)}",
                        show_speed(timing.bytes / timing.seconds),
                        show_speed(self.bus_bandwidth(timing)),
                        f"{self.share(timing):.0%}",
                    )
                )
        if self.bandwidth is not None:
            origin = f"{self.link.name}'s in the catalogue" if self.link else "the best bus bandwidth above"
            lines += ["", f"The ring formula uses {show_speed(self.bandwidth)}, {origin}."]
        lines += ["", *(self._fitted(operation) for operation in OPERATIONS)]
        return "\n".join(lines)

    def _fitted(self, operation: Operation) -> str:
        fit, factor = self.fit(operation), ring_factor(operation, self.measured.ranks)
        if fit is None:
            return f"{operation:14}  no fit: too few sizes, or times that do not grow"
        return (
            f"{operation:14}  {show_seconds(fit.latency)} + {factor:.4g} × size / {show_speed(fit.bytes_per_second)}"
            f"  (median deviation {fit.error:.0%})"
        )


def _row(operation: str, size: str, seconds: str, spread: str, algorithm: str, bus: str, share: str) -> str:
    return f"{operation:14}  {size:>9}  {seconds:>8}  {spread:>19}  {algorithm:>9}  {bus:>9}  {share:>11}"

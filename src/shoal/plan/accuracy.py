"""How far off forecasts like this one have been, by figures that benchmarks/plan_errors.py computes."""

from dataclasses import dataclass
from typing import Any

from shoal.plan.run.run import Run
from shoal.plan.systems.modelled import OURS


@dataclass(frozen=True)
class Accuracy:
    """Errors of memory and of speed: the median and the 90th percentile."""

    runs: str
    memory: tuple[float, float]
    speed: tuple[float, float]

    def as_dict(self) -> dict[str, Any]:
        found = {
            what: {"median": median, "p90": p90}
            for what, (median, p90) in (("memory", self.memory), ("speed", self.speed))
        }
        return {"runs": self.runs, **found}


# In docs/plan-accuracy.md; tests/plan/test_accuracy.py compares them with the results. The code of the systems was
# known of the second, and of the third only what somebody says who asks with --like.
MEASURED = Accuracy("runs of shoal that were measured on an H200", (0.011, 0.027), (0.021, 0.060))
UNSEEN = Accuracy("published runs of other systems that it had not seen", (0.035, 0.094), (0.100, 0.284))
ASKED = Accuracy(
    "published runs that it had not seen, by the name of their system and its launch options",
    (0.061, 0.356),
    (0.098, 0.827),
)


def expected_error(run: Run) -> Accuracy | None:
    """What the forecast of `run` may be off by; None on a CPU, where it is rough."""
    if run.gpu.is_cpu:
        return None
    if run.traits != OURS:
        return ASKED
    return MEASURED if run.gpu.name == "h200" and run.world_size == 1 else UNSEEN

"""Which loops are trained where, in which precision, and how far a loss may be from the plain loop's."""

from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
STEPS, SEED = 12, 7
# Number of cases that run concurrently, and the time limit of a case in seconds.
AT_ONCE, PATIENCE = 4, 240
EXAMPLES = ("mlp", "vit", "diffusion", "after")
# By name: processes, and overrides of the run. One process is `single`, whatever the strategy.
PLACES: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "one process, strategy ddp": (1, ["parallel.strategy=ddp"]),
    "one process, strategy fsdp": (1, ["parallel.strategy=fsdp"]),
    "one process, fsdp with everything on the host": (1, ["parallel.offload=cpu"]),
    "ddp": (2, ["parallel.strategy=ddp"]),
    "zero1": (2, ["parallel.strategy=zero1"]),
    "fsdp": (2, ["parallel.strategy=fsdp"]),
}
ONE, SEVERAL = "one process", ("ddp", "fsdp")
# The largest relative difference of a loss from the plain loop's. In 16 bits a difference of rounding grows by step.
BOUNDS = {"32-true": 1e-4, "bf16-mixed": 0.03, "16-mixed": 0.03}
OVERHEAD_LIMIT = 0.02  # of a step of about 20 ms


def cases() -> Iterator[tuple[str, str, str, list[str]]]:
    """Loop, precision, place and further overrides."""
    for place in PLACES:
        yield "sequences", "bf16-mixed", place, []
    for name in (*EXAMPLES, "weighted"):
        for place in (ONE, *SEVERAL):
            yield name, "bf16-mixed", place, []
    for precision in ("32-true", "16-mixed"):
        for name in ("vit", "sequences"):
            for place in (ONE, *SEVERAL):
                yield name, precision, place, []
    for override in ("train.compile=true", "train.recompute=full", "train.micro_batch=2"):
        for place in (ONE, "fsdp"):
            yield "sequences", "bf16-mixed", place, [override]

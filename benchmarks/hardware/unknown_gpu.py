"""The runs that were measured on an H200, forecast as if nobody knew that GPU.

    python benchmarks/hardware/unknown_gpu.py

With what `shoal bench hardware --json` measured on it (`h200.json`) and no Hopper in the catalogue, as for a GPU of a
new generation; as an A100 without a measurement, which is what training takes an unknown device for; and as the H200 of
the catalogue, whose shares of the peak were chosen with some of these runs. Writes `unknown_gpu.json`.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from plan_errors import DRAWN, known
from plan_published import spread
from sweeps.forecast import forecast
from sweeps.report import read_records

from shoal.bench.hardware import unknown_gpu
from shoal.catalogue.gpus import GPUS, Gpu, find_gpu
from shoal.config.schema import GpuConfig
from shoal.plan.machine import gpu_of
from shoal.plan.run.run import Run
from shoal.plan.speed.forecast import forecast_speed

HERE = Path(__file__).parent
SWEEP = HERE.parent / "gpu" / "sweep_h200" / "sweep.json"


def devices() -> dict[str, Gpu]:
    """The same device, by how much is known of it."""
    found = json.loads((HERE / "h200.json").read_text())["hardware"]["gpu"]
    hopper = [name for name, gpu in GPUS.items() if gpu.compute_capability == (9, 0)]
    others = {name: GPUS.pop(name) for name in hopper}
    similar = unknown_gpu((9, 0), 132, 1.98e9, 1e9 * found["copy_gb_per_second"])
    GPUS.update(others)
    memory = {"memory_gib": found["memory_gib"]}
    return {
        "measured, otherwise unknown": gpu_of(GpuConfig.model_validate({**found, **similar})),
        "an A100, as an unknown device was taken for": replace(find_gpu("a100-80gb"), **memory),
        "in the catalogue": find_gpu("h200"),
        "in the catalogue and measured": gpu_of(GpuConfig.model_validate(found)),
    }


def runs() -> Iterator[tuple[str, Run, float]]:
    """(which, the run, its measured tokens per second): ours, and those of other systems that were drawn at random."""
    for record in read_records(SWEEP).values():
        if record["status"] == "measured":
            run = forecast(record["config"], record["machine"]).run
            yield "our own runs", run, record["measured"]["tokens_per_second"]
    for one in known()[1]:
        if one.what == "speed" and one.row.source in DRAWN:
            assert one.row.run is not None
            yield "other systems, drawn at random", one.row.run, one.published


def main() -> None:
    found: dict[str, dict[str, dict[str, float]]] = {}
    measured = list(runs())
    for name, gpu in devices().items():
        for which in dict.fromkeys(which for which, _, _ in measured):
            errors = [
                forecast_speed(replace(run, gpu=gpu)).tokens_per_second_per_gpu / tokens - 1
                for group, run, tokens in measured
                if group == which
            ]
            shares = dict(zip(("median", "p90", "bias"), spread(errors), strict=True))
            found.setdefault(which, {})[name] = {
                "runs": len(errors),
                **{key: round(one, 5) for key, one in shares.items()},
            }
            print(f"{which}: {name}: {found[which][name]}")
    (HERE / "unknown_gpu.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

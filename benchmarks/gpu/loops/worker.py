"""One process of a case: it trains a loop, with shoal or with torch alone, or measures the overhead of run.steps."""

import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loops.cases import REPOSITORY, SEED
from loops.own import LOOPS
from loops.plain import PlainRun


def train(spec: dict[str, Any]) -> None:
    """One process of a case: writes result.json in its folder if it is the first."""
    import shoal

    folder, name = Path(spec["folder"]), spec["loop"]
    if spec["plain"]:
        steps, precision = spec["steps"], spec["precision"]
        shoal.init = lambda **_: PlainRun(precision=precision, steps=steps, clip=1.0, seed=SEED, folder=folder)
    evaluated: list[float] = []
    if name in LOOPS:
        LOOPS[name](spec["overrides"], evaluated)
    else:
        place = importlib.util.spec_from_file_location(name, REPOSITORY / "examples" / "loops" / f"{name}.py")
        assert place is not None
        assert place.loader is not None
        module = importlib.util.module_from_spec(place)
        sys.modules[name] = module
        place.loader.exec_module(module)
        module.main(spec["overrides"])
    if int(os.environ.get("RANK", "0")) == 0:
        losses = PlainRun.losses if spec["plain"] else losses_of(Path(spec["runs"]) / name)
        (folder / "result.json").write_text(json.dumps({"losses": losses, "evaluated": evaluated}))


def losses_of(run: Path) -> list[float]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in found if "loss" in line]


def measure_overhead(spec: dict[str, Any]) -> None:
    """Wall time per step of run.steps and of the plain loop, in turns; the device is waited for at the end of each."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import shoal

    cuda, large = torch.cuda.is_available(), spec["loop"] == "large"
    width, steps, rounds = (1024 if cuda else 64) if large else 64, spec["steps"], spec["rounds"]

    def parts() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        layers = 24 if large and cuda else 3
        model = nn.Sequential(
            *(
                one
                for _ in range(layers)
                for one in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            )
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
        data = TensorDataset(torch.randn(512, 128 if large and cuda else 4, width))
        return model, optimizer, DataLoader(data, batch_size=64, shuffle=True, pin_memory=cuda)

    def loop(run: Any) -> float:
        times = []
        model, optimizer, loader = run.prepare(*parts())
        for number, (inputs,) in enumerate(run.steps(loader)):
            if number in (steps // 4, steps - 1):
                if cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter())
            run.backward(model(inputs).square().mean())
            run.step(optimizer)
        return 1e3 * (times[1] - times[0]) / (steps - 1 - steps // 4)

    class Plain(PlainRun):
        done = 0

        def backward(self, loss: Any, weight: Any = None) -> None:
            loss.backward()
            self.done += 1
            if self.done % 10 == 0:
                float(loss)  # as progress lines do

        def step(self, optimizer: Any, schedule: Any = None) -> bool:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()
            return True

    found: dict[str, list[float]] = {"plain": [], "run.steps": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            plain = Plain(precision="bf16-mixed", steps=steps, clip=1.0, seed=SEED, folder=Path(folder))
            found["plain"].append(loop(plain))
            config = {"log": {"every": 10, "to": []}, "checkpoint": {"every": 10**9, "at_end": False}}
            options: dict[str, Any] = {"steps": steps, "precision": "bf16-mixed", "compile": False}
            with shoal.init(run_dir=folder, train=options, **config) as run:
                found["run.steps"].append(loop(run))
    Path(spec["folder"], "result.json").write_text(json.dumps(found))


def run_worker(file: Path) -> None:
    spec = json.loads(file.read_text())
    measure_overhead(spec) if spec.get("overhead") else train(spec)

"""How long the device waits for its host: `python benchmarks/gpu/host.py OUTPUT_FOLDER [--only PATTERN …]`.

Each case is a process that trains with and without CUDA graphs. Ten steps are timed without a synchronization between
them, with the host time of their parts. Then three are profiled: the share of that time in which a kernel runs. The
profiler makes the host slower, so the share without graphs is too low. Writes host.json.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "src"), str(HERE)]

WARMUP, TIMED, PROFILED = 10, 10, 3
CASES = {
    "smollm2-135m": ["model.shape=smollm2-135m", "data.max_length=512", "train.micro_batch=32"],
    "smollm2-135m, 2 micro-batches": [
        "model.shape=smollm2-135m",
        "data.max_length=512",
        "train.micro_batch=16",
        "train.global_batch=32",
    ],
    "pythia-160m": ["model.shape=pythia-160m", "data.max_length=1024", "train.micro_batch=16"],
    "gpt2": ["model.shape=gpt2", "data.max_length=1024", "train.micro_batch=16"],
    "qwen2.5-0.5b": ["model.shape=qwen2.5-0.5b", "data.max_length=1024", "train.micro_batch=16"],
}
TINY = ["model.shape={family: llama, hidden: 64, layers: 2, heads: 4, vocab: 512}", "data.max_length=64"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--case", help=argparse.SUPPRESS)  # of a worker process
    parser.add_argument("--graphs", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="on a CPU: checks that it runs")
    given = parser.parse_args()
    if given.case is not None:
        print(json.dumps(measure(given.case, graphs=given.graphs, tiny=given.tiny)))
        return 0
    given.output.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for case in (name for name in CASES if any(pattern in name for pattern in given.only)):
        for options in ([], ["--graphs"]):
            command = [sys.executable, __file__, str(given.output), "--case", case, *options]
            done = subprocess.run(command + ["--tiny"] * given.tiny, capture_output=True, text=True, timeout=180)
            last = done.stdout.strip().rpartition("\n")[2]
            failed = {"case": case, "graphs": bool(options), "error": done.stderr[-500:]}
            found.append(json.loads(last) if done.returncode == 0 else failed)
            print(json.dumps(found[-1]), flush=True)
            (given.output / "host.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


def measure(case: str, *, graphs: bool, tiny: bool) -> dict[str, Any]:
    import torch
    from peers.sequences import text_data

    from shoal.bench.steps import only_measuring
    from shoal.config.load import load_config
    from shoal.launch.run import start
    from shoal.temporary import temporary_folder
    from shoal.train.step import TrainStep

    with temporary_folder("host-") as work:
        overrides = TINY if tiny else CASES[case]
        sizes = dict(one.split("=", 1) for one in overrides)
        micro_batch = sizes.get("train.micro_batch", "1")
        values = {
            "name": "host",
            "model": {"tokenizer": "bytes"},
            "data": text_data(work, int(sizes["data.max_length"])),
            "train": {"global_batch": int(micro_batch), "cuda_graphs": graphs},
        }
        described = work / "run.yaml"
        described.write_text(json.dumps(values))
        config = only_measuring(load_config(described, overrides), WARMUP + TIMED + PROFILED + 1)
        timed = TimedSteps(torch.cuda.is_available())
        inner = TrainStep.__call__
        TrainStep.__call__ = lambda *given: timed.step(lambda: inner(*given), given[0], given[1])  # type: ignore[method-assign]
        start(config, runs=work / "runs")
    return {"case": case, "graphs": graphs, **timed.found}


class TimedSteps:
    """Times the steps of a run from inside."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda, self.steps, self.began = on_cuda, 0, 0.0
        self.spent: dict[str, float] = {}
        self.found: dict[str, Any] = {}
        self.profile: Any = None

    def step(self, run: Callable[[], Any], train_step: Any, batch: Any) -> Any:
        import torch

        if self.steps == 0:
            for name, owner, method in (
                ("forward and backward", train_step.model, "backward"),
                ("gradient norm", train_step.model.gradients, "norm"),
                ("optimizer", train_step.optimizer, "step"),
            ):
                setattr(owner, method, self._timed(name, getattr(owner, method)))
        if self.steps == WARMUP:
            self._synchronize()
            self.spent.clear()
            self.began = time.perf_counter()
        if self.steps == WARMUP + TIMED:
            self._synchronize()
            seconds = (time.perf_counter() - self.began) / TIMED
            tokens = sum(one.inputs.numel() for one in batch.micro_batches)
            self.found |= {
                "tokens_per_second": round(tokens / seconds),
                "step_ms": round(seconds * 1e3, 3),
                "host_ms": {name: round(value / TIMED * 1e3, 3) for name, value in self.spent.items()},
            }
            self.profile = torch.profiler.profile()
            self.profile.__enter__()
            self.began = time.perf_counter()
        if self.steps == WARMUP + TIMED + PROFILED:
            self._synchronize()
            self.profile.__exit__(None, None, None)
            self.found |= kernels(self.profile.events(), PROFILED)
        self.steps += 1
        return run()

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = method(*given, **named)
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - began
            return result

        return timed

    def _synchronize(self) -> None:
        import torch

        if self.on_cuda:
            torch.cuda.synchronize()


def kernels(events: Any, steps: int) -> dict[str, Any]:
    """Kernels per step, and the share of the time from the first to the last in which one of them runs."""
    import torch

    spans = sorted(
        (one.time_range.start, one.time_range.end)
        for one in events
        if one.device_type == torch.autograd.DeviceType.CUDA and "#" not in one.name  # ranges of the profiler itself
    )
    if not spans:
        return {"kernels": 0, "busy": None}
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return {
        "kernels": round(len(spans) / steps),
        "kernel_ms": round(busy / steps / 1e3, 3),
        "busy": round(busy / (reached - spans[0][0]), 4),
    }


if __name__ == "__main__":
    raise SystemExit(main())

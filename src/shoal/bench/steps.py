"""Runs a few training steps in separate processes and reads their metrics."""

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.bench.output import envelope
from shoal.config.load import config_from_mapping, config_to_yaml, config_values
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.launch.first_look import check_inputs
from shoal.mistakes import RunFailed, UserMistake
from shoal.observe.metrics import read_lines
from shoal.temporary import temporary_folder

MFU_FORMULA = (
    "(6 * matmul parameters + 12 * layers * hidden * length) * tokens / seconds / the device's bf16 peak; "
    "4 instead of 6 for frozen parameters"
)
MISTAKE, OUT_OF_MEMORY = 2, 4  # statuses of the worker
SHARED_CORES = "Processes of a CPU share its cores and memory bandwidth: their times say nothing about several GPUs."


class RanOutOfMemory(RunFailed):
    """The measured training needs more memory than the device has."""


@dataclass(frozen=True)
class Steps:
    """Measurements of a few training steps."""

    tokens_per_second: float  # of the job, or of the single rank, without padding; median step
    tokens_per_second_mean: float  # over all measured steps
    loss_tokens_per_second: float  # over all measured steps
    step_seconds: float  # median
    data_seconds: float  # of which waiting for data
    mfu: float | None
    mfu_formula: str
    allocated_gib: float
    reserved_gib: float | None
    first_step_seconds: float  # from the start of the process
    warmup: int
    steps: int
    world_size: int
    losses: list[float | None]  # of every step, including warmup
    seconds: list[float]
    chosen: dict[str, Any]
    machine: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    sequences: int | None = None  # of an epoch

    def row(self) -> dict[str, Any]:
        """The figures that benches have in common."""
        return {
            "strategy": self.chosen["strategy"],
            "devices": self.world_size,
            "micro_batch": self.chosen["micro_batch"],
            "recompute": self.chosen["recompute"],
            "step_seconds": self.step_seconds,
            "data_seconds": self.data_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "allocated_gib": self.allocated_gib,
            "reserved_gib": self.reserved_gib,
        }

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        machine, config = values.pop("machine"), values.pop("config")
        caveats = [SHARED_CORES] if machine["device"] == "cpu" and self.world_size > 1 else []
        return envelope("train", machine=machine, config=config, rows=[self.row()], caveats=caveats, **values)

    def text(self) -> str:
        share = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        reserved = "" if self.reserved_gib is None else f", {self.reserved_gib:.2f} GiB reserved"
        return "\n".join(
            [
                f"on            {self.world_size} × {self.machine['device']}, torch {self.machine['torch']}",
                f"speed         {self.tokens_per_second:,.0f} tokens/s{share}",
                f"step          {self.step_seconds:.4f} s (median of {self.steps}, after {self.warmup} warmup steps), "
                f"of which {self.data_seconds:.4f} s waiting for data",
                f"memory        {self.allocated_gib:.2f} GiB allocated{reserved}",
                f"first step    {self.first_step_seconds:.1f} s after the start",
            ]
        )


def measure(
    config: Config,
    *,
    steps: int,
    warmup: int,
    worker_options: Sequence[str],
    share: int,
    report: Callable[[str], None],
) -> Steps:
    """Train `warmup` + `steps` steps of `config` without saving, and measure the latter; 1 / `share` of the tokens of a
    step belong to this process."""
    if warmup < 1:
        raise UserMistake("--warmup must be at least 1: the first step compiles and allocates the optimizer state.")
    config = only_measuring(config, warmup + steps)
    with temporary_folder("shoal-bench-") as folder:
        described = folder / "config.yaml"
        described.write_text(config_to_yaml(config))
        run = RunDirectory(folder / "runs" / config.name)
        command = [sys.executable, "-m", "shoal.bench.training_worker", str(described), str(run.path.parent)]
        first_step_seconds = _run([*command, *worker_options], run, warmup + steps, report)
        lines = [line for line in read_lines(run.metrics) if "loss" in line]
        plan = json.loads(run.plan.read_text())
    values = config_values(config)
    return _summarize(lines, plan, values, warmup=warmup, share=share, first_step_seconds=first_step_seconds)


def check_measurable(config: Config) -> None:
    """Find a wrong path in a moment, which otherwise the first process that measures would find."""
    check_inputs(only_measuring(config, 1))


def only_measuring(config: Config, steps: int) -> Config:
    """The same training for `steps` steps, logging every step, without evaluation or checkpoints."""
    values = config_values(config)
    values["train"] |= {"steps": steps, "epochs": None, "tokens": None, "early_stop": None}
    values["eval"]["every"] = 10**9
    values["data"]["validation"] = 0  # otherwise it is evaluated at the end
    # Without a fallback: a new run moves away the checkpoints that another run of its name has there.
    values["checkpoint"] |= {"every": 10**9, "at_end": False, "fallback": None}
    values["log"] |= {"every": 1, "to": []}
    return config_from_mapping(values)


def _run(command: Sequence[str], run: RunDirectory, steps: int, report: Callable[[str], None]) -> float:
    """Run the training to its end; returns the seconds until its first step was done."""
    began = time.perf_counter()
    first: float | None = None
    reported = 0
    with tempfile.TemporaryFile("w+") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        while process.poll() is None:
            time.sleep(0.05)
            done = run.metrics.read_bytes().count(b"\n") if run.metrics.exists() else 0
            if done and first is None:
                first = time.perf_counter() - began
            if done // 10 > reported:
                reported = done // 10
                report(f"step {done} of {steps}")
        if process.returncode:
            output.seek(0)
            message = output.read().strip()
            if process.returncode == MISTAKE:
                raise UserMistake(last_sentence(message))
            if process.returncode == OUT_OF_MEMORY:
                raise RanOutOfMemory(last_sentence(message))
            if process.returncode == -signal.SIGKILL:
                raise RanOutOfMemory("The measured training was killed, as Linux does when the host's memory is full.")
            raise RunFailed(f"The measured training failed: {last_sentence(message)}")
    if first is None:
        first = time.perf_counter() - began
    return first


def last_sentence(output: str) -> str:
    """What a worker said last, or the end of its output if it died without a word."""
    return output.rpartition("shoal: ")[2].strip()[-4000:]


def _summarize(
    lines: list[dict[str, Any]],
    plan: dict[str, Any],
    config: dict[str, Any],
    *,
    warmup: int,
    share: int,
    first_step_seconds: float,
) -> Steps:
    measured = lines[warmup:]
    seconds = [line["seconds"] for line in measured]
    tokens, loss_tokens = (measured[-1][key] - lines[warmup - 1][key] for key in ("tokens", "loss_tokens"))
    speeds = [line["mfu"] for line in measured if line["mfu"] is not None]
    return Steps(
        tokens_per_second=round(statistics.median(line["tokens_per_second"] for line in measured) / share, 1),
        tokens_per_second_mean=round(tokens / sum(seconds) / share, 1),
        loss_tokens_per_second=round(loss_tokens / sum(seconds) / share, 1),
        step_seconds=statistics.median(seconds),
        data_seconds=statistics.median(line["data_seconds"] for line in measured),
        mfu=round(statistics.median(speeds), 4) if speeds else None,
        mfu_formula=MFU_FORMULA,
        allocated_gib=measured[-1]["memory_gib"],
        reserved_gib=measured[-1]["reserved_gib"],
        first_step_seconds=round(first_step_seconds, 1),
        warmup=warmup,
        steps=len(measured),
        world_size=plan["chosen"]["world_size"],
        losses=[line["loss"] for line in lines],
        seconds=[line["seconds"] for line in lines],
        chosen=plan["chosen"],
        machine=plan["machine"],
        config=config,
        sequences=plan["data"].get("sequences"),
    )

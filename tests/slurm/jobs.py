"""Submit tiny runs with the real command, and look at what they have written."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.launch.command import training_lines
from tests.slurm.cluster import Cluster, freeze, task_processes, thaw, wait_until

STEPS = 60  # enough that a run is not over before its processes are found
ASKED, STOPPED = "Stopping after this step", "(signal)"
SHOAL = (sys.executable, "-m", "shoal")
MODEL = {"family": "llama", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 88, "vocab": 260}


def tiny(data: Path, **changes: Any) -> dict[str, Any]:
    """A run of two ranks; `changes` replace or add blocks, key by key."""
    config: dict[str, Any] = {
        "name": "run",
        "model": {"shape": {**MODEL, "positions": 512, "tied": True}, "tokenizer": "bytes"},
        "data": {"source": "text", "path": str(data), "max_length": 96, "pack": False, "validation": 0, "workers": 0},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 4, "lr": 3e-3, "precision": "32-true"},
        "log": {"every": 1, "to": []},
        "hardware": {"nodes": 2, "devices": 1},
        "slurm": {"cpus_per_task": 1},
    }
    config["train"]["deterministic"] = True
    for name, values in changes.items():
        config[name] = {**config[name], **values} if isinstance(values, dict) else values
    return config


@dataclass(frozen=True)
class Job:
    """A job of a run in `folder`/runs/run."""

    cluster: Cluster
    id: str
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    @property
    def log(self) -> Path:
        return self.run / "logs" / f"slurm-{self.id}.out"

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def frozen_at(self, step: int) -> list[int]:
        """Wait until the run has logged this step, and then stop the processes of its second task."""
        wait_until(lambda: max(training_lines(self.run), default=0) >= step, f"step {step}", self.said)
        processes = task_processes(self.id, 1)
        assert processes
        for process in processes:
            freeze(process)
        return processes

    def stopped_by(self, *command: str, frozen: list[int], then: tuple[str, ...] = ()) -> None:
        """Run one of Slurm's commands, and once the run was asked to stop let it go on, after another one."""
        before = self._stops()
        self.cluster.run(*command)
        wait_until(lambda: self._stops() != before, "the run is asked to stop", self.said)
        if then:
            self.cluster.run(*then)
        for process in frozen:
            thaw(process)

    def _stops(self) -> tuple[int, int]:
        """How often the run was asked to stop, and how often it did: a requeue ends srun, and with it what the run says
        while it stops may be lost."""
        return self.said().count(ASKED), self.said().count(STOPPED)


def shoal(cluster: Cluster, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SHOAL, *arguments],
        cwd=folder,
        env={**os.environ, **cluster.environment, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def submit(cluster: Cluster, folder: Path, config: dict[str, Any], *arguments: str) -> Job:
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = shoal(cluster, folder, "submit", "run.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    return Job(cluster, done.stdout.split(":")[0].removeprefix("job "), folder)

"""A training run as a task of submitit, for people whose pipelines use it or Hydra's launcher on top of it.

    executor = submitit.AutoExecutor(folder="jobs")
    executor.update_parameters(nodes=2, tasks_per_node=8, gpus_per_node=8, timeout_min=240)
    job = executor.submit(shoal.launch.submitit_task("run.yaml"))

submitit pickles what it submits, and the results. These are files of the user's own job, read by submitit itself, and
only where this module is used: shoal reads none. `shoal submit` does the same without pickles.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.config.load import config_from_mapping, config_values, load_config
from shoal.config.schema import Config
from shoal.launch.cluster.slurm_commands import run_slurm
from shoal.mistakes import UserMistake

# Set by submitit in the processes that it starts.
EXECUTOR = "SUBMITIT_EXECUTOR"


class SubmititTask:
    """Trains when it is called: alone, or as one task of srun, which joins the others.

    It holds plain values, so that what submitit pickles does not depend on the version of shoal's classes.
    """

    def __init__(self, config: Config, runs: str | None) -> None:
        self.values = config_values(config)
        self.runs = runs

    def __call__(self) -> dict[str, Any]:
        """Train to the end, or resume the run if it exists; returns its summary.

        On the signal that submitit sends before preemption and the time limit, the run finishes its step and saves on
        all ranks. Then submitit's own handler gets the signal: it calls `checkpoint` and requeues the job.
        """
        from shoal.launch.run import start
        from shoal.resilience.signals import received_signal

        config = config_from_mapping(self.values)
        summary = start(config, runs=None if self.runs is None else Path(self.runs), resume="auto")
        if summary.stopped == "signal" and EXECUTOR in os.environ:
            self._hand_over(received_signal())
        return summary.as_dict()

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """What submitit requeues: the same task, which resumes."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *args, **kwargs)

    def _hand_over(self, received: int | None) -> None:
        """End this task without a result: as requeued by submitit's own handler, if the job is to run again."""
        from submitit import JobEnvironment

        environment = JobEnvironment()
        if environment.global_rank != 0:
            # Not with another status: srun may then kill rank 0, which has to requeue.
            raise SystemExit(0)
        preemption = getattr(signal, f"SIG{environment.USR_SIG}")
        if received == preemption or (received == signal.SIGTERM and _still_running()):
            signal.raise_signal(preemption)  # does not return
        raise SystemExit(128 + (received or signal.SIGTERM))


def _still_running() -> bool:
    """Whether Slurm has left the decision to the job: in a grace period before preemption. After scancel and scontrol
    requeue the job is not running any more, and Slurm does what it was told."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return False
    printed = run_slurm(["squeue", "--noheader", f"--jobs={job}", "--format=%T"], "The job cannot be found")
    return printed.strip() == "RUNNING"


def submitit_task(
    config: Config | Mapping[str, Any] | Path | str, overrides: Sequence[str] = (), *, runs: Path | str | None = None
) -> SubmititTask:
    """A callable that trains `config`, for `submitit.AutoExecutor` and Hydra's launchers.

    `config` is a Config, the content of a YAML file (a dict or Hydra's DictConfig), or the path of a file, to which
    `overrides` are applied. Mistakes in it are found here, before anything is submitted.
    """
    if isinstance(config, Path | str):
        found = load_config(config, overrides)
    elif overrides:
        raise UserMistake("overrides are for a file; change the config itself.")
    elif isinstance(config, Config):
        found = config
    else:
        found = config_from_mapping(_plain(config))
    return SubmititTask(found, None if runs is None else str(Path(runs).absolute()))


def _plain(config: Any) -> Mapping[str, Any]:
    """A mapping of plain values, also of Hydra's DictConfig, with its interpolations resolved."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(config):
        plain: Any = OmegaConf.to_container(config, resolve=True)
        return plain  # type: ignore[no-any-return]
    if not isinstance(config, Mapping):
        raise UserMistake(
            f"The config of a task is a {type(config).__name__}, but must be a Config, a mapping or a path."
        )
    return config

"""What a scheduler gets to run: everything about the job of a run, and nothing of the scheduler.

`prepare` makes a `Submission` out of a config. Each scheduler of `launch.schedulers` renders it as one file, and
submits that. None of this imports torch: it runs on login nodes.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.config.run import RunDirectory
from shoal.config.schema import Config, SlurmConfig
from shoal.models.peft_config import follow_adapter
from shoal.paths import user_path
from shoal.plan.machine import read_machine
from shoal.plan.report import Plan, make_plan
from shoal.resilience.signals import STOPPED_FILE

CPU = "cpu"


@dataclass(frozen=True)
class Submission:
    """The job of one run. Paths are absolute, and the same on every node: the file system is shared."""

    name: str  # of the run
    run: Path  # its folder
    config: Path  # the file that the job reads: the resolved config, in the run folder
    folder: Path  # the working folder, which relative paths of the config start from
    nodes: int
    devices: int  # per node
    gpus: bool  # whether the devices are GPUs
    command: tuple[str, ...]  # of one task; every device has one
    environment: Mapping[str, str]  # set for every task
    setup: tuple[str, ...]  # shell lines that run before
    container: str | None  # the image that the command runs in
    slurm: SlurmConfig
    gpu: str | None = None  # the GPU's name in the catalogue, if it is known
    step_seconds: float | None = None  # by the forecast

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    @property
    def logs(self) -> Path:
        return RunDirectory(self.run).logs

    @property
    def stopped(self) -> Path:
        """Written by the run when it has saved a checkpoint and stopped early: the job is to be started again."""
        return stopped_file(self.run)


def prepare(config: Config, plan: Plan | None = None) -> Submission:
    """The job of `config`, whose number of devices is known, and its forecast. Writes nothing."""
    hardware, slurm = config.hardware, config.slurm
    assert hardware.devices != "auto", "a scheduler settles it"
    run = run_directory(config)
    path = Path(os.path.abspath(run.path))
    python = slurm.python or ("python" if slurm.container is not None else sys.executable)
    file = RunDirectory(path).config
    return Submission(
        name=config.name,
        run=path,
        config=file,
        folder=Path.cwd(),
        nodes=hardware.nodes,
        devices=hardware.devices,
        gpus=not hardware.is_cpu,
        # A job that was requeued runs the same command, and resumes.
        command=(python, "-m", "shoal", "train", str(file), "--resume", "auto"),
        environment={**slurm.env, STOPPED_FILE: str(stopped_file(path))},
        setup=slurm.setup,
        container=slurm.container,
        slurm=slurm,
        gpu=None if hardware.is_cpu else hardware.like,
        step_seconds=None if plan is None else plan.choice.speed.step_seconds,
    )


def forecast(config: Config) -> tuple[Plan | None, list[str]]:
    """What `shoal plan` says of the job, and notes. None: the kind of its GPUs is not known here."""
    plan = make_plan(follow_adapter(config))  # its mistakes are those of the job on any device
    if config.hardware.gpu == "auto" and read_machine(config.hardware).is_cpu:
        return None, [
            "Whether the run fits was not checked, because the GPU of the nodes is not known here; set hardware.gpu."
        ]
    return plan, list(plan.notes)


def stopped_file(run: Path) -> Path:
    return run / "stopped"


def run_directory(config: Config) -> RunDirectory:
    return RunDirectory(user_path(Path(config.run_dir) / config.name, "run_dir"))


def check_run(config: Config, *, resume: bool, overwrite: bool = False) -> None:
    """A UserMistake if the run may not start in its folder."""
    run = run_directory(config)
    run.check_not_held()
    run.check(config, resume=resume, overwrite=overwrite)


def write_run(
    config: Config,
    submission: Submission,
    file: str,
    text: str,
    *,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
) -> Path:
    """Create the run's folder with its config and the scheduler's `file`; returns the path of the latter. With
    `overwrite`, an earlier run there is moved aside."""
    run = RunDirectory(submission.run)
    with run.held() if overwrite else nullcontext():
        run.create(config, overwrite=overwrite, say=say)
    path = submission.run / file
    try:
        path.write_text(text)
        run.jobs.touch()  # before the job may start, which would otherwise restore the run that it replaces
    except OSError as error:
        raise run.unwritable(error) from None
    return path


def undo_overwrite(submission: Submission) -> None:
    """Put the run back that `write_run` has moved aside, if it has: there is no job that would replace it."""
    replaced = RunDirectory(submission.run).replaced
    if replaced.exists:
        with suppress(OSError):  # it is still where it was said to be
            replaced.restore()

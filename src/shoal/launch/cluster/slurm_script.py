"""The batch script of a run: one task per device under srun, and the job requeued when the run has stopped early."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from shoal.launch.cluster.submission import Submission
from shoal.mistakes import UserMistake
from shoal.resilience.signals import STOPPED_FILE


def render_script(submission: Submission) -> str:
    """The script that sbatch gets."""
    check_time_to_save(submission)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in batch_options(submission)),
            "",
            *preparation(submission),
            f'rm -f "${STOPPED_FILE}"',
            "",
            shlex.join(task_command(submission)),
            "status=$?",
            "",
            *requeueing(submission),
        ]
    )


def check_time_to_save(submission: Submission) -> None:
    """A UserMistake if a step takes longer than the time between the signal and the time limit."""
    step, before = submission.step_seconds, submission.slurm.signal
    if step is not None and step > before:
        raise UserMistake(
            f"A step takes about {step:.0f} seconds by the forecast, and slurm.signal {before} seconds before the time "
            "limit is too late to finish one and save; raise slurm.signal."
        )


def batch_options(submission: Submission) -> Iterator[str]:
    """The options of sbatch."""
    slurm = submission.slurm
    yield from options(
        {
            "job-name": submission.name,
            "partition": slurm.partition,
            "account": slurm.account,
            "qos": slurm.qos,
            "constraint": slurm.constraint,
            "nodes": submission.nodes,
            "ntasks-per-node": submission.devices,
            "gpus-per-node": gpus(submission),
            "cpus-per-task": slurm.cpus_per_task,
            "mem": slurm.mem,
            "time": slurm.time,
            # To the tasks of srun: the run finishes its step, saves and stops.
            "signal": f"USR1@{slurm.signal}",
            "chdir": submission.folder,
            "output": f"{escaped(submission.logs)}/slurm-%j.out",
        }
    )
    yield "--open-mode=append"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    for option in slurm.extra:
        if "\n" in option or "\r" in option:
            raise UserMistake(f"slurm.extra has an option with a line break: {option!r}; write one option per entry.")
        yield option.removeprefix("#SBATCH").strip()


def preparation(submission: Submission) -> Iterator[str]:
    """The environment, and the user's own lines."""
    for name, value in submission.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    yield from submission.setup


def task_command(submission: Submission) -> list[str]:
    """srun, and the command that it starts once per device."""
    slurm = submission.slurm
    mounted = [f"{folder}:{folder}" for folder in _folders(submission)] + list(slurm.container_mounts)
    # Since Slurm 22.05 srun does not take over --cpus-per-task from sbatch. A rank that fails ends the others at once.
    started = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={slurm.cpus_per_task}"]
    started += list(_plain_options({"cpu-bind": slurm.cpu_bind}))
    inside: list[str] = []
    if slurm.runtime == "pyxis":
        started += list(
            _plain_options(
                {
                    "container-image": slurm.container,
                    "container-mounts": ",".join(mounted),
                    "container-workdir": submission.folder,
                }
            )
        )
    elif slurm.runtime == "apptainer":
        assert slurm.container is not None
        inside = ["apptainer", "exec", *(["--nv"] if submission.gpus else []), f"--pwd={submission.folder}"]
        inside += [f"--bind={mount}" for mount in mounted] + [slurm.container]
    return [*started, *inside, *submission.command]


def requeueing(submission: Submission) -> Iterator[str]:
    """The end of the script: exit with the status of the run, after asking for another start if it has stopped early.

    The tasks of a run that has stopped early exit with 0, not with 75: srun would kill the ranks that are still saving
    when the first one exits with another status. They leave a file instead.
    """
    yield f'if [ "$status" -eq 0 ] && [ -e "${STOPPED_FILE}" ]; then'
    yield "    status=75  # stopped early, with a complete checkpoint"
    if submission.slurm.requeue:
        # Preemption with a grace period leaves the job running, and one that ends by itself is not requeued.
        yield "    # After scancel or scontrol requeue the job is not running any more: Slurm does what it was told."
        yield '    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then'
        yield '        scontrol requeue "$SLURM_JOB_ID"'
        yield "    fi"
    yield "fi"
    yield 'exit "$status"'
    yield ""


def gpus(submission: Submission) -> str | None:
    """The GPUs of a node, as Slurm counts them: [TYPE:]N."""
    if not submission.gpus:
        return None
    kind = submission.slurm.gpu_type
    return f"{submission.devices}" if kind is None else f"{kind}:{submission.devices}"


def options(values: dict[str, object]) -> Iterator[str]:
    """Options for a line of the script, in sbatch's notation, whose quotes are those of a shell."""
    for option in _plain_options(values):
        name, _, value = option.partition("=")
        yield f"{name}={shlex.quote(value)}"


def escaped(path: Path) -> str:
    """A path in the name of an output file, where % begins a pattern."""
    return str(path).replace("%", "%%")


def _plain_options(values: dict[str, object]) -> Iterator[str]:
    for name, value in values.items():
        if value is not None:
            yield f"--{name}={value}"


def _folders(submission: Submission) -> list[Path]:
    """The folders that a container needs: the working folder and that of the runs, unless it is inside."""
    runs = submission.run.parent
    return [submission.folder] if runs.is_relative_to(submission.folder) else [submission.folder, runs]

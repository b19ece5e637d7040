"""A sweep as a job array of Slurm: one task of the array per member, each with a run folder of its own.

The script leaves the exit status of a member in a file, so that what has become of it is known on a cluster without
accounting, too.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.config.schema import Config, HardwareConfig, SlurmConfig
from shoal.launch.cluster import slurm
from shoal.launch.cluster.jobs import JobRecord, write_record
from shoal.launch.cluster.slurm_commands import run_slurm
from shoal.launch.cluster.slurm_script import (
    batch_options,
    check_time_to_save,
    escaped,
    preparation,
    requeueing,
    task_command,
)
from shoal.launch.cluster.submission import Submission, forecast, prepare, write_run
from shoal.launch.sweep.members import Base
from shoal.launch.sweep.results import last_sentence
from shoal.launch.sweep.state import Entry, Sweep
from shoal.mistakes import UserMistake
from shoal.plan.report import Plan
from shoal.resilience.signals import STOPPED_FILE

FILE = "job.sbatch"
RUN = "SHOAL_MEMBER"  # in the script: the run folder of this task's member


def submit_members(
    base: Base, sweep: Sweep, left: Sequence[Entry], *, anyway: bool, report: Callable[[str], None]
) -> None:
    """Submit those of `left` that have no job, as one job array."""
    waiting = [entry for entry in left if entry.state != "submitted"]
    if not waiting:
        return
    jobs = _prepared(base, sweep, dry_run=False)
    indices = [sweep.entries.index(entry) for entry in waiting]
    if not anyway:
        _check_fit([jobs[index] for index in indices])
    path = sweep.folder / FILE
    try:
        path.write_text(_script([job.submission for job in jobs]))
        for index in indices:
            write_run(jobs[index].config, jobs[index].submission, FILE, f"# Number {index} of the array {path}.\n")
            _status(sweep, jobs[index].entry).unlink(missing_ok=True)
    except OSError as error:
        raise UserMistake(f"{error.filename or path} cannot be written: {error.strerror}.") from None
    array = compressed(indices)
    printed = run_slurm(["sbatch", "--parsable", f"--array={array}", str(path)], "The job array cannot be submitted")
    job = printed.strip().partition(";")[0]
    for entry, index in zip(waiting, indices, strict=True):
        sweep.update(entry, state="submitted", attempts=entry.attempts + 1, job=f"{job}_{index}", error=None)
        _follow(sweep, sweep.entries[index])
    report(f"job array {job}, --array={array}, {path}; the same command shows what has become of its members.")


def _follow(sweep: Sweep, entry: Entry) -> None:
    """For `shoal status`, `logs` and `cancel` of a member: its job, and its output in the folder of the run."""
    assert entry.job is not None
    run = sweep.run_of(entry)
    write_record(run, JobRecord("slurm", entry.job, time.time()))
    log = _log(sweep, entry)
    with suppress(OSError):
        (run / "logs" / log.name).symlink_to(Path("..", "..", "logs", log.name))


def update_submitted(sweep: Sweep) -> None:
    """Find out what has become of the members that were submitted before."""
    for entry in [entry for entry in sweep.entries if entry.state == "submitted"]:
        _update(sweep, entry)


def _update(sweep: Sweep, entry: Entry) -> None:
    """By the exit status of the member, or else by what Slurm knows of its job."""
    assert entry.job is not None
    status = _status(sweep, entry)
    state = slurm.states([entry.job]).get(entry.job)
    if state is not None and state.active:
        return
    written = status.read_text().strip() if status.is_file() else ""
    if written == "0":
        sweep.update(entry, state="done")
        return
    log = _log(sweep, entry)
    how = f"it ended with status {written}" if written else _without_status(state.state if state else None)
    sweep.update(entry, state="failed", error=(last_sentence(log) if written else None) or f"{how}; see {log}")


def _without_status(state: str | None) -> str:
    return "Slurm does not know its job any more" if state is None else f"Slurm says that its job was {state}"


def render(base: Base, sweep: Sweep, *, dry_run: bool) -> str:
    """The script of all members."""
    return _script([job.submission for job in _prepared(base, sweep, dry_run=dry_run)])


def compressed(indices: Sequence[int]) -> str:
    """Numbers as `--array` takes them: 0-3,7."""
    groups: list[list[int]] = []
    for index in sorted(indices):
        if groups and groups[-1][-1] == index - 1:
            groups[-1].append(index)
        else:
            groups.append([index])
    return ",".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


@dataclass(frozen=True)
class _Job:
    """The job of one member."""

    entry: Entry
    config: Config
    submission: Submission
    plan: Plan | None  # None: it cannot be forecast here


def _prepared(base: Base, sweep: Sweep, *, dry_run: bool) -> list[_Job]:
    """The job of every member. A job array has one size and one set of options."""
    found: list[_Job] = []
    asked: tuple[HardwareConfig, SlurmConfig] | None = None
    for entry in sweep.entries:
        config = base.load(entry.member.overrides)
        config = config.model_copy(update={"name": entry.name, "run_dir": str(sweep.folder)})
        if (config.hardware, config.slurm) != asked:  # the cluster is asked once if all members are alike
            asked = config.hardware, config.slurm
            hardware = slurm.settle(config, dry_run=dry_run).hardware
        settled = config.model_copy(update={"hardware": hardware})
        plan, _ = forecast(settled)
        submission = prepare(settled, plan)
        check_time_to_save(submission)
        kept = config.hardware.model_copy(update={"devices": submission.devices})
        found.append(_Job(entry, config.model_copy(update={"hardware": kept}), submission, plan))
    first = found[0].submission
    for job in found:
        one = job.submission
        if (one.nodes, one.devices, one.gpus, one.slurm) != (first.nodes, first.devices, first.gpus, first.slurm):
            raise UserMistake(
                f"{job.entry.name} needs other nodes or options of Slurm than {sweep.entries[0].name}, but a job array "
                "has one size for all; sweep over hardware and slurm with separate commands."
            )
    return found


def _check_fit(jobs: Sequence[_Job]) -> None:
    mistakes = [
        f"{job.entry.member.shown}: this does not fit on {job.plan.choice.machine.gpu.name}; shoal plan says what "
        "would, and --anyway submits it nevertheless."
        for job in jobs
        if job.plan is not None and not job.plan.fits
    ]
    if mistakes:
        raise UserMistake("\n".join(mistakes))


def _script(submissions: Sequence[Submission]) -> str:
    folder = Path(submissions[0].run).parent
    # What differs between members is the run folder, which every task of the array looks up.
    common = replace(submissions[0], name=folder.name)
    environment = {name: value for name, value in common.environment.items() if name != STOPPED_FILE}
    command = task_command(common)
    place = command.index(str(common.config))
    options = [option for option in batch_options(common) if not option.startswith("--output=")]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        f"#SBATCH --output={shlex.quote(f'{escaped(folder)}/logs/slurm-%A_%a.out')}",
        f"#SBATCH --array={compressed(range(len(submissions)))}",
        "",
        *_choice(submissions),
        *preparation(replace(common, environment=environment)),
        f'export {STOPPED_FILE}="${RUN}/stopped"',
        f'rm -f "${STOPPED_FILE}"',
        "",
        f'{shlex.join(command[:place])} "${RUN}/config.yaml" {shlex.join(command[place + 1 :])}',
        "status=$?",
        "",
        f'if [ ! -e "${STOPPED_FILE}" ]; then',
        f'    echo "$status" > {shlex.quote(f"{folder}/logs")}/"$(basename "${RUN}")".status',
        "fi",
        *requeueing(common),
    ]
    return "\n".join(lines)


def _choice(submissions: Sequence[Submission]) -> Iterator[str]:
    yield 'case "$SLURM_ARRAY_TASK_ID" in'
    for index, one in enumerate(submissions):
        yield f"    {index}) {RUN}={shlex.quote(str(one.run))} ;;"
    yield "esac"


def _status(sweep: Sweep, entry: Entry) -> Path:
    return sweep.folder / "logs" / f"{entry.name}.status"


def _log(sweep: Sweep, entry: Entry) -> Path:
    return sweep.folder / "logs" / f"slurm-{entry.job}.out"

"""Slurm's commands, run without a shell: what they print, or a UserMistake with what they said."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from shoal.mistakes import UserMistake, shortened

PATIENCE = 60  # seconds; a controller that is busy may take long


ELSEWHERE = "run this on a login node of the cluster. shoal submit --dry-run shows the script without Slurm."


def run_slurm(command: Sequence[str], doing: str, *, hint: str = "") -> str:
    """The output of one of Slurm's commands; `doing` begins the sentence if it fails: «The job cannot be submitted»,
    and `hint` ends it, with what to do."""
    if shutil.which(command[0]) is None:
        raise UserMistake(f"{doing}: there is no {command[0]} on this machine; {ELSEWHERE}")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=_environment(command[0])
        )
    except subprocess.TimeoutExpired:
        raise UserMistake(f"{doing}: {command[0]} gave no answer in {PATIENCE} seconds{hint or '.'}") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        reason = next((line for line in reversed(said) if "error: " in line or "fatal: " in line), said[-1])
        reason = reason.rpartition("error: ")[2].rpartition("fatal: ")[2].rstrip(".")
        raise UserMistake(f"{doing}: {command[0]} says: {shortened(reason)}{hint or '.'}")
    return done.stdout


def _environment(command: str) -> dict[str, str]:
    """Without variables that would change what a command prints or requests, such as SQUEUE_FORMAT and SBATCH_TIME;
    those of a job that this process may run in do so too."""
    prefixes: tuple[str, ...] = ("SBATCH_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SLURM_TIME_FORMAT")
    if command == "sbatch":  # a job that is submitted from within another must not inherit its layout
        prefixes += ("SLURM_",)
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(prefixes)}

"""What the schedulers besides Slurm share: the same block of the config, commands of other programs, YAML."""

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from shoal.config.schema import Config
from shoal.launch.cluster.submission import Submission
from shoal.mistakes import UserMistake
from shoal.resilience.signals import STOPPED_FILE

# Seconds for a scheduler to answer.
PATIENCE = 120
# Options of the block `slurm` that only Slurm has.
ONLY_SLURM = ("partition", "account", "qos", "constraint", "cpu_bind", "container_runtime", "extra")
PORT = 29500  # where the nodes meet, as torchrun's default


def settle_without_cluster(config: Config, scheduler: str) -> Config:
    """The number of devices has to be given: no cluster is asked. A UserMistake for what only Slurm understands."""
    if config.hardware.devices == "auto":
        raise UserMistake(f"hardware.devices is auto, but {scheduler} has to be told; set the devices per node.")
    for key in ONLY_SLURM:
        if key in config.slurm.model_fields_set:
            raise UserMistake(f"slurm.{key} means nothing to {scheduler}; remove it, or submit with --to slurm.")
    return config


def launch_command(submission: Submission, *, rank: str, address: str, script: bool = True) -> str:
    """torchrun on one node, which starts a process per device. `rank` and `address` are shell expressions: the node's
    number and the first node's address."""
    python, *command = submission.command
    fixed = [python, "-m", "torch.distributed.run", f"--nnodes={submission.nodes}"]
    fixed += [f"--nproc-per-node={submission.devices}"]
    meeting = (
        f"--node-rank={rank} --master-addr={address} --master-port={PORT}" if submission.nodes > 1 else "--standalone"
    )
    return f"{shlex.join(fixed)} {meeting} {shlex.join(command)}"


def node_script(submission: Submission, *, rank: str, address: str) -> str:
    """The shell lines of one node: setup, training, and status 75 if the run has stopped early and is to be started
    again."""
    lines = [
        *submission.setup,
        f'if [ "{rank}" = 0 ]; then rm -f "${STOPPED_FILE}"; fi',
        launch_command(submission, rank=f'"{rank}"', address=address),
        "status=$?",
        f'if [ "$status" -eq 0 ] && [ -e "${STOPPED_FILE}" ]; then',
        "    status=75  # stopped early, with a complete checkpoint: start it again",
        "fi",
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def mounts(submission: Submission) -> Iterator[tuple[str, str]]:
    """(source, target) of `slurm.container_mounts`. A source may be a URL, which has a colon of its own."""
    for text in submission.slurm.container_mounts:
        source, _, target = text.rpartition(":")
        if not source or not target.startswith("/"):
            raise UserMistake(f"slurm.container_mounts {text}: write it as SOURCE:TARGET, with an absolute target.")
        yield source, target


def mounted(submission: Submission, folder: Path) -> bool:
    return any(folder.is_relative_to(target) for _, target in mounts(submission))


def dns_name(name: str, longest: int) -> str:
    """A name as DNS and Kubernetes allow it."""
    spelled = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    return (spelled if spelled[0].isalpha() else f"run-{spelled}")[:longest].rstrip("-")


def ask(command: Sequence[str], otherwise: str) -> str:
    """Standard output of another program; a UserMistake that begins with `otherwise` if it fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        raise UserMistake(
            f"{otherwise}: there is no {command[0]} on this machine; install it, or print the file with --dry-run and "
            "submit it where there is one."
        ) from None
    except subprocess.TimeoutExpired:
        raise UserMistake(f"{otherwise}: {command[0]} has not answered in {PATIENCE} s.") from None
    if ended.returncode != 0:
        said = (ended.stderr or ended.stdout).strip().splitlines()
        raise UserMistake(f"{otherwise}: {said[-1] if said else f'{command[0]} ended with {ended.returncode}'}")
    return ended.stdout


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, as a person would write them."""


def _show_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _show_text)


def write_manifest(comment: str, content: dict[str, Any]) -> str:
    body = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return "".join(f"# {line}\n" for line in comment.splitlines()) + body

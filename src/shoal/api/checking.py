"""Examine this node and the links between processes, and describe a run for an issue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.api.arguments import as_list
from shoal.api.training import AnyConfig, read
from shoal.mistakes import UserMistake
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.launch.doctor.finding import Diagnosis, Finding


def doctor(
    config: AnyConfig | None = None,
    *,
    runs: Path | str | None = None,
    devices: int | None = None,
    reach: Sequence[str] = (),
    show: Callable[[Finding], None] = lambda finding: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Diagnosis:
    """Check this node and, with several devices or under torchrun or srun, the links between the processes.

    `config` says which run directory, devices and links are meant; `runs` replaces its `run_dir`. `reach` are addresses
    HOST:PORT that must answer. `show` gets each finding as it is made, `say` what is waited for.
    """
    from shoal.bench.doctor_launch import examine
    from shoal.launch.doctor.setting import Setting

    config = None if config is None else read(config)
    reach = as_list(reach)
    for address in reach:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise UserMistake(f"--reach {address}: give an address as HOST:PORT, such as node01:29500.")
    root = user_path("runs" if runs is None and config is None else runs or config.run_dir, "run_dir")  # type: ignore[union-attr]
    folder = root if config is None else root / config.name
    return examine(Setting(folder, config, devices, tuple(reach)), show=show, say=say)


def doctor_report(run: Path | str) -> str:
    """What an issue about the run in this folder should contain, without secrets: Markdown."""
    from shoal.launch.doctor.report import describe_run

    return describe_run(user_path(run, "RUN"))

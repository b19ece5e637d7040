"""Mistakes in the inputs of a run that are found in a moment, before torch is imported."""

import os
from pathlib import Path

from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.launch.environment import read_placement
from shoal.paths import user_path


def check_folder(config: Config, runs: Path | None, *, resume: bool, overwrite: bool) -> None:
    """Find a run that would be written over, and one to resume that is not there. A process that others have started
    may come after rank 0 has begun, or be started again: there the ranks find out together."""
    if "TORCHELASTIC_RESTART_COUNT" in os.environ or read_placement(os.environ) is not None:
        return
    parent = user_path(config.run_dir if runs is None else runs, "run_dir")
    folder = user_path(parent / config.name, "run_dir")
    RunDirectory(folder).check_begun(resume=resume, overwrite=overwrite)


def check_inputs(config: Config, *, resume: bool = False) -> None:
    """Find a wrong path, an id that is not cached and an unknown format."""
    from shoal.data.first_look import check_first_record
    from shoal.models.hub import local_folder
    from shoal.models.peft_config import adapter_folder
    from shoal.observe.sinks import check_packages

    check_packages(config.log.to)

    if config.model.from_ is not None and not RunDirectory(user_path(config.model.from_, "model.from")).exists:
        local_folder(config.model.from_, "model.from")
    if config.adapter.from_ is not None and not resume:  # a checkpoint holds what was read from it
        adapter_folder(config.adapter.from_)
    check_first_record(config.data, config.train.objective)

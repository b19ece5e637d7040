"""Mistakes in the inputs of a run that are found in a moment, before torch is imported."""

from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.paths import user_path


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

"""A run as the model that another one starts from: `model.from: runs/NAME`."""

from collections.abc import Callable
from pathlib import Path

from shoal.checkpoint.choose import choose_checkpoint
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.convert.export import export_hf
from shoal.data.cache import obtain
from shoal.paths import user_path

EXPORTED = "exported"  # in the folder of the run


def with_exported(config: Config, report: Callable[[str], None]) -> Config:
    """`config` with the Hugging Face folder of the newest checkpoint in place of a run in `model.from`. It is written
    into that run's folder, once."""
    if config.model.from_ is None or not is_run(config.model.from_):
        return config
    run = RunDirectory(user_path(config.model.from_, "model.from"))
    step = choose_checkpoint(run.path, None).step

    def build(folder: Path) -> None:
        export_hf(run.path, folder, step=step)

    folder, _ = obtain(run.path / EXPORTED, f"step-{step:08d}", build, report)
    report(f"model.from {config.model.from_} is a run: starting from its step {step}, exported to {folder}.")
    return config.model_copy(update={"model": config.model.model_copy(update={"from_": str(folder)})})


def is_run(name: str) -> bool:
    """Whether `model.from` names the folder of a run."""
    return RunDirectory(user_path(name, "model.from")).exists

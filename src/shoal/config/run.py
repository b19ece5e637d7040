"""The run directory: all state of a run, and the names of its files."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.config.load import config_to_yaml, load_config
from shoal.config.schema import Config
from shoal.files import write_atomically
from shoal.mistakes import UserMistake

# A resumed run may not change these: they determine the model, the sequences, the steps they are in, and the optimizer
# state.
IDENTITY = ("model", "adapter", "data", "seed", "train.global_batch", "train.optimizer.name")
# Exceptions, which do not change the results. Files may move: training compares their contents.
INCIDENTAL = ("model.attention", "data.workers", "data.path")


class RunDirectory:
    """runs/NAME. Other programs depend on these names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.model = path / "model"  # the model's config and tokenizer, for exports

    @property
    def exists(self) -> bool:
        return self.config.is_file()

    @property
    def begun(self) -> bool:
        """Whether there is anything to lose: a run that ended before its first step left nothing."""
        return self.exists and (self.metrics.is_file() or any(self.checkpoints.glob("step-*")))

    def check(self, config: Config, *, resume: bool, overwrite: bool, start_from: Path | None = None) -> list[str]:
        """Check that a run may start here; returns the differences from the existing run. Changes nothing."""
        with self.held():
            pass
        if overwrite and start_from is not None and start_from.resolve().is_relative_to(self.path.resolve()):
            raise UserMistake(f"--overwrite would delete {start_from}, which --from starts from.")
        if resume and overwrite:
            raise UserMistake("--resume continues the run and --overwrite deletes it; give one of them.")
        if self.begun and not (resume or overwrite):
            raise UserMistake(
                f"{self.path} already holds a run; add --resume to continue it, --overwrite to delete it, "
                "or another name=…"
            )
        if self.exists:
            return self._compare(config) if resume else []
        if resume:
            raise UserMistake(f"--resume: there is no run in {self.path}; start it without --resume.")
        if self.path.exists() and any(self.path.iterdir() if self.path.is_dir() else [self.path]):
            raise UserMistake(f"{self.path} exists and is not a shoal run; choose another name=…")
        return []

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock: no other process trains in this directory meanwhile."""
        if not self.exists:
            yield
            return
        with (self.path / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserMistake(
                    f"Another process is training in {self.path}; wait for it or stop it, or choose another name=…"
                ) from None
            yield

    def create(self, config: Config, *, overwrite: bool) -> None:
        """Create the directories and write the config, after `check`."""
        try:
            if overwrite and self.exists:
                shutil.rmtree(self.path)
            self.make(config)
        except OSError as error:
            raise UserMistake(f"{self.path} cannot be written: {error.strerror}.") from None

    def make(self, config: Config) -> None:
        """Create the directories and write the config without checks; raises `OSError` if the disk refuses."""
        for folder in (self.path, self.checkpoints, self.logs, self.model):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.config, config_to_yaml(config))

    def _compare(self, config: Config) -> list[str]:
        before = load_config(self.config)
        changes = differences(before.model_dump(by_alias=True), config.model_dump(by_alias=True))
        for key, (old, new) in changes.items():
            moved = key == "data.validation" and isinstance(old, str) and isinstance(new, str)
            if moved or key in INCIDENTAL:
                continue
            if any(key == name or key.startswith(name + ".") for name in IDENTITY):
                raise UserMistake(
                    f"--resume: {key} was {old!r} in {self.config} and is {new!r} now, which a resumed run cannot "
                    "change; restore it, or start a new run under another name=…"
                )
        return [f"{key} was {old!r} and is {new!r} now" for key, (old, new) in changes.items()]


def differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key → (before, after), for each key that differs."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found.update(differences(old, new, f"{prefix}{key}."))
        elif old != new:
            found[prefix + key] = (old, new)
    return dict(sorted(found.items()))

"""The run directory: the only state of a run, and the names of what is in it."""

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

# A change of these makes another run of it: another model, other rows, the same rows in other steps, or a state
# that the optimizer cannot read.
IDENTITY = ("model", "adapter", "data", "seed", "train.global_batch", "train.optimizer.name")
# How the same is computed, and how it is read.
INCIDENTAL = ("model.attention", "data.workers")


class RunDirectory:
    """runs/NAME. Other programs rely on these names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.plan = path / "plan.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.model = path / "model"  # the model's config and tokenizer, which an export needs

    @property
    def exists(self) -> bool:
        return self.config.is_file()

    @property
    def begun(self) -> bool:
        """Whether there is anything to lose: a start that ended before its first step left nothing."""
        return self.exists and (self.metrics.is_file() or any(self.checkpoints.glob("step-*")))

    def check(self, config: Config, *, resume: bool, overwrite: bool, start_from: Path | None = None) -> list[str]:
        """Whether a run may start here; says what differs from the run that is there. Changes nothing."""
        with self.held():
            pass
        if overwrite and start_from is not None and start_from.resolve().is_relative_to(self.path.resolve()):
            raise UserMistake(f"--overwrite would throw away {start_from}, which --from starts with.")
        if resume and overwrite:
            raise UserMistake("--resume goes on with the run and --overwrite throws it away; give one of them.")
        if self.begun and not (resume or overwrite):
            raise UserMistake(
                f"{self.path} holds a run already; add --resume to go on with it, --overwrite to throw it away, "
                "or another name=…"
            )
        if self.exists:
            return self._compare(config) if resume else []
        if resume:
            raise UserMistake(f"--resume: there is no run in {self.path}; start it without --resume.")
        if self.path.exists() and any(self.path.iterdir() if self.path.is_dir() else [self.path]):
            raise UserMistake(f"{self.path} is there and is not a run of shoal; choose another name=…")
        return []

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this lasts, no other process trains in this folder."""
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
        """Make the folders and write the config, after `check`."""
        try:
            if overwrite and self.exists:
                shutil.rmtree(self.path)
            self.make(config)
        except OSError as error:
            raise UserMistake(f"{self.path} cannot be written: {error.strerror}.") from None

    def make(self, config: Config) -> None:
        """The folders and the config, whatever is there; an `OSError` where the disk does not take it."""
        for folder in (self.path, self.checkpoints, self.logs, self.model):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.config, config_to_yaml(config))

    def _compare(self, config: Config) -> list[str]:
        before = load_config(self.config)
        changes = differences(before.model_dump(by_alias=True), config.model_dump(by_alias=True))
        for key, (old, new) in changes.items():
            if key not in INCIDENTAL and any(key == name or key.startswith(name + ".") for name in IDENTITY):
                raise UserMistake(
                    f"--resume: {key} was {old!r} in {self.config} and is {new!r} now, which makes it another run; "
                    "put it back, or start a new run under another name=…"
                )
        return [f"{key} was {old!r} and is {new!r} now" for key, (old, new) in changes.items()]


def differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key → (before, after), for every key that differs."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found.update(differences(old, new, f"{prefix}{key}."))
        elif old != new:
            found[prefix + key] = (old, new)
    return dict(sorted(found.items()))

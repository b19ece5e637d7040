"""The run directory: all state of a run, and the names of its files."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.config.load import config_to_yaml, load_config
from shoal.config.lock import locked
from shoal.config.replaced import ReplacedRun, has_checkpoint, is_run
from shoal.config.schema import Config
from shoal.files import TEMPORARY, write_atomically
from shoal.mistakes import UserMistake

# A resumed run may not change these: they determine the model, the sequences, the steps they are in, and the optimizer
# state.
IDENTITY = ("model", "adapter", "data", "seed", "train.objective", "train.global_batch", "train.optimizer.name")
# Exceptions, which do not change the results. Files may move: training compares their contents.
INCIDENTAL = ("model.attention", "data.workers", "data.path")
# What the script of a custom loop makes, whatever its config says: whole blocks, and keys of `train`.
BLOCKS_OF_SCRIPT = ("model", "adapter", "data", "eval")
MADE_BY_SCRIPT = ("lr", "lr_groups", "schedule", "optimizer", "objective", "loss_impl", "cuda_graphs", "early_stop")


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
        self.base = path / "base.json"  # of an adapter: which model it belongs to
        self.jobs = path / "jobs.jsonl"  # a line per job that a scheduler was given, only appended to
        # Beside the folder, which --overwrite moves. A folder that is a link has the same lock under all its names.
        self._folder = Path(os.path.realpath(path)) if path.is_symlink() else path
        self.lock = self._folder.with_name(f".{self._folder.name}.lock")
        self.replaced = ReplacedRun(self._folder)

    @property
    def exists(self) -> bool:
        return is_run(self.path)

    @property
    def begun(self) -> bool:
        """Whether there is anything to lose: a run that ended before its first step left nothing."""
        logged = os.path.isfile(self.metrics) and self.metrics.stat().st_size > 0
        return self.exists and (logged or any(self.checkpoints.glob("step-*")))

    @property
    def is_job(self) -> bool:
        """Whether the run was submitted to a scheduler: its folder is made before it starts."""
        return os.path.isfile(self.jobs)

    def check(self, config: Config, *, resume: bool, overwrite: bool, start_from: Path | None = None) -> list[str]:
        """Check that a run may start here; returns the differences from the existing run. Changes nothing."""
        try:
            return self._check(config, resume=resume, overwrite=overwrite, start_from=start_from)
        except OSError as error:
            raise UserMistake(f"{self.path} cannot be read: {error.strerror}.") from None

    def _check(self, config: Config, *, resume: bool, overwrite: bool, start_from: Path | None) -> list[str]:
        if resume and overwrite:
            raise UserMistake("--resume continues the run and --overwrite deletes it; give one of them.")
        if overwrite:
            self._check_not_read(config, start_from)
            if os.path.lexists(self.replaced.path) and not self.replaced.exists:
                raise UserMistake(
                    f"{self.replaced.path} is not a run that --overwrite moved there; move it, or choose another name=…"
                )
        self._check_begun(resume=resume, overwrite=overwrite)
        if self.exists and resume:
            return self._compare(config)
        if not (self._is_ours() if self.exists else self._is_empty()):
            raise UserMistake(f"{self.path} exists and is not a shoal run; choose another name=…")
        return []

    def check_begun(self, *, resume: bool, overwrite: bool) -> None:
        """Check that nobody trains here, and that there is a run to resume, or none to write over: what can be said
        before anything is read."""
        if self.replaced.exists:  # what is there is settled when a run starts
            return
        self.check_not_held()
        try:
            self._check_begun(resume=resume, overwrite=overwrite)
        except OSError as error:
            raise UserMistake(f"{self.path} cannot be read: {error.strerror}.") from None

    def _check_begun(self, *, resume: bool, overwrite: bool) -> None:
        if self.begun and not (resume or overwrite):
            raise UserMistake(
                f"{self.path} already holds a run; add --resume to continue it, --overwrite to delete it, "
                "or another name=…"
            )
        if resume and not self.exists:
            raise UserMistake(f"--resume: there is no run in {self.path}; start it without --resume.")

    def _check_not_read(self, config: Config, start_from: Path | None) -> None:
        """A UserMistake if the new run reads from the run that it replaces."""
        read = {
            "--from": start_from,
            "model.from": config.model.from_,
            "adapter.from": config.adapter.from_,
            "model.tokenizer": config.model.tokenizer,
            "data.path": config.data.path,
            "data.validation": config.data.validation,
        }
        deleted = [folder.resolve() for folder in (self.path, self.replaced.path)]
        for key, given in read.items():
            for value in given if isinstance(given, list | tuple) else [given]:
                if not isinstance(value, str | Path):
                    continue
                path = Path(value).expanduser()
                if any(path.resolve().is_relative_to(folder) for folder in deleted):
                    raise UserMistake(
                        f"--overwrite would delete {path}, which {key} names; move it, or choose another name=…"
                    )

    def _is_ours(self) -> bool:
        """Whether the config is one of ours. Nothing is deleted or written over in a folder of another program."""
        try:
            load_config(self.config, needs_model=False)
        except UserMistake:
            return False
        return True

    def _is_empty(self) -> bool:
        """Whether there is nothing but what a killed start leaves: empty folders, and a config that is half written."""
        if not self.path.is_dir():
            return not self.path.exists()
        partial = self.config.with_name(self.config.name + TEMPORARY)
        return all((file.is_dir() and not file.is_symlink()) or file == partial for file in self.path.rglob("*"))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock: no other process trains in this directory meanwhile."""
        otherwise = f"Another process is training in {self.path}; wait for it or stop it, or choose another name=…"
        with ExitStack() as stack:
            try:
                self.lock.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.lock, otherwise=otherwise))
            except OSError as error:
                raise self.unwritable(error) from None
            yield

    def check_not_held(self) -> None:
        """A UserMistake if another process trains in this directory."""
        if os.path.lexists(self.lock):
            with self.held():
                pass

    def recover(self, say: Callable[[str], None]) -> None:
        """Settle what an `--overwrite` that was killed has left."""
        if not (self.replaced.exists or self.replaced.removed.exists()):
            return
        with self.held():
            self.replaced.finish_removal()
            if not self.replaced.exists:
                return
            if has_checkpoint(self.path):
                with suppress(OSError):
                    self.replaced.delete()
            elif not (self.begun or self.is_job) and (self.exists or self._is_empty()):  # not over another's folder
                self._restore(say)

    @contextmanager
    def replacing(self, *, restores: bool, say: Callable[[str], None], warn: Callable[[str], None]) -> Iterator[None]:
        """At the end of a run that has no checkpoint, the run that it replaced is restored, if the new one has failed
        without having written anything and `restores` is true, or else it is said where it is. That of a job stays
        aside: the folder holds the job's log, which says why it failed."""
        try:
            yield
        except BaseException:
            if restores and self.replaced.exists and not (self.begun or self.is_job):
                self._restore(say)
            raise
        finally:
            if self.replaced.exists:
                warn(
                    f"the run that this one replaced is still in {self.replaced.path}: this one has no complete "
                    "checkpoint."
                )

    def _restore(self, say: Callable[[str], None]) -> None:
        try:
            self.replaced.restore()
        except OSError:
            return  # it is said where the run is
        say(f"{self.path} was restored: the run that was to replace it ended before its first step.")

    def create(self, config: Config, *, overwrite: bool, say: Callable[[str], None] = lambda sentence: None) -> None:
        """Create the directories and write the config, after `check`."""
        try:
            if overwrite and self.exists:
                self.replaced.set_aside()
                say(f"The old run is in {self.replaced.path} until this one has a complete checkpoint.")
            self.make(config)
        except OSError as error:
            raise self.unwritable(error) from None

    def make(self, config: Config) -> None:
        """Create the directories and write the config without checks; raises `OSError` if the disk refuses."""
        for folder in (self._folder, self.checkpoints, self.logs, self.model):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.config, config_to_yaml(config))

    def unwritable(self, error: OSError) -> UserMistake:
        return UserMistake(f"{self.path} cannot be written: {error.strerror}. Set run_dir to another folder for runs.")

    def _compare(self, config: Config) -> list[str]:
        before = load_config(self.config, needs_model=False)
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

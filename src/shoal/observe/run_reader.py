"""Read a run's folder for the pages that show it, also while the run writes to it. Imports no torch.

Files may be missing, half written or damaged: what can be read is shown, and the rest is named in `problems`.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from shoal.config.locate import parse_document
from shoal.config.lock import holder
from shoal.config.run import RunDirectory
from shoal.mistakes import UserMistake
from shoal.observe.json_lines import GrowingLines, open_regular

Values = dict[str, Any]

LARGEST = 16 * 2**20  # bytes of a file that is read at once; those of a run are far smaller


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint: its folder has a valid manifest."""

    step: int
    size: int  # in bytes
    metrics: dict[str, float]
    saved: float | None  # when, in Unix seconds
    latest: bool


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What the files of a run say. Each record is itself, so that what follows from it can be kept."""

    path: Path
    name: str
    state: str  # new, running, finished, stopped, failed, died
    detail: str  # why it failed
    read: float  # when, in Unix seconds
    config: Values
    config_text: str
    plan: Values
    training: list[Values]  # lines of `metrics.jsonl`, one per step
    evaluations: list[Values]
    events: list[Values]
    checkpoints: list[SavedCheckpoint]
    profile: Values
    problems: list[str]

    def get(self, *keys: str) -> Any:
        """A value of the config."""
        return look_up(self.config, *keys)

    def planned(self, *keys: str) -> Any:
        """A value of `plan.json`."""
        return look_up(self.plan, *keys)

    @property
    def steps(self) -> int | None:
        found = number(self.plan.get("steps"))
        return None if found is None else int(found)

    @property
    def custom(self) -> bool:
        """Whether a loop of the user's own trains: it counts samples, and the config says nothing of model and data."""
        return self.plan.get("custom_loop") is True

    @property
    def step(self) -> int | None:
        return int(self.training[-1]["step"]) if self.training else None


class RunReader:
    """Reads a run's folder again and again; of files that grow, only what is new.

    Without `follow_links`, files and folders that are symbolic links count as missing.
    """

    def __init__(self, path: Path, *, config: Mapping[str, Any] | None = None, follow_links: bool = True) -> None:
        self.run = RunDirectory(path)
        self.follow_links = follow_links
        self._metrics = GrowingLines(self.run.metrics, follow_links)
        self._events = GrowingLines(path / "events.jsonl", follow_links)
        self._given = None if config is None else dict(config)
        self._parsed: tuple[str, Values] | None = None

    def read(self, *, state: str | None = None, detail: str = "", config: bool = True) -> RunRecord:
        """What the files say now. `state`, if the caller knows it better than they do. Without `config`, which takes
        the longest to parse, that is empty."""
        problems: list[str] = []
        path = self.run.path
        if state is None:
            state, detail = self._state()
        config_text = self._text("config.yaml", problems) or ""
        training, evaluations = kept_lines(self._metrics.read())
        if state == "new" and training:
            state, detail = "died", "it was killed"
        return RunRecord(
            path=path,
            name=os.path.basename(os.path.abspath(path)),
            state=state,
            detail=detail,
            read=time.time(),
            config=self._config(config_text, problems) if config else {},
            config_text=config_text,
            plan=self._json("plan.json", problems),
            training=training,
            evaluations=evaluations,
            events=[one for one in self._events.read() if isinstance(one.get("event"), str)],
            checkpoints=list(self._checkpoints()),
            profile=self._json("profile/summary.json", problems),
            problems=problems,
        )

    def stamp(self) -> tuple[object, ...]:
        """Changes whenever `read` would return something else, except by the passing of time."""
        names = ("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "outcome.json", "profile/summary.json")
        stats = [_stat(self.run.path / name) for name in (*names, "checkpoints", "checkpoints/latest")]
        return (holder(self.run.lock), *((one.st_mtime_ns, one.st_size, one.st_ino) if one else None for one in stats))

    def _state(self) -> tuple[str, str]:
        if holder(self.run.lock) is not None:
            return "running", ""
        outcome = self._json("outcome.json", [])
        if isinstance(state := outcome.get("state"), str):
            why = outcome.get("why")
            return state, str(why) if why and state == "failed" else ""
        return "new", ""

    def _config(self, text: str, problems: list[str]) -> Values:
        if self._given is not None:
            return self._given
        if self._parsed is None or self._parsed[0] != text:
            value: Any = {}
            try:
                value = parse_document(text, "config.yaml").value
            except UserMistake as mistake:
                problems.append(str(mistake))
                return {}
            self._parsed = (text, value if isinstance(value, dict) else {})
        return self._parsed[1]

    def _json(self, name: str, problems: list[str]) -> Values:
        text = self._text(name, problems)
        if text is None:
            return {}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            problems.append(f"{name} is not valid JSON")
            return {}
        return found if isinstance(found, dict) else {}

    def _text(self, name: str, problems: list[str]) -> str | None:
        """The contents of a file of the run; None if there is none."""
        path = self.run.path / name
        if not self.follow_links and any(one.is_symlink() for one in (path, path.parent)):
            return None
        try:
            with open_regular(path) as file:
                content = file.read(LARGEST + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            return None
        if len(content) > LARGEST:
            problems.append(f"{name} is larger than {LARGEST // 2**20} MiB")
            return None
        return content.decode("utf-8", errors="replace")

    def _checkpoints(self) -> Iterator[SavedCheckpoint]:
        folder = self.run.checkpoints
        if not self.follow_links and folder.is_symlink():
            return
        latest = (self._text("checkpoints/latest", []) or "").strip()
        for path in sorted(folder.glob("step-*/MANIFEST.json")):
            manifest = self._json(f"checkpoints/{path.parent.name}/MANIFEST.json", [])
            files, metrics, step = manifest.get("files"), manifest.get("metrics"), number(manifest.get("step"))
            if step is None or not isinstance(files, dict):
                continue
            sizes = [number(one.get("size")) for one in files.values() if isinstance(one, dict)]
            figures = metrics.items() if isinstance(metrics, dict) else ()
            found = _stat(path)
            yield SavedCheckpoint(
                step=int(step),
                size=int(sum(size or 0 for size in sizes)),
                metrics={str(name): value for name, one in figures if (value := number(one)) is not None},
                saved=found.st_mtime if found else None,
                latest=path.parent.name == latest,
            )


def kept_lines(lines: list[Values]) -> tuple[list[Values], list[Values]]:
    """Training and evaluation lines by step. What was computed again, after a restart or a rollback, counts once, and
    what it replaces does not count."""
    training: list[Values] = []
    evaluations: list[Values] = []
    for line in lines:
        step = number(line.get("step"))
        if step is None:
            continue
        if "loss" in line:
            if training and step <= training[-1]["step"]:
                _drop_from(training, step)
                _drop_from(evaluations, step)
            training.append(line)
        elif any(name.startswith("eval_") for name in line):
            _drop_from(evaluations, step)
            evaluations.append(line)
    return training, evaluations


def _drop_from(lines: list[Values], step: float) -> None:
    while lines and lines[-1]["step"] >= step:
        lines.pop()


def number(value: object) -> float | None:
    """A finite number as it is, everything else as None: files may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def column(lines: Sequence[Values], name: str) -> tuple[Sequence[Values], list[Any]]:
    """The lines with a number of this name, and those numbers. As `number`, in a fraction of its time: a long run has a
    million of them, which are nearly always all numbers or all null."""
    values = [line.get(name) for line in lines]
    kinds = set(map(type, values))
    if kinds == {type(None)}:
        return [], []
    if kinds <= {float, int}:
        with suppress(OverflowError):  # of an integer that is no float
            if math.isfinite(sum(values)):  # type: ignore[arg-type]
                return lines, values
    finite = [number(value) is not None for value in values]
    return list(compress(lines, finite)), list(compress(values, finite))


def look_up(values: object, *keys: str) -> Any:
    """The value below these keys; None if there is none."""
    for key in keys:
        if not isinstance(values, Mapping):
            return None
        values = values.get(key)
    return values


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None

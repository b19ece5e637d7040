"""The output of a run, as text, also while it is being written."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.config.run import RunDirectory
from shoal.launch.cluster.jobs import read_records
from shoal.launch.status import RunStatus
from shoal.mistakes import UserMistake
from shoal.observe.json_lines import GrowingLines
from shoal.observe.logs import LEVELS
from shoal.observe.progress import format_metrics

POLL = 0.5  # seconds
LOOK = 4  # polls between two questions whether the run is still active


def log_file(run: Path, rank: int | None) -> Path:
    """The file with the output of a rank. Rank 0, the default, writes to the output of its job or to the terminal; of
    the latter its metrics remain."""
    directory = RunDirectory(run)
    if rank:
        path = directory.logs / f"rank-{rank}.log"
        if not path.is_file():
            known = sorted(int(one.stem.rpartition("-")[2]) for one in directory.logs.glob("rank-*.log"))
            has = f"; there are those of ranks {known[0]} to {known[-1]}" if known else ""
            raise UserMistake(f"{run} has no log of rank {rank}{has}.")
        return path
    records = read_records(run)
    outputs = [directory.logs / f"slurm-{record.job}.out" for record in records]
    written = [path for path in outputs if path.is_file()]
    if outputs and (written or not directory.metrics.is_file()):
        return written[-1] if written else outputs[-1]
    return directory.metrics


def read_log(path: Path, *, follow: bool = False, status: Callable[[], RunStatus]) -> Iterator[str]:
    """The lines of the file, or in place of the metrics what the terminal has shown. With `follow`, wait for further
    ones until the run has ended."""
    if path.name == "metrics.jsonl" and (path.parent / "logs" / "rank-0.jsonl").is_file():
        yield from printed_records(path.parent, follow=follow, active=lambda: status().active)
        return
    lines = _lines(path, follow=follow, active=lambda: status().active)
    if path.name != "metrics.jsonl":
        yield from lines
        return
    total = status().steps or 0
    yield from (text for line in lines if (text := _metrics_line(line, total)) is not None)


def _lines(path: Path, *, follow: bool, active: Callable[[], bool]) -> Iterator[str]:
    position, rest, polls, going = 0, b"", 0, True
    while True:
        if path.is_file():
            with path.open("rb") as file:
                file.seek(position)
                read = file.read()
            position += len(read)
            *whole, rest = (rest + read).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace")
        if not follow or not going:
            break
        # Asked before the last look at the file, so that nothing is missed.
        going = polls % LOOK != 0 or active()
        polls += 1
        if going:
            time.sleep(POLL)
    if rest:
        yield rest.decode(errors="replace")


def read_log_records(
    run: Path, *, rank: int | None = None, level: str = "debug", follow: bool = False, active: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """The log records of all processes of a run, or of one rank, of `level` and above, by time. With `follow`, wait for
    further ones until the run has ended."""
    files: dict[Path, GrowingLines] = {}
    polls, going = 0, True
    while True:
        for path in _record_files(run, rank):
            files.setdefault(path, GrowingLines(path))
        found = [one for file in files.values() for one in file.read_new() if _is_record(one)]
        wanted = (one for one in found if LEVELS.index(_level(one)) >= LEVELS.index(level))
        yield from sorted(wanted, key=lambda one: one["time"])
        if not follow or not going:
            return
        going = polls % LOOK != 0 or active()
        polls += 1
        if going:
            time.sleep(POLL)


def _record_files(run: Path, rank: int | None) -> list[Path]:
    logs = RunDirectory(run).logs
    return sorted(logs.glob("*.jsonl")) if rank is None else [logs / f"rank-{rank}.jsonl"]


def _is_record(one: dict[str, Any]) -> bool:
    return isinstance(one.get("time"), int | float) and isinstance(one.get("message"), str)


def _level(record: dict[str, Any]) -> str:
    level = str(record.get("level"))
    return level if level in LEVELS else "error"  # Python has a level above it


def record_text(record: dict[str, Any]) -> str:
    """A record as a line: when, where, and what."""
    rank = record.get("rank")
    where = "launcher" if rank is None else f"rank {rank}"
    return f"{datetime.fromtimestamp(record['time']):%H:%M:%S} {where} {_level(record)}: {record['message']}"


def printed_text(record: dict[str, Any]) -> str:
    """A record as rank 0 and the launcher have printed it."""
    level = _level(record)
    return record["message"] if level == "info" else f"{level}: {record['message']}"


def printed_records(run: Path, *, follow: bool, active: Callable[[], bool]) -> Iterator[str]:
    """What the terminal has shown: what rank 0 and the launcher say, and warnings of the others."""
    for record in read_log_records(run, level="info", follow=follow, active=active):
        if not record.get("rank"):
            yield printed_text(record)
        elif _level(record) != "info":
            yield f"rank {record['rank']}: {printed_text(record)}"


def _metrics_line(line: str, total: int) -> str | None:
    """A line of metrics.jsonl as it was printed."""
    try:
        found: dict[str, Any] = json.loads(line)
        if "loss" in found:
            return f"step {found['step']}/{total or '?'}  {format_metrics(found, total)}"
        parts = [f"{name.removeprefix('eval_')} {value}" for name, value in found.items() if name.startswith("eval_")]
        return f"step {found['step']}  evaluation: {', '.join(parts)}" if parts else None
    except (ValueError, KeyError, TypeError):
        return None

"""Errors that nobody expected: a sentence for the user, and a file with the traceback for whoever looks for the cause.

Python callers get the exception itself. The command, and the launcher for its ranks, report it with these functions.
"""

import os
import platform
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from shoal import __version__
from shoal.mistakes import UserMistake
from shoal.paths import cache_root

DEBUG = "SHOAL_DEBUG"  # set by the user: show tracebacks
_FOLDER = "_shoal_crash_folder"
_LONGEST_SHOWN = 300
# Imported long before an error of theirs; their versions are in a report if they are there.
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "pydantic")


@contextmanager
def crashes_in(folder: Path) -> Iterator[None]:
    """The traceback of an error in this block is written to `folder`, if that exists by then."""
    try:
        yield
    except Exception as error:
        with suppress(AttributeError):  # an exception without attributes is reported elsewhere
            setattr(error, _FOLDER, folder)
        raise


def report_crash(error: BaseException, *, in_run: bool = True) -> str:
    """Write the traceback of `error` to a file and return the sentence that names it. `in_run` False: not in the folder
    of its run, which is temporary."""
    trace = "".join(traceback.format_exception(error))
    name = type(error).__name__
    reason = f"{name}: {error}" if str(error).strip() else name
    return report_trace(
        "An error that shoal did not expect", reason, trace, getattr(error, _FOLDER, None) if in_run else None
    )


def report_trace(what: str, reason: str, trace: str, folder: Path | None = None) -> str:
    """The same for a traceback as text; `what` begins the sentence, and the first line of `reason` follows."""
    file = _write(trace, folder)
    if file is None or os.environ.get(DEBUG):
        print(trace.rstrip(), file=sys.stderr, flush=True)
    first = reason.strip().splitlines()[0] if reason.strip() else "without a message"
    shown = first if len(first) <= _LONGEST_SHOWN else f"{first[:_LONGEST_SHOWN]}…"
    return f"{what}: {shown}; the traceback is {'above' if file is None else f'in {file}'}; please report it."


def _write(trace: str, folder: Path | None) -> Path | None:
    """The file with the report, in the first folder that takes it; None if none does."""
    now = datetime.now(UTC)
    versions = [f"shoal {__version__}", f"Python {platform.python_version()} on {platform.platform()}"]
    for name in _LIBRARIES:
        if (version := getattr(sys.modules.get(name), "__version__", None)) is not None:
            versions.append(f"{name} {version}")
    command = shlex.join(["shoal", *sys.argv[1:]])
    text = "\n".join([*versions, f"{now:%Y-%m-%d %H:%M:%S} UTC", f"command: {command}", "", trace])
    for place in _places(folder):
        with suppress(OSError):
            # A new file that only this user may read: a name that others could guess would be unsafe in /tmp.
            descriptor, name = tempfile.mkstemp(prefix=f"crash-{now:%Y%m%d-%H%M%S}-", suffix=".txt", dir=place)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
            return Path(name)
    return None


def _places(folder: Path | None) -> Iterator[str]:
    with suppress(OSError):
        if folder is not None and folder.is_dir():
            yield str(folder)
    with suppress(OSError, UserMistake):
        crashes = cache_root() / "crashes"
        crashes.mkdir(parents=True, exist_ok=True)
        yield str(crashes)
    with suppress(OSError):
        yield tempfile.gettempdir()

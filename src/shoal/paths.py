"""Paths that a user wrote: what the operating system refuses to look up is a user mistake."""

import os
import stat
from pathlib import Path

from shoal.mistakes import LONGEST_SHOWN, UserMistake

# What a path may lead to besides files and folders.
KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def user_path(given: str | os.PathLike[str], name: str) -> Path:
    """The path that the user gave as `name`, with ~ expanded. Whether it exists is not checked."""
    text = os.fspath(given)
    shown = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except RuntimeError:  # of expanduser
        user = text.partition("/")[0].removeprefix("~")
        raise UserMistake(f"{name} {shown} cannot be read: there is no home folder of {user or 'this user'}.") from None
    except OSError as error:  # too long, not permitted, links in a circle
        raise UserMistake(f"{name} {shown} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # a NUL or a lone surrogate
        raise UserMistake(f"{name} {shown!r} cannot be read: {error}.") from None
    return path


def cache_root(given: Path | None = None) -> Path:
    """The root of the cache: as given, or SHOAL_CACHE, or ~/.cache/shoal."""
    if given is not None:
        return Path(given)
    return user_path(os.environ.get("SHOAL_CACHE") or "~/.cache/shoal", "The cache SHOAL_CACHE")


def special_kind(path: Path) -> str | None:
    """What `path` is if it is neither a regular file nor a folder: a pipe, a socket or a device."""
    try:
        return KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:
        return None

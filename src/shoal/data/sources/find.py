"""Find the files that `data.path` or `data.validation` names."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from shoal.catalogue.data_files import source_of_name
from shoal.data.sources.read import check_source, folder_suffixes
from shoal.mistakes import UserMistake, suggestion
from shoal.paths import special_kind, user_path

PATH, VALIDATION = "data.path", "data.validation"


def find_source(source: object, path: object) -> str:
    """The source that reads `path`; `auto` tells by the name of the file, or of the files in a folder."""
    if source != "auto":
        return str(source)
    entries: Sequence[object] = path if isinstance(path, list | tuple) else [path]
    if path is None or not entries:
        raise UserMistake("data.path is not set. Give it a file, a folder, a glob or a list of these.")
    name = str(entries[0])
    location = user_path(name, PATH)
    names = [name]
    if location.is_dir():
        names = sorted(file.name for file in _walk(location, PATH))
    elif glob.has_magic(name) and not location.exists():
        names = sorted(glob.glob(str(location), recursive=True))
    found = {found for one in names if (found := source_of_name(one)) is not None}
    if len(found) == 1:
        return found.pop()
    if not found:
        return "json"
    raise UserMistake(
        f"data.source auto finds files of several kinds in {name}: {', '.join(sorted(found))}. Set data.source."
    )


def find_files(source: str, path: object, key: str = PATH) -> list[Path]:
    """The files that `path` names: a file, a folder searched recursively, a glob, or a list of these. Each file once.

    The files of one entry are sorted; entries of a list keep their order. Error messages name `key`.
    """
    check_source(source)
    entries: Sequence[object] = path if isinstance(path, list | tuple) else [path]
    if path is None or not entries:
        raise UserMistake(f"{key} is not set. Give it a file, a folder, a glob or a list of these.")
    found: dict[Path, None] = {}
    for entry in entries:
        found.update(dict.fromkeys(_expand(source, str(entry), key)))
    return list(found)


def _expand(source: str, entry: str, key: str) -> list[Path]:
    location = user_path(entry, key)
    if location.is_file():
        return [location.absolute()]
    if location.is_dir():
        return _files_in(location, source, key)
    if (kind := special_kind(location)) is not None:
        raise UserMistake(f"{key} {entry} is {kind}; {_REGULAR}")
    if glob.has_magic(entry):
        matches = glob.glob(str(location), recursive=True)
        files = sorted(Path(match).absolute() for match in matches if os.path.isfile(match))
        if not files:
            raise UserMistake(f"No file matches {key} {entry} (relative to {Path.cwd()}). Check the pattern.")
        return files
    if location.is_symlink():
        raise UserMistake(f"{key} {entry} is a link to {location.readlink()}, which does not exist.")
    raise UserMistake(
        f"{key} {entry} does not exist (relative to {Path.cwd()}). Check the path."
        + suggestion(location.name, _names_beside(location))
    )


_REGULAR = "data is read more than once, so give a regular file or a folder."


def _files_in(folder: Path, source: str, key: str) -> list[Path]:
    suffixes = folder_suffixes(source)
    files = sorted(
        file.absolute() for file in _walk(folder, key) if suffixes is None or file.suffix.lower() in suffixes
    )
    if not files:
        wanted = "visible files" if suffixes is None else f"{' or '.join(suffixes)} files"
        raise UserMistake(f"The folder {folder} holds no {wanted}. Point {key} at the data, or change data.source.")
    for file in files:
        if (kind := special_kind(file)) is not None:
            raise UserMistake(f"{key} {folder} holds {file.name}, which is {kind}; {_REGULAR}")
    return files


def _walk(folder: Path, key: str) -> Iterator[Path]:
    """Every visible file below `folder`: a .git or an editor's backup is not training data."""

    def refuse(error: OSError) -> NoReturn:  # otherwise the files of an unreadable folder would be missing silently
        raise UserMistake(f"{key} {error.filename} cannot be read: {error.strerror}.") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _names_beside(location: Path) -> list[str]:
    """The names of the files that may have been meant."""
    try:
        return [child.name for child in location.parent.iterdir()]
    except OSError:
        return []

"""Find the source and the files that `data.path` or `data.validation` names."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from shoal.catalogue.data_files import source_of_name, uncompressed_suffix
from shoal.config.schema import DataConfig
from shoal.data.cells.bundled import PREFIX, bundled_file
from shoal.data.sources import hf
from shoal.data.sources.columns import check_columns
from shoal.data.sources.read import SOURCES, check_source, folder_suffixes
from shoal.data.sources.record import Reading
from shoal.mistakes import UserMistake, suggestion
from shoal.paths import special_kind, user_path

PATH, VALIDATION = "data.path", "data.validation"
_ABOUT = re.compile(r"(readme|license|licence|changelog|contributing)(\..*)?", re.IGNORECASE)
_TABLES = ("json", "csv", "parquet")
_TRAINING = re.compile(r"(^|[^a-z])train([^a-z]|$)", re.IGNORECASE)
_HELD_OUT = re.compile(r"(^|[^a-z])(test|val|valid|validation|dev|eval)([^a-z]|$)", re.IGNORECASE)


def find_reading(data: DataConfig, path: object = None) -> Reading:
    """What the data (or its validation data, at `path`) is read from."""
    check_columns(data.columns)
    if path is None:
        return _find_reading(data, data.path, PATH, data.split)
    split = str(path)
    # The sources of a mixture have paths of their own, and no splits in common.
    one = data.path is not None and find_source(data.source, data.path) == "hf"
    if one and "/" not in split and not user_path(split, VALIDATION).exists():
        hf.parse_split(split)
        return _find_reading(data, data.path, PATH, split)  # another split of the same dataset
    return _find_reading(data, path, VALIDATION, data.split)


def _find_reading(data: DataConfig, path: object, key: str, split: str) -> Reading:
    source = find_source(data.source, path, key)
    if source != "hf":
        return Reading(source, tuple(find_files(source, path, key)), data.columns)
    root = _find_root(path, key, data.subset)
    files = hf.dataset_files(root, data.subset)
    if not files:
        raise UserMistake(f"The folder {root} is empty. Point {key} at the data.")
    return Reading(source, tuple(files), data.columns, split, data.subset, root)


def find_source(source: object, path: object, key: str = PATH) -> str:
    """The source that reads `path`; `auto` tells by the name of the file, or of the files in a folder."""
    if source != "auto":
        return str(source)
    found = {_source_of_entry(str(entry), key) for entry in _entries(path, key)}
    if len(found) > 1:
        raise UserMistake(
            f"data.source auto finds several kinds in {key}: {', '.join(sorted(found))}. Give files of one kind, "
            "or set data.source to read all of them as that kind."
        )
    return found.pop()


def _source_of_entry(name: str, key: str) -> str:
    location = user_path(name, key)
    if location.is_dir():
        return _source_of_folder(location, key)
    if (found := source_of_name(name)) is not None:
        return found
    if location.exists():
        raise UserMistake(
            f"{key} {name} does not tell by its name what kind of data it is. Set data.source to one of "
            f"{', '.join(SOURCES)}."
        )
    if glob.has_magic(name):
        return _only_source(name, glob.glob(str(location), recursive=True)) or "json"
    if _with_suffix(location, ".bin").is_file():  # Megatron names a .bin and its .idx by what they have in common
        return "tokens"
    return "hf" if hf.is_id(name) else "json"


def _source_of_folder(folder: Path, key: str) -> str:
    if hf.is_saved(folder) or _describes_splits(folder / "README.md"):
        return "hf"
    names = [str(file.relative_to(folder)) for file in _walk(folder, key)]
    found = _only_source(str(folder), names)
    if found is None:
        raise UserMistake(
            f"The folder {folder} holds no files that tell by their names what kind of data they are. Point {key} at "
            f"the data, or set data.source to one of {', '.join(SOURCES)}."
        )
    if found in _TABLES:
        training = next((name for name in sorted(names) if _TRAINING.search(name)), None)
        others = (name for name in sorted(names) if not _TRAINING.search(name))
        held_out = next((name for name in others if _HELD_OUT.search(name)), None)
        if training is not None and held_out is not None:
            raise UserMistake(
                f"The folder {folder} holds several splits, such as {training} and {held_out}. Set data.source: hf to "
                f"read one of them, data.source: {found} to read all, or name the files in {key}."
            )
    return found


def _only_source(where: str, names: Sequence[str]) -> str | None:
    data = [name for name in names if _ABOUT.fullmatch(Path(name).name) is None]
    found = {found for name in data if (found := source_of_name(name)) is not None}
    if len(found) > 1:
        raise UserMistake(
            f"data.source auto finds files of several kinds in {where}: {', '.join(sorted(found))}. Set data.source to "
            "the kind to read (text takes all files), or name the files with a pattern, as in folder/**/*.jsonl."
        )
    return found.pop() if found else None


def _describes_splits(readme: Path) -> bool:
    """Whether this is the dataset card of the Hugging Face hub that says which files belong to which split."""
    try:
        with readme.open(errors="replace") as file:
            head = file.read(1 << 16)
    except OSError:
        return False
    return (
        head.startswith("---")
        and re.search(r"^(configs|dataset_info):", head.split("---")[1], re.MULTILINE) is not None
    )


def find_files(source: str, path: object, key: str = PATH) -> list[Path]:
    """The files that `path` names: a file, a folder searched recursively, a glob, or a list of these. Each file once.

    The files of one entry are sorted; entries of a list keep their order. Error messages name `key`.
    """
    check_source(source)
    found: dict[Path, None] = {}
    for entry in _entries(path, key):
        files = _expand(source, str(entry), key)
        found.update(dict.fromkeys(_with_indexes(files) if source == "tokens" else files))
    return list(found)


def _entries(path: object, key: str) -> Sequence[object]:
    entries: Sequence[object] = path if isinstance(path, list | tuple) else [path]
    if path is None or not entries:
        raise UserMistake(f"{key} is not set. Give it a file, a folder, a glob or a list of these.")
    return entries


def _find_root(path: object, key: str, subset: str | None) -> Path | str:
    """The folder of a dataset, or its id."""
    entries = _entries(path, key)
    if len(entries) > 1:
        raise UserMistake(f"{key} is a list, but data.source hf reads one dataset. Give one folder or id.")
    name = str(entries[0])
    location = user_path(name, key)
    if location.is_dir():
        return location.absolute()
    if location.exists():
        raise UserMistake(f"{key} {name} is a file, but data.source hf reads a folder or an id. Set data.source: auto.")
    if not hf.is_id(name):
        raise _missing(location, name, key)
    root = hf.find_dataset(name, subset)
    if root is None:
        raise UserMistake(
            f"{key} {name} does not exist (relative to {Path.cwd()}), nor is it a dataset in the local Hugging Face "
            f"cache; on a machine with a network run: shoal download --dataset {name}"
        )
    return root


def _expand(source: str, entry: str, key: str) -> list[Path]:
    if source == "cells" and entry.startswith(PREFIX):
        return [bundled_file(entry, key)]
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
    if source == "tokens" and (named := _with_suffix(location, ".bin")).is_file():
        return [named.absolute()]
    if location.is_symlink():
        raise UserMistake(f"{key} {entry} is a link to {location.readlink()}, which does not exist.")
    raise _missing(location, entry, key)


def _missing(location: Path, entry: str, key: str) -> UserMistake:
    return UserMistake(
        f"{key} {entry} does not exist (relative to {Path.cwd()}). Check the path."
        + suggestion(location.name, _names_beside(location))
    )


_REGULAR = "data is read more than once, so give a regular file or a folder."


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix) if path.name else path


def _with_indexes(files: Sequence[Path]) -> list[Path]:
    """Files of tokens with the Megatron index of each that has one, which determines its sequences too."""
    found: list[Path] = []
    for file in files:
        tokens = file.with_suffix(".bin") if file.suffix == ".idx" else file
        index = tokens.with_suffix(".idx")
        found += [tokens, index] if tokens.suffix == ".bin" and index.is_file() else [tokens]
    return found


def _files_in(folder: Path, source: str, key: str) -> list[Path]:
    suffixes = folder_suffixes(source)
    files = sorted(
        file.absolute() for file in _walk(folder, key) if suffixes is None or uncompressed_suffix(file.name) in suffixes
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

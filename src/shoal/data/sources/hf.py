"""Hugging Face datasets that are on this machine: saved folders, folders of data files, and the local caches.

Never uses the network and never runs code that comes with a dataset.
"""

import logging
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import shoal.offline  # noqa: F401
from shoal.catalogue.data_files import source_of_name
from shoal.data.sources.compressed import load_package
from shoal.data.sources.csv_rows import read_csv
from shoal.data.sources.json_records import read_json
from shoal.data.sources.parquet import ROWS_AT_ONCE, read_parquet
from shoal.data.sources.record import OnBad, Reading, Record, file_by_file
from shoal.mistakes import UserMistake

# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write.
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", re.ASCII)
# The builders of `datasets` that give rows of text. Others decode images or audio, or read formats with code in them.
_BUILDERS = ("json", "csv", "parquet", "arrow", "text")
_OWN_READERS = {"json": read_json, "csv": read_csv, "parquet": read_parquet}


def is_id(name: str) -> bool:
    """Whether `name` may be the id of a dataset: owner/name."""
    return _ID.fullmatch(name) is not None


def is_saved(folder: Path) -> bool:
    return (folder / SAVED).is_file() or (folder / SAVED_SPLITS).is_file()


def find_dataset(name: str, subset: str | None) -> Path | str | None:
    """Where the dataset with this id is in the local caches: the folder of its snapshot, or the id itself if `datasets`
    has it in its own cache. None: in neither."""
    hub = load_package("huggingface_hub", "data.source hf")
    errors = load_package("huggingface_hub.errors", "data.source hf")
    snapshot: Path | None
    try:
        snapshot = Path(hub.snapshot_download(name, repo_type="dataset", local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        snapshot = None
    # `datasets` itself may have cached no more of a snapshot than its README.
    if snapshot is not None and any(file.name.lower() != "readme.md" for file in _visible(snapshot)):
        return snapshot
    try:
        with _one_sentence(name):
            _builder(name, subset)
    except UserMistake as mistake:
        if isinstance(mistake.__cause__, ConnectionError | FileNotFoundError):
            return None
        raise
    return name


def dataset_files(root: Path | str, subset: str | None) -> list[Path]:
    """The files of the dataset, whose sizes and times tell whether it changed."""
    with _one_sentence(root):
        folder = root if isinstance(root, Path) else Path(_builder(root, subset).cache_dir)
    return sorted(file.absolute() for file in _visible(folder))


def read_hf(reading: Reading, on_bad: OnBad) -> Iterator[Record]:
    """The rows of one split."""
    root = reading.root
    assert root is not None
    found = False
    with _one_sentence(root):
        wanted = parse_split(reading.split)
        rows = _open_split(root, wanted.name, reading.subset)
        for record in rows.records(on_bad, *wanted.bounds(rows)):
            found = True
            yield record
    if not found:
        on_bad(UserMistake(f"{root} has no rows in data.split {reading.split}. Choose another split."))


class Rows(Protocol):
    """The rows of a split."""

    def count(self) -> int: ...

    def records(self, on_bad: OnBad, first: int = 0, last: int | None = None) -> Iterator[Record]:
        """The rows from `first` to before `last`."""


@dataclass(frozen=True)
class _Files:
    """Data files, read as by their own source, so that a record knows its file and line."""

    kind: str
    files: tuple[Path, ...]

    def count(self) -> int:
        return sum(1 for _ in self.records(lambda mistake: None))

    def records(self, on_bad: OnBad, first: int = 0, last: int | None = None) -> Iterator[Record]:
        return islice(file_by_file(_OWN_READERS[self.kind])(Reading(self.kind, self.files), on_bad), first, last)


@dataclass(frozen=True)
class _Table:
    """A `Dataset` or `IterableDataset`. A record's line is the number of its row in the split, from 1."""

    rows: Any
    root: Path

    def count(self) -> int:
        if hasattr(self.rows, "__len__"):
            return len(self.rows)
        return sum(len(batch) for batch in self.rows.with_format("arrow").iter(batch_size=1 << 13))

    def records(self, on_bad: OnBad, first: int = 0, last: int | None = None) -> Iterator[Record]:
        number = 0
        # As Arrow, so that nothing is decoded: a column of images stays as it is.
        for batch in self.rows.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
            if last is not None and number >= last:
                return
            if number + len(batch) > first:
                for index, fields in enumerate(batch.to_pylist(), start=number):
                    if index >= first and (last is None or index < last):
                        yield Record(fields, self.root, index + 1)
            number += len(batch)


@dataclass(frozen=True)
class Split:
    """A split and a slice of it, as in `datasets`: rows or percent, negative from the end."""

    name: str
    first: str | None = None
    last: str | None = None

    @property
    def needs_length(self) -> bool:
        """Whether rows must be counted to find the slice."""
        return any(bound is not None and not bound.isdigit() for bound in (self.first, self.last))

    def bounds(self, rows: Rows) -> tuple[int, int | None]:
        """The first row and the one after the last; None: all that follow."""
        length = rows.count() if self.needs_length else None
        return _row(self.first, length) or 0, _row(self.last, length)


def parse_split(text: str) -> Split:
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise UserMistake(f"data.split {text} is not a split; write a name, or a slice such as train[:1000].")
    return Split(*match.groups())


def _row(bound: str | None, length: int | None) -> int | None:
    if bound is None or length is None:
        return None if bound is None else int(bound)
    # Rounded to the nearest row, as `datasets` does.
    row = round(int(bound[:-1]) * length / 100) if bound.endswith("%") else int(bound)
    return min(max(row + length if row < 0 else row, 0), length)


def _open_split(root: Path | str, name: str, subset: str | None) -> Rows:
    if isinstance(root, Path) and is_saved(root):
        datasets = _library()
        found = datasets.load_from_disk(str(root))
        if not isinstance(found, datasets.DatasetDict):
            if name not in ("train", str(found.split)):
                raise UserMistake(f"{root} is one dataset without splits, so data.split {name} is not in it.")
            return _Table(found, root)
        _check_split(root, name, found)
        return _Table(found[name], root)
    builder = _builder(root, subset)
    if isinstance(root, str):
        _check_split(root, name, builder.info.splits or {})
        return _Table(builder.as_dataset(split=name), Path(root))
    kind = type(builder).__module__.split(".")[-1]
    if kind not in _BUILDERS:
        raise UserMistake(f"{root} holds a dataset of kind {kind}; supported kinds: {', '.join(_BUILDERS)}.")
    _check_split(root, name, builder.config.data_files)
    files = tuple(Path(file) for file in builder.config.data_files[name])
    if (
        kind in _OWN_READERS
        and _is_default(builder.config)
        and all(source_of_name(file.name) == kind for file in files)
    ):
        return _Files(kind, files)
    return _Table(builder.as_streaming_dataset(split=name), root)


def _is_default(config: Any) -> bool:
    """Whether the README sets no option of how the files are read, such as a separator."""
    default = type(config)()
    said = ("name", "version", "data_dir", "data_files", "description", "features")
    return all(
        getattr(config, one.name) == getattr(default, one.name) for one in fields(config) if one.name not in said
    )


def _check_split(root: Path | str, name: str, splits: Collection[str]) -> None:
    if name not in splits:
        raise UserMistake(f"data.split {name} is not in {root}; its splits are {', '.join(splits) or '(none)'}.")


def _builder(root: Path | str, subset: str | None) -> Any:
    datasets = _library()
    if isinstance(root, Path):
        _refuse_addresses(root)
        root = str(root)
    return datasets.load_dataset_builder(root, name=subset)


def _refuse_addresses(folder: Path) -> None:
    """A UserMistake if the folder's README says that its data is elsewhere: `datasets` would go there."""
    import yaml

    for name in ("README.md", ".huggingface.yaml"):
        try:
            text = (folder / name).read_text(errors="replace")
            head = text.split("---")[1] if name.endswith(".md") and text.startswith("---") else text
            found = yaml.safe_load(head) if head is not text or name.endswith(".yaml") else None
        except (OSError, yaml.YAMLError, IndexError):
            continue
        described = found.get("configs") if isinstance(found, dict) else None
        if described is not None and "://" in str(described):
            raise UserMistake(f"{folder / name} names data files that are not on this machine; download them first.")


def _library() -> Any:
    datasets = load_package("datasets", "data.source hf")
    datasets.disable_progress_bars()
    # It warns that it uses its cache, which is what is wanted here.
    logging.getLogger("datasets").setLevel(logging.ERROR)
    return datasets


def _visible(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


@contextmanager
def _one_sentence(root: Path | str) -> Iterator[None]:
    try:
        yield
    except (UserMistake, GeneratorExit):
        raise
    except Exception as error:  # datasets raises many types: its own, pyarrow's, ValueError, OSError
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise UserMistake(
            f"The dataset {root} cannot be read ({reason}). Check data.path, split and subset."
        ) from error

"""Hugging Face datasets that are on this machine: saved folders, folders of data files, and the local caches.

Never uses the network and never runs code that comes with a dataset.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shoal.offline  # noqa: F401
from shoal.data.sources.compressed import load_package
from shoal.data.sources.record import OnBad, Reading, Record
from shoal.mistakes import UserMistake

ROWS_AT_ONCE = 256
# What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write.
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_SPLIT = re.compile(r"([\w.-]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", re.ASCII)
# The builders of `datasets` that give rows of text. Others decode images or audio, or read formats with code in them.
_BUILDERS = ("json", "csv", "parquet", "arrow", "text")


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
    """The rows of one split. A record's line is the number of its row in the split, from 1."""
    root = reading.root
    assert root is not None
    with _one_sentence(root):
        wanted = parse_split(reading.split)
        rows = _open_split(root, wanted.name, reading.subset)
        first, last = wanted.bounds(rows)
        where = Path(root)
        number = 0
        for batch in rows.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
            if last is not None and number >= last:
                break
            count = len(batch)
            if number + count > first:
                for index, fields in enumerate(batch.to_pylist(), start=number):
                    if index >= first and (last is None or index < last):
                        yield Record(fields, where, index + 1)
            number += count
    if number <= first or (last is not None and last <= first):
        on_bad(UserMistake(f"{root} has no rows in data.split {reading.split}. Choose another split."))


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

    def bounds(self, rows: Any) -> tuple[int, int | None]:
        """The first row and the one after the last; None: all that follow."""
        length = _count(rows) if self.needs_length else None
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


def _count(rows: Any) -> int:
    if hasattr(rows, "__len__"):
        return len(rows)
    return sum(len(batch) for batch in rows.with_format("arrow").iter(batch_size=1 << 13))


def _open_split(root: Path | str, name: str, subset: str | None) -> Any:
    """The rows of a split: a `Dataset`, or an `IterableDataset` of a folder with data files."""
    if isinstance(root, Path) and is_saved(root):
        datasets = _library()
        found = datasets.load_from_disk(str(root))
        if not isinstance(found, datasets.DatasetDict):
            if name not in ("train", str(found.split)):
                raise UserMistake(f"{root} is one dataset without splits, so data.split {name} is not in it.")
            return found
        if name not in found:
            raise _no_split(root, name, list(found))
        return found[name]
    builder = _builder(root, subset)
    if isinstance(root, str):
        splits = builder.info.splits or {}
        if name not in splits:
            raise _no_split(root, name, list(splits))
        return builder.as_dataset(split=name)
    kind = type(builder).__module__.split(".")[-1]
    if kind not in _BUILDERS:
        raise UserMistake(f"{root} holds a dataset of kind {kind}; supported kinds: {', '.join(_BUILDERS)}.")
    splits = builder.config.data_files
    if name not in splits:
        raise _no_split(root, name, list(splits))
    return builder.as_streaming_dataset(split=name)


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


def _no_split(root: Path | str, name: str, found: list[str]) -> UserMistake:
    return UserMistake(f"data.split {name} is not in {root}; its splits are {', '.join(found) or '(none)'}.")

"""Hugging Face datasets on this machine: saved ones, folders of data files, and the local caches."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal.offline  # noqa: F401  (before datasets)
from shoal.config.schema import DataConfig
from shoal.data import load_tokenizer, prepare, prepare_sets
from shoal.data.first_look import check_first_record
from shoal.data.sources import find_reading, read_records
from shoal.mistakes import UserMistake

datasets: Any
Write = Callable[[str, Any], Path]
ROWS = [{"text": f"row {number}", "chat": [{"role": "user", "content": "é"}]} for number in range(20)]
FEW = ROWS[:3]
CARD = """---
configs:
- config_name: first
  default: true
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
- config_name: second
  data_files: more.parquet
---
# A dataset
"""


@pytest.fixture(scope="module", autouse=True)
def _import_datasets() -> None:
    """Not while tests are collected, which every worker does: it takes seconds."""
    global datasets
    datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets as people have them; a test that changes one copies it first."""
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("datasets")
    rows, few = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(FEW)
    rows.save_to_disk(folder / "one")
    datasets.DatasetDict(train=rows, test=few).save_to_disk(folder / "many")
    (folder / "hub" / "data").mkdir(parents=True)
    rows.to_parquet(folder / "hub" / "data" / "train-00000-of-00001.parquet")
    few.to_parquet(folder / "hub" / "data" / "test-00000-of-00001.parquet")
    datasets.Dataset.from_list([{"text": "more"}]).to_parquet(folder / "hub" / "more.parquet")
    (folder / "hub" / "README.md").write_text(CARD)
    return folder


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache: the libraries read HF_HOME only once, when they are imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf" / "datasets")
    return tmp_path / "hf"


def snapshot(hub: Path, name: str, contents: Path) -> Path:
    """Put a folder into the hub's cache as `shoal download --dataset` does: a snapshot of links to blobs."""
    repository = hub / "hub" / f"datasets--{name.replace('/', '--')}"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    for number, file in enumerate(file for file in sorted(contents.rglob("*")) if file.is_file()):
        blob = repository / "blobs" / str(number)
        shutil.copy(file, blob)
        link = repository / "snapshots" / commit / file.relative_to(contents)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return repository / "snapshots" / commit


def data(path: object, **given: Any) -> DataConfig:
    return DataConfig(path=str(path), max_length=64, validation=0, workers=0, **given)


def rows(config: DataConfig) -> list[dict[str, Any]]:
    check_first_record(config)
    return [record.fields for record in read_records(find_reading(config))]


def refused(config: DataConfig) -> str:
    with pytest.raises(UserMistake) as caught:
        rows(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["one", "many", "hub"])
def test_a_dataset_in_a_folder_is_recognized_and_its_training_split_read(made: Path, name: str) -> None:
    reading = find_reading(data(made / name))
    assert (reading.source, reading.root) == ("hf", made / name)
    records = list(read_records(reading))
    assert [record.fields for record in records] == ROWS
    where = made / "hub" / "data" / "train-00000-of-00001.parquet" if name == "hub" else made / name
    assert records[7].where == f"{where}:8"


@pytest.mark.parametrize("name", ["many", "hub"])
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("test", FEW),
        ("train[:5]", ROWS[:5]),
        ("train[5:]", ROWS[5:]),
        ("train[18:99]", ROWS[18:]),
        ("train[-3:]", ROWS[-3:]),
        ("train[25%:50%]", ROWS[5:10]),
        ("test[50%:]", FEW[2:]),
    ],
)
def test_splits_and_slices(made: Path, name: str, split: str, expected: list[Any]) -> None:
    assert rows(data(made / name, split=split)) == expected
    (bounds,) = datasets.ReadInstruction.from_spec(split).to_absolute({"train": 20, "test": 3})
    assert expected == {"train": ROWS, "test": FEW}[bounds.splitname][bounds.from_ : bounds.to]


def test_options_of_the_readme_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "TORCH_AVAILABLE", False)  # or it imports torch, which takes seconds
    card = "---\nconfigs:\n- {config_name: a, data_files: rows.csv, sep: ;}\n---\n"
    (tmp_path / "semicolons").mkdir()
    (tmp_path / "semicolons" / "README.md").write_text(card)
    (tmp_path / "semicolons" / "rows.csv").write_text("text;n\na,b;1\nc;2\n")
    config = data(tmp_path / "semicolons", split="train[1:]")
    assert [record.fields for record in read_records(find_reading(config))] == [{"text": "c", "n": 2}]


def test_a_subset_is_chosen_by_name(made: Path) -> None:
    assert rows(data(made / "hub", subset="second")) == [{"text": "more"}]
    assert "second" in refused(data(made / "hub", subset="third"))


def test_what_is_not_there_lists_what_is(made: Path) -> None:
    for name in ("many", "hub"):
        says = refused(data(made / name, split="validation"))
        assert says == f"data.split validation is not in {made / name}; its splits are train, test."
    assert "without splits" in refused(data(made / "one", split="test"))
    assert "is not a split; write a name, or a slice" in refused(data(made / "one", split="train[1]"))
    assert "has no rows in data.split train[20:]" in refused(data(made / "many", split="train[20:]"))


def test_an_id_is_found_in_the_cache_of_the_hub(made: Path, hub: Path) -> None:
    folder = snapshot(hub, "owner/name", made / "hub")
    reading = find_reading(data("owner/name", split="test"))
    assert [record.fields for record in read_records(reading)] == FEW
    assert reading.root == folder
    assert folder / "data" / "test-00000-of-00001.parquet" in reading.files


def test_an_id_is_found_in_the_cache_of_the_datasets_library(made: Path, hub: Path, tmp_path: Path) -> None:
    # What load_dataset("owner/name") leaves behind, with the README in the cache of the hub.
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "README.md").write_text("# A dataset")
    snapshot(hub, "owner/name", tmp_path / "card")
    built = datasets.load_dataset(str(made / "hub"), "first", cache_dir=str(hub / "built"))
    entry = Path(built["train"].cache_files[0]["filename"]).parent
    cached = hub / "datasets" / "owner___name" / "first" / "0.0.0" / entry.name
    shutil.copytree(entry, cached)
    for file in cached.glob("*.arrow"):
        file.rename(file.with_name(file.name.replace("hub-", "name-")))
    assert rows(data("owner/name", split="train[:4]")) == ROWS[:4]
    assert "its splits are train, test" in refused(data("owner/name", split="dev"))
    assert {file.suffix for file in find_reading(data("owner/name")).files} == {".arrow", ".json"}


def test_an_id_that_is_not_cached_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    says = refused(data("mhenrichsen/alpaca_2k_test"))
    assert says.startswith("data.path mhenrichsen/alpaca_2k_test does not exist")
    assert says.endswith("on a machine with a network run: shoal download --dataset mhenrichsen/alpaca_2k_test")


def test_the_network_is_never_used_for_data_that_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    card = "---\nconfigs:\n- config_name: a\n  data_files: https://example.com/a.jsonl\n---\n"
    (tmp_path / "far" / "README.md").write_text(card)
    assert "names data files that are not on this machine" in refused(data(tmp_path / "far"))


def test_folders_that_are_no_datasets_are_one_sentence(made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused(data(tmp_path / "empty", source="hf"))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "data.xyz").write_text("x")
    assert refused(data(tmp_path / "odd", source="hf")).startswith(f"The dataset {tmp_path / 'odd'} cannot be read (")
    shutil.copytree(made / "one", tmp_path / "broken")
    (arrow,) = (tmp_path / "broken").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert refused(data(tmp_path / "broken")).startswith(f"The dataset {tmp_path / 'broken'} cannot be read (")
    (tmp_path / "list.jsonl").write_text('{"text": "a"}\n')
    assert "is a file, but data.source hf reads a folder" in refused(data(tmp_path / "list.jsonl", source="hf"))


def test_prepared_data_is_reused_until_a_file_of_the_dataset_changes(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hub-copy"
    shutil.copytree(made / "hub", folder)
    said: list[str] = []

    def documents(**given: Any) -> int:
        said.clear()
        return prepare(data(folder, **given), load_tokenizer("bytes"), report=said.append).summary.documents

    assert (documents(), "Using cached" in said[-1]) == (20, False)
    assert (documents(), "Using cached" in said[-1]) == (20, True)
    assert documents(split="train[:7]") == 7
    assert documents(subset="second") == 1
    datasets.Dataset.from_list(FEW).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    assert documents() == 3


def test_another_split_is_the_validation_data(made: Path) -> None:
    config = data(made / "many", split="train[:10]").model_copy(update={"validation": "test"})
    check_first_record(config)
    sets = prepare_sets(config, load_tokenizer("bytes"), seed=0, report=lambda _: None)
    assert sets.validation is not None
    assert (sets.training.summary.documents, sets.validation.summary.documents) == (10, 3)
    wrong = config.model_copy(update={"validation": "dev"})
    with pytest.raises(UserMistake, match=r"data\.split dev is not in .*; its splits are train, test"):
        check_first_record(wrong)


def test_a_column_of_chess_moves_is_tokenized_as_moves(hub: Path, tmp_path: Path) -> None:
    chess = load_tokenizer("chess")
    games = ["e2e4 e7e5 g1f3", "d2d4 d7d5"]
    made = tmp_path / "games"
    datasets.Dataset.from_list([{"moves": game, "elo": 1500} for game in games]).save_to_disk(made)
    sequences = prepare(data(made, columns={"text": "moves"}), chess, report=lambda _: None)
    assert chess.decode(sequences[0][0]) == "".join(f"<|begin|> {game}<|end|>" for game in games)


def test_a_named_instruction_dataset_trains_by_its_id(hub: Path, tmp_path: Path) -> None:
    # The layout of mhenrichsen/alpaca_2k_test: one Parquet file without a list of splits.
    alpaca = [{"instruction": f"Say {number}.", "input": "", "output": str(number)} for number in range(5)]
    (tmp_path / "repository").mkdir()
    datasets.Dataset.from_list(alpaca).to_parquet(tmp_path / "repository" / "alpaca_2000.parquet")
    snapshot(hub, "mhenrichsen/alpaca_2k_test", tmp_path / "repository")
    config = data("mhenrichsen/alpaca_2k_test").model_copy(update={"max_length": 512})
    check_first_record(config)
    summary = prepare(config, load_tokenizer("bytes"), report=lambda _: None).summary
    assert (summary.format, summary.documents) == ("alpaca", 5)

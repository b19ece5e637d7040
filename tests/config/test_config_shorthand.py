"""A string instead of a block sets the main key of the block."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.config import config_from_mapping, config_to_yaml, json_schema, load_config
from shoal.config.locate import parse_document
from shoal.mistakes import UserMistake

BASE = "model: {shape: gpt2}\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dumped(text: str, *overrides: str) -> dict[str, Any]:
    """The config of a file with `text`, including adapters."""
    Path("run.yaml").write_text(text)
    return load_config("run.yaml", overrides, planned=True).model_dump(mode="json")


def mistake_in(text: str, *overrides: str) -> str:
    Path("run.yaml").write_text(text)
    with pytest.raises(UserMistake) as caught:
        load_config("run.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ("train: {optimizer: adamw8bit}", "train: {optimizer: {name: adamw8bit}}"),
        ("train: {optimizer: AdamW_BNB_8bit}", "train: {optimizer: {name: adamw8bit}}"),
        ("train:\n  schedule: linear", "train: {schedule: {name: linear}}"),
        ("adapter: lora", "adapter: {kind: lora}"),
        ("data: rows.jsonl", "data: {path: rows.jsonl}"),
        ("data: rows.JSON", "data: {path: rows.JSON}"),
        ("data: book.txt", "data: {path: book.txt}"),
        ("data: notes/*.md", "data: {path: notes/*.md}"),
        ("data: src/*.py", "data: {path: src/*.py}"),
        ("data: games.pgn", "data: {path: games.pgn}"),
        ("data: folder", "data: {path: folder}"),
    ],
)
def test_a_string_in_a_file_or_an_override_is_the_block(short: str, whole: str) -> None:
    expected = dumped(BASE + whole)
    assert dumped(BASE + short) == expected
    key, value = short.replace("train: {", "train.").replace("train:\n  ", "train.").rstrip("}").split(": ")
    assert dumped(BASE, f"{key}={value}") == expected


def test_a_model_may_be_a_folder_or_an_id() -> None:
    assert dumped("model: some/model") == dumped("model: {from: some/model}") == dumped("", "model=some/model")


def test_a_mapping_accepts_strings_and_paths() -> None:
    short = {"model": Path("folder"), "data": Path("book.txt"), "train": {"optimizer": "lion", "schedule": "wsd"}}
    config = config_from_mapping(short)
    assert (config.model.from_, config.data.path, config.data.kinds) == ("folder", "book.txt", {"text"})
    assert (config.train.optimizer.name, config.train.schedule.name) == ("lion", "wsd")


def test_the_saved_config_has_the_block() -> None:
    config = config_from_mapping({"model": "folder", "data": "book.txt", "train": {"optimizer": "lion"}})
    saved = parse_document(config_to_yaml(config), "saved").value
    assert saved["train"]["optimizer"]["name"] == "lion"
    assert saved["train"]["optimizer"]["weight_decay"] == 0.1
    assert (saved["data"]["path"], saved["data"]["source"], saved["model"]["from"]) == ("book.txt", "auto", "folder")


def test_a_string_overrides_a_block_and_a_key_overrides_a_string() -> None:
    block = BASE + "train: {optimizer: {name: adamw, weight_decay: 0.3}}"
    assert dumped(block, "train.optimizer=lion")["train"]["optimizer"]["weight_decay"] == 0.3
    optimizer = dumped(BASE + "train: {optimizer: lion}", "train.optimizer.weight_decay=0.3")["train"]["optimizer"]
    assert (optimizer["name"], optimizer["weight_decay"]) == ("lion", 0.3)
    assert dumped(BASE, "train={optimizer: lion}")["train"]["optimizer"]["name"] == "lion"
    Path("base.yaml").write_text(block)
    assert dumped("include: [base.yaml]\ntrain: {optimizer: sgd}")["train"]["optimizer"]["weight_decay"] == 0.3
    Path("base.yaml").write_text(BASE + "train:\n  optimizer:\n    eps: 0")
    assert mistake_in("include: [base.yaml]\ntrain: {optimizer: sgd}") == (
        "base.yaml:4: train.optimizer.eps is 0, but must be above 0."
    )


def test_the_file_suffix_determines_the_source_unless_it_is_set() -> None:
    def source(text: str, *overrides: str) -> set[str | None]:
        return set(
            config_from_mapping(
                {"data": dumped(BASE + text, *overrides)["data"], "model": {"shape": "gpt2"}}
            ).data.kinds
        )

    assert source("data: {source: chess}", "data=games.txt") == {"chess"}
    assert source("data: games.txt", "data.source=chess") == {"chess"}
    assert source("data: book.txt", "data.max_length=64") == {"text"}
    assert source("data: book.txt", "data=rows.jsonl.gz") == {"json"}
    assert source("data: book.txt", "data.path=rows.parquet") == {"parquet"}
    assert source("data: folder") == {None}


def test_a_string_may_refer_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOK", "book.txt")
    data = dumped(BASE + "data: ${oc.env:BOOK}")["data"]
    assert data["path"] == "book.txt"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "train:\n  optimizer: adamm",
            'run.yaml:3: train.optimizer.name is "adamm", but must be one of adamw, adamw8bit, lion, sgd or '
            "muon. Did you mean adamw?",
        ),
        (
            "train: {schedule: cos}",
            'run.yaml:2: train.schedule.name is "cos", but must be one of cosine, linear, constant or wsd. '
            "Did you mean cosine?",
        ),
        (
            "parallel: {engine: deepspeed, tp: 2}",
            "run.yaml:2: parallel.tp 2 cannot be used with parallel.engine deepspeed, which shards over data-parallel "
            "ranks only; use tp 1, or parallel.engine native.",
        ),
        (
            "train: {optimizer: 3}",
            "run.yaml:2: train.optimizer is 3, but must be adamw, adamw8bit, lion, sgd, muon or "
            "a mapping such as {name: adamw}.",
        ),
        ("data: [a, b]", 'run.yaml:2: data is ["a", "b"], but must be a string or a mapping such as {source: auto}.'),
        ("eval: often", 'run.yaml:2: eval is "often", but must be a mapping such as {every: 200}.'),
    ],
)
def test_an_invalid_string_gives_the_error_of_its_key(text: str, says: str) -> None:
    assert mistake_in(BASE + text) == says


def test_a_wrong_override_is_quoted() -> None:
    assert mistake_in(BASE, "train.optimizer=adamm") == (
        "override train.optimizer=adamm: must be one of adamw, adamw8bit, lion, sgd or muon. Did you mean adamw?"
    )
    assert mistake_in(BASE, "train={optimizer: adamm}").startswith(
        'override train={optimizer: adamm}: train.optimizer.name is "adamm", but must be one of adamw'
    )
    assert mistake_in(BASE, "model=folder").endswith(
        "model.from and model.shape contradict each other: set one of them to null."
    )


def test_the_json_schema_shows_both_forms() -> None:
    schema = json.loads(json.dumps(json_schema()))
    train = schema["$defs"]["TrainConfig"]["properties"]
    words, block = train["optimizer"]["anyOf"]
    assert words == {"type": "string", "enum": ["adamw", "adamw8bit", "lion", "sgd", "lamb", "adafactor", "muon"]}
    assert block == {"$ref": "#/$defs/OptimizerConfig"}
    for key in (*(schema["properties"][name] for name in ("model", "adapter", "data")), train["schedule"]):
        text, block = key["anyOf"]
        assert text["type"] == "string"
        assert block["$ref"].removeprefix("#/$defs/") in schema["$defs"]

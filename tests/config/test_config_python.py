"""A config from Python: a file, a mapping or a Config, with keywords and overrides that replace what it says."""

from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.api.training import read
from shoal.mistakes import UserMistake

SHAPE = {"family": "llama", "hidden": 32, "layers": 1, "heads": 2, "vocab": 260}
VALUES: dict[str, Any] = {
    "name": "one",
    "model": {"shape": SHAPE, "tokenizer": "bytes"},
    "data": {"source": "text", "path": "text.txt", "max_length": 32},
    "train": {"steps": 2, "global_batch": 4},
}


@pytest.fixture(params=["file", "mapping", "Config"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "mapping":
        return VALUES
    settled = api.config_from_mapping(VALUES)
    if request.param == "Config":
        return settled
    file = tmp_path / "run.yaml"
    file.write_text(api.config_to_yaml(settled))
    return file


def test_keywords_replace_what_it_says_and_overrides_replace_both(config: Any) -> None:
    found = read(config, ["train.steps=7"], {"name": "two", "train": {"steps": 5, "micro_batch": 2}})
    assert (found.name, found.train.steps, found.train.micro_batch, found.train.global_batch) == ("two", 7, 2, 4)
    assert read(config).train.steps == 2  # the caller's is as it was


def test_a_config_keeps_what_was_left_to_defaults(config: Any) -> None:
    if isinstance(config, Path):
        pytest.skip("a complete file sets every key")
    assert "lr" not in read(config, ["train.steps=7"]).train.model_fields_set


def test_a_forecast_takes_them_too(config: Any) -> None:
    few, many = (api.plan(config, train={"micro_batch": size}).as_dict() for size in (1, 4))
    assert few["memory"] != many["memory"]
    with pytest.raises(UserMistake, match=r"stps is not a key shoal knows. Did you mean"):
        api.plan(config, train={"stps": 3})


def test_a_loop_of_ones_own_takes_a_mapping_without_a_model() -> None:
    assert read({"name": "loop"}, needs_model=False).name == "loop"


def test_what_is_no_config_is_one_sentence() -> None:
    with pytest.raises(UserMistake, match=r"A config is a YAML file, a mapping or a Config, not a int\."):
        api.plan(3)  # type: ignore[arg-type]


def test_one_string_is_one_override(config: Any) -> None:
    assert read(config, "train.steps=7").train.steps == 7
    assert api.config_from_mapping(VALUES, "train.steps=7").train.steps == 7


def test_a_file_and_a_mapping_are_read_by_functions_of_their_own() -> None:
    with pytest.raises(UserMistake, match=r"use config_from_mapping\.$"):
        api.load_config(VALUES)  # type: ignore[arg-type]
    with pytest.raises(UserMistake, match=r"not a list: load_config reads files\.$"):
        api.config_from_mapping([VALUES])  # type: ignore[arg-type]

"""Hundreds of damaged config.json files and datasets: each gives a sentence, or a forecast and a preview.

They go through the functions behind `shoal plan` and `shoal train --dry-run`, which build the model on the meta
device. Randomness is seeded, so that a failure is reproducible by its kind and number.
"""

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoConfig

from shoal import api
from shoal.mistakes import UserMistake
from tests.faults.damage import ANY_JSON, written
from tests.faults.fuzzing import PARTS, hold_sentence, problems_of
from tests.harness import settings

MODEL_CASES, DATA_CASES = 40, 24
SIZES = {"vocab_size": 260, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, **SIZES}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 256, **SIZES}
FAMILIES: dict[str, dict[str, Any]] = {"llama": LLAMA, "gpt_neox": LLAMA, "qwen2": LLAMA, "gpt2": GPT2, "opt": {}}
ROWS = (
    {"instruction": "Name a fish.", "input": "", "output": "cod"},
    {"instruction": 'Name "another".', "input": "fresh water", "output": "perch \N{FISH}"},
    {"text": "The shoal turns as one.", "id": 7, "tags": ["a", {"b": None}]},
)


def hold(config: dict[str, Any]) -> None:
    """Each of the two commands gives a sentence or succeeds."""
    loaded = api.config_from_mapping(config)
    for command in (api.plan, api.dry_run):
        try:
            json.dumps(command(loaded).as_dict())
        except UserMistake as mistake:
            hold_sentence(mistake)


@PARTS
@pytest.mark.parametrize("kind", ANY_JSON)
def test_a_damaged_config_of_a_model_gives_a_sentence_or_a_model(
    kind: str, part: str, instructions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    families = [AutoConfig.for_model(name, **sizes) for name, sizes in FAMILIES.items()]
    contents = [one.to_json_string(use_diff=False).encode() for one in families]
    (tmp_path / "model.safetensors").write_bytes(b"")
    model = {"from": str(tmp_path), "tokenizer": "bytes"}
    config = settings(instructions, model=model, data__max_length=64, data__train_on="all", hardware__gpu="t4")

    def attempt(chance: Random, number: int) -> None:
        damaged = ANY_JSON[kind](contents[number // 4 % len(contents)], chance)
        with written({tmp_path / "config.json": damaged}):
            hold(config)

    (tmp_path / "config.json").touch()
    assert problems_of(MODEL_CASES, part, f"model {kind}", attempt) == []


@PARTS
@pytest.mark.parametrize("kind", ANY_JSON)
def test_damaged_records_give_a_sentence_or_are_skipped(
    kind: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))

    def attempt(chance: Random, number: int) -> None:
        rows = [json.dumps(row).encode() for row in chance.choices(ROWS[: chance.choice((2, 3))], k=6)]
        at = chance.randrange(len(rows))
        rows[at] = ANY_JSON[kind](rows[at], chance)
        name = chance.choice(("rows.jsonl", "rows.json", "rows.txt"))
        separator = {"rows.json": b",\n", "rows.jsonl": b"\n", "rows.txt": b"\r\n"}[name]
        content = separator.join(rows)
        (tmp_path / name).write_bytes(b"[" + content + b"]" if name == "rows.json" else content)
        config = settings(
            tmp_path / name,
            data__source="text" if name == "rows.txt" else "json",
            data__on_error=chance.choice(("stop", "skip")),
            data__pack=chance.choice((True, False)),
            data__validation=chance.choice((0, 0.5, os.fspath(tmp_path / name))),
            train__global_batch=4,
        )
        try:
            json.dumps(api.dry_run(api.config_from_mapping(config)).as_dict())
        except UserMistake as mistake:
            hold_sentence(mistake)

    assert problems_of(DATA_CASES, part, f"data {kind}", attempt) == []

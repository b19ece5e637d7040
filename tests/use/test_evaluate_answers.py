"""`shoal eval --generate` scores greedy answers to the held-out prompts, also with a function of the user's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import api
from shoal.data.sequences import DOCUMENT
from shoal.data.sets import prepare_sets
from shoal.use.generate import generate
from shoal.use.load import load_run
from tests.use.conftest import Ended

Shoal = Callable[..., Ended]


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def questions(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few instructions whose prompts have different lengths."""
    file = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    file.write_text("".join(line + "\n" for line in instructions.read_text().splitlines()[:5]))
    return file


@pytest.fixture(scope="module")
def answered(instruction_run: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same instructions, every second one with the answer that the run gives."""
    loaded = load_run(instruction_run, device="cpu")
    file = tmp_path_factory.mktemp("answered") / "answered.jsonl"
    with file.open("w") as written:
        for number, record in enumerate(read_lines(questions)):
            given = generate(loaded, record["instruction"], tokens=12, temperature=0)
            assert given.strip()
            written.write(json.dumps({**record, "output": record["output"] if number % 2 else given}) + "\n")
    return file


def test_batches_of_padded_prompts_give_the_answers_that_each_prompt_gets_alone(
    instruction_run: Path, questions: Path, tmp_path: Path, shoal: Shoal
) -> None:
    asked = ("eval", instruction_run, "--generate", f"data.path={questions}", "--tokens", 12, "--json")
    found = shoal(*asked, "--batch", 3, "-o", tmp_path / "answers.jsonl").json
    assert {key: found[key] for key in ("step", "examples", "tokens", "metric")} == {
        "step": 4,
        "examples": 5,
        "tokens": 12,
        "metric": "exact_match",
    }
    loaded = load_run(instruction_run, device="cpu")
    records, written = read_lines(questions), read_lines(tmp_path / "answers.jsonl")
    assert len({len(line["prompt"]) for line in written}) > 1, "the prompts must need padding"
    for record, line in zip(records, written, strict=True):
        assert line["answer"] == generate(loaded, record["instruction"], tokens=12, temperature=0).strip()
        assert line["expected"] == record["output"]


def test_exact_match_counts_the_answers_that_are_the_expected_ones(
    instruction_run: Path, answered: Path, shoal: Shoal
) -> None:
    found = shoal("eval", instruction_run, "--generate", f"data.path={answered}", "--tokens", 12, "--json").json
    assert found["score"] == pytest.approx(3 / 5)
    assert found["stderr"] == pytest.approx((0.6 * 0.4 / 4) ** 0.5)
    said = shoal("eval", instruction_run, "--generate", f"data.path={answered}", "--tokens", 12, "-n", 2).out
    assert said.startswith(f"{instruction_run}, step 4: exact_match 0.5000 ± 0.5000 (2 examples")


def test_a_hugging_face_folder_is_scored_on_the_data_that_is_named(
    instruction_run: Path, answered: Path, tmp_path: Path, shoal: Shoal
) -> None:
    folder = api.export(instruction_run, tmp_path / "hf")
    found = shoal("eval", folder, "--generate", f"data.path={answered}", "--tokens", 12, "--json").json
    assert (found["score"], found["step"]) == (pytest.approx(3 / 5), None)
    shoal("eval", folder, "--generate").hold_mistake("has no held-out data", "data.path=FILE")


def test_the_records_of_the_held_out_sequences_are_asked_and_no_others(
    instruction_run: Path, tmp_path: Path, shoal: Shoal
) -> None:
    output = tmp_path / "answers.jsonl"
    found = shoal("eval", instruction_run, "--generate", "--tokens", 1, "--batch", 64, "-o", output, "--json").json
    config = api.load_config(instruction_run / "config.yaml")
    loaded = load_run(instruction_run, device="cpu")
    sets = prepare_sets(config.data, loaded.tokenizer, seed=config.seed, report=lambda _: None)
    held_out = []
    for index in sets.order.validation_sequences():
        tokens, flags = sets.training[int(index)]
        held_out += np.split(tokens, np.flatnonzero(flags & DOCUMENT)[1:])
    assert found["examples"] == len(held_out) > 20
    expected = sorted(loaded.tokenizer.decode(tokens, keep_special=False) for tokens in held_out)
    asked = sorted(line["prompt"] + line["expected"] for line in read_lines(output))
    for whole, trained in zip(asked, expected, strict=True):
        assert whole.startswith(trained)  # which training truncated, if it is long


def test_a_conversation_is_asked_for_its_last_answer(conversation_run: Path, tmp_path: Path, shoal: Shoal) -> None:
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "import this"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "a last one "},
    ]
    chats, output = tmp_path / "chats.jsonl", tmp_path / "answers.jsonl"
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    shoal("eval", conversation_run, "--generate", f"data.path={chats}", "--tokens", 3, "-o", output, "--json").json  # noqa: B018
    line = read_lines(output)[0]
    assert line["prompt"].endswith("import this<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert line["expected"].startswith("a last one")
    pairs = tmp_path / "pairs.jsonl"
    pair = {"prompt": turns[:1], "chosen": turns[1:2], "rejected": [{"role": "assistant", "content": "no"}]}
    pairs.write_text(json.dumps(pair) + "\n")
    shoal("eval", conversation_run, "--generate", f"data.path={pairs}", "--tokens", 3, "-o", output, "--json").json  # noqa: B018
    assert read_lines(output)[0]["expected"].startswith("import this")


def test_a_function_of_the_users_is_run_only_if_code_is_allowed(
    instruction_run: Path, answered: Path, tmp_path: Path, shoal: Shoal
) -> None:
    file, ran = tmp_path / "scores.py", tmp_path / "ran"
    file.write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "def letters(answer, expected, record):\n"
        "    assert record['output'] == expected\n"
        "    return len(answer)\n"
        "def broken(answer, expected, record):\n"
        "    return answer.no_such\n"
        "def nothing(answer, expected, record):\n"
        "    pass\n"
    )
    asked = ("eval", instruction_run, "--generate", f"data.path={answered}", "--tokens", 12, "-n", 1)
    shoal(*asked, "--score", f"{file}:letters").hold_mistake("runs code of", "add --allow-code")
    assert not ran.exists()
    found = shoal(*asked, "--score", f"{file}:letters", "--allow-code", "--json").json
    expected = read_lines(answered)[0]["output"].strip()
    assert (found["metric"], found["score"]) == (f"{file}:letters", len(expected))
    shoal(*asked, "--score", f"{file}:lettres", "--allow-code").hold_mistake("no function lettres", "letters")
    allowed = ("--allow-code", "--json")
    assert "failed for" in (ended := shoal(*asked, "--score", f"{file}:broken", *allowed)).err
    assert (ended.status, ended.err.splitlines()[-1].count("AttributeError")) == (2, 1)
    assert "returned None" in shoal(*asked, "--score", f"{file}:nothing", *allowed).err
    shoal(*asked, "--score", f"{tmp_path}/none.py:f", "--allow-code").hold_mistake("does not exist")
    shoal(*asked, "--score", "no_such_module:f", "--allow-code").hold_mistake("no module no_such_module")
    shoal(*asked, "--score", "letters", "--allow-code").hold_mistake("module:function")


def test_each_mistake_is_one_sentence(text_run: Path, instruction_run: Path, tmp_path: Path, shoal: Shoal) -> None:
    assert "no prompt and answer to generate" in (ended := shoal("eval", text_run, "--generate")).err
    assert ended.status == 2
    shoal("eval", instruction_run, "--score", "a:b").hold_mistake("--score has no effect on the loss", "--generate")
    shoal("eval", instruction_run, "--generate", "--batches", 1).hold_mistake("--batches has no effect on --generate")
    shoal("eval", instruction_run, "--generate", "--tasks", "x").hold_mistake("give one of them")
    shoal("eval", instruction_run, "--dtype", "bf16").hold_mistake("use train.precision=")
    shoal("eval", instruction_run, "--generate", "-o", tmp_path / "no" / "file").hold_mistake("is not a folder")
    shoal("eval", tmp_path / "none", "--generate").hold_mistake("There is no run")

from pathlib import Path
from typing import Any

import pytest

from shoal.data.formats.choose import Options, alpaca_prompt, choose_format, read_document
from shoal.data.sources import Record
from shoal.mistakes import UserMistake


def record(**fields: Any) -> Record:
    return Record(fields, Path("data.jsonl"), 7)


def test_auto_recognises_formats_by_the_keys_of_the_first_record() -> None:
    assert choose_format("auto", record(text="x")).name == "text"
    assert choose_format("auto", record(instruction="x", output="y", text="both")).name == "alpaca"
    with pytest.raises(UserMistake, match=r"data\.jsonl:7.*keys question, reply"):
        choose_format("auto", record(question="x", reply="y"))
    with pytest.raises(UserMistake, match=r"alpacca.*Did you mean alpaca"):
        choose_format("alpacca", record(text="x"))


def test_only_the_answer_counts_in_the_loss_unless_train_on_is_all() -> None:
    one = record(instruction="Add.", input="1 + 1", output="2")
    alpaca = choose_format("alpaca", one)
    prompt = alpaca_prompt("Add.", "1 + 1")
    assert (
        read_document(alpaca, one, Options("answers")).segments
        == read_document(alpaca, one, Options("last")).segments
        == [(prompt, False), ("2", True)]
    )
    assert read_document(alpaca, one, Options("all")).segments == [(prompt + "2", True)]


@pytest.mark.parametrize("fields", [{}, {"input": ""}, {"input": None}])
def test_an_instruction_without_input_has_no_input_header(fields: dict[str, Any]) -> None:
    one = record(instruction="Say {hi}.", output="hi", **fields)
    prompt = read_document(choose_format("auto", one), one, Options("answers")).segments[0][0]
    assert "Say {hi}." in prompt
    assert "Input" not in prompt


def test_records_that_do_not_match_the_format_name_their_file_and_line() -> None:
    alpaca = choose_format("alpaca", record())
    with pytest.raises(UserMistake, match=r"data\.jsonl:7 lacks output.*its keys are instruction, answer"):
        read_document(alpaca, record(instruction="x", answer="y"), Options("answers"))
    with pytest.raises(UserMistake, match=r"data\.jsonl:7: output must be a string, found int"):
        read_document(alpaca, record(instruction="x", output=3), Options("answers"))
    with pytest.raises(UserMistake, match=r"data\.jsonl:7: text holds a lone surrogate at position 1"):
        read_document(choose_format("text", record()), record(text="a\ud83d"), Options("answers"))
    with pytest.raises(UserMistake, match=r"data\.jsonl:7: text must be a string, found null.*on_error: skip"):
        read_document(choose_format("text", record()), record(text=None), Options("answers"))


@pytest.mark.parametrize(
    "fields", [{"instruction": "Be silent.", "output": ""}, {"prompt": "Be silent.", "completion": " \n"}]
)
def test_an_empty_answer_is_a_mistake_that_can_be_skipped(fields: dict[str, Any]) -> None:
    one = record(**fields)
    with pytest.raises(UserMistake, match=r"data\.jsonl:7: (output|completion) is empty.*data\.on_error: skip"):
        read_document(choose_format("auto", one), one, Options("answers"))

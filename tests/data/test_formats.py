from pathlib import Path
from typing import Any

import pytest

from shoal.data.formats import alpaca_prompt, choose_format, segment_row
from shoal.data.sources import Row
from shoal.mistakes import UserMistake


def row(**fields: Any) -> Row:
    return Row(fields, Path("data.jsonl"), 7)


def test_auto_recognises_formats_by_the_keys_of_the_first_row() -> None:
    assert choose_format("auto", row(text="x")).name == "text"
    assert choose_format("auto", row(instruction="x", output="y", text="both")).name == "alpaca"
    with pytest.raises(UserMistake, match=r"data\.jsonl:7.*keys question, reply"):
        choose_format("auto", row(question="x", reply="y"))
    with pytest.raises(UserMistake, match=r"alpacca.*Did you mean alpaca"):
        choose_format("alpacca", row(text="x"))


def test_only_the_answer_is_trained_on_unless_all_is() -> None:
    one = row(instruction="Add.", input="1 + 1", output="2")
    alpaca = choose_format("alpaca", one)
    prompt = alpaca_prompt("Add.", "1 + 1")
    assert segment_row(alpaca, one, "answers") == segment_row(alpaca, one, "last") == [(prompt, False), ("2", True)]
    assert segment_row(alpaca, one, "all") == [(prompt + "2", True)]


@pytest.mark.parametrize("fields", [{}, {"input": ""}, {"input": None}])
def test_an_instruction_without_input_has_no_input_header(fields: dict[str, Any]) -> None:
    one = row(instruction="Say {hi}.", output="hi", **fields)
    prompt = segment_row(choose_format("auto", one), one, "answers")[0][0]
    assert "Say {hi}." in prompt
    assert "Input" not in prompt


def test_rows_that_do_not_fit_name_their_place() -> None:
    alpaca = choose_format("alpaca", row())
    with pytest.raises(UserMistake, match=r"data\.jsonl:7 lacks output.*its keys are instruction, answer"):
        segment_row(alpaca, row(instruction="x", answer="y"), "answers")
    with pytest.raises(UserMistake, match=r"data\.jsonl:7: output must be text, found a int"):
        segment_row(alpaca, row(instruction="x", output=3), "answers")
    with pytest.raises(UserMistake, match=r"data\.jsonl:7: text holds half a character at position 1"):
        segment_row(choose_format("text", row()), row(text="a\ud83d"), "answers")

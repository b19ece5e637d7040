"""Long documents are truncated, split or left out; documents of a stream may be kept apart."""

import ast
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data import StoredSequences, load_tokenizer, prepare
from shoal.data.formats.choose import alpaca_prompt
from shoal.data.pack import fit_documents
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN
from shoal.mistakes import UserMistake

Write = Callable[[str, Any], Path]
BYTES = load_tokenizer("bytes")
END = BYTES.end


def quiet(sentence: str) -> None:
    pass


def contents(sequences: StoredSequences) -> list[list[int]]:
    return [sequences[index][0].tolist() for index in range(len(sequences))]


def labels(sequences: StoredSequences) -> list[int]:
    found = (sequences[index] for index in range(len(sequences)))
    return [token for tokens, flags in found for token in tokens[1:][flags[1:] & LOSS_TOKEN != 0].tolist()]


LETTERS = [{"text": "abc"}, {"text": "defghijklm"}, {"text": "no"}]


@pytest.mark.parametrize(
    ("long", "stream", "says"),
    [
        ("auto", [*b"abc", END, *b"defghijklm", END, *b"no", END], None),
        ("split", [*b"abc", END, *b"defghijklm", END, *b"no", END], None),
        (
            "truncate",
            [*b"abc", END, *b"defghi", *b"no", END],
            "1 documents are longer than data.max_length and were trunc",
        ),
        ("drop", [*b"abc", END, *b"no", END], "1 documents are longer than data.max_length and were left out"),
    ],
)
def test_long_texts_of_a_stream(
    write: Write, settings: Any, said: list[str], long: str, stream: list[int], says: str | None
) -> None:
    data = settings(source="json", path=write("a.jsonl", LETTERS), max_length=5, long_documents=long)
    sequences = prepare(data, BYTES, report=said.append)
    assert sequences.tokens.tolist() == stream
    assert contents(sequences) == [stream[at : at + 6] for at in range(0, len(stream) - 1, 5)]
    firsts = [stream.index(text[0]) for text in (b"abc", b"defg", b"no") if text[0] in stream]
    assert np.flatnonzero(sequences.flags == DOCUMENT).tolist() == firsts
    assert sequences.counted.sum() == len(labels(sequences)) == sequences.summary.loss_tokens
    assert any(sentence.startswith(says or "3 documents") for sentence in said)
    assert any("longer than" in sentence for sentence in said) == (says is not None)


@pytest.mark.parametrize(
    ("long", "expected"),
    [
        ("auto", [[*b"abc", END], [*b"defghi"], [*b"ijklm", END], [*b"no", END]]),
        ("truncate", [[*b"abc", END], [*b"defghi"], [*b"no", END]]),
        ("drop", [[*b"abc", END], [*b"no", END]]),
    ],
)
def test_long_texts_one_per_sequence(
    write: Write, settings: Any, said: list[str], long: str, expected: list[list[int]]
) -> None:
    file = write("a.jsonl", LETTERS)
    data = settings(source="json", path=file, max_length=5, long_documents=long, pack=False)
    sequences = prepare(data, BYTES, report=said.append)
    assert contents(sequences) == expected
    assert sequences.summary.filled is None
    assert (sequences.summary.split, any("were split into sequences" in one for one in said)) == (
        (1, True) if long == "auto" else (0, False)
    )


@pytest.mark.parametrize("pack", [True, False])
def test_a_long_instruction_is_split_into_sequences_with_all_of_its_answer(
    write: Write, settings: Any, pack: bool
) -> None:
    answer = "".join(map(chr, range(40, 120))) * 4
    file = write("a.json", [{"instruction": "Hi", "output": answer}, {"instruction": "Hi", "output": "yes"}])
    data = settings(source="json", path=file, max_length=180, long_documents="split", pack=pack)
    sequences = prepare(data, BYTES, report=quiet)
    whole = [*(alpaca_prompt("Hi") + answer).encode(), END]
    parts = [whole[at : at + 181] for at in range(0, len(whole) - 1, 180)]
    short = [*(alpaca_prompt("Hi") + "yes").encode(), END]
    found = contents(sequences)
    if pack:
        # A part of a document is one of its own for the attention mask.
        found = []
        for index in range(len(sequences)):
            tokens, flags = sequences[index]
            assert flags[0] == DOCUMENT
            found += [part.tolist() for part in np.split(tokens, np.flatnonzero(flags & DOCUMENT)[1:])]
    assert sorted(found) == sorted([*parts, short])
    assert sorted(labels(sequences)) == sorted([*answer.encode(), END, *b"yes", END])
    assert (sequences.summary.split, sequences.summary.truncated) == (1, 0)


def test_data_of_which_nothing_is_left_says_why(write: Write, settings: Any) -> None:
    long = [{"instruction": "x" * 400, "output": "y"}] * 3
    file = write("a.json", long)
    with pytest.raises(UserMistake, match=r"^All 3 documents in data\.path are longer than data\.max_length 50, and"):
        prepare(settings(source="json", path=file, max_length=50, long_documents="drop"), BYTES, report=quiet)
    with pytest.raises(UserMistake, match=r"^All 1 documents .* set data\.long_documents: split\.$"):
        prepare(settings(path=write("a.txt", "long" * 9), long_documents="drop"), BYTES, report=quiet)


def test_a_document_without_tokens_is_counted_as_empty(write: Write, settings: Any, said: list[str]) -> None:
    class Strips(type(BYTES)):  # type: ignore[misc]
        def encode_many(self, texts: Any) -> Any:
            return super().encode_many([text.strip() for text in texts])

    file = write("a.jsonl", [{"text": " \n"}, {"text": ""}, {"text": "ab"}])
    assert contents(prepare(settings(source="json", path=file), Strips(), report=said.append)) == [[*b"ab", END]]
    assert "2 documents are empty and were left out." in said


@pytest.mark.parametrize("format_name", ["text", "alpaca"])
def test_an_example_of_ten_megabytes(write: Write, settings: Any, format_name: str) -> None:
    text = "0123456789" * 1_000_000
    record = {"text": text} if format_name == "text" else {"instruction": "Count.", "output": text}
    data = settings(source="json", path=write("a.jsonl", [record]), max_length=1000, long_documents="split")
    sequences = prepare(data, BYTES, report=quiet)
    assert sequences.summary.loss_tokens == len(text) + (format_name == "alpaca")
    assert sequences.summary.longest == 1000


# Documents of a stream that do not attend to each other


def test_a_model_that_cannot_keep_documents_apart_refuses_the_mask(write: Write, settings: Any) -> None:
    data = settings(path=write("a.txt", "abcdefgh"), document_mask=True)
    for _ in range(2):  # before anything is tokenized, and when it is cached
        with pytest.raises(
            UserMistake, match=r"^data\.document_mask is true, but it cannot; leave it out, or set data\.p"
        ):
            prepare(data, BYTES, report=quiet, not_apart="it cannot")
        prepare(data, BYTES, report=quiet)


@pytest.mark.parametrize(
    ("record", "pack"),
    [({"instruction": "a", "output": "b"}, True), ({"text": "abc"}, False)],
    ids=["alpaca", "unpacked"],
)
def test_a_mask_without_effect_says_so(write: Write, settings: Any, said: list[str], record: Any, pack: bool) -> None:
    file = write("a.jsonl", [record])
    prepare(
        settings(source="json", path=file, pack=pack, document_mask=True, max_length=300), BYTES, report=said.append
    )
    assert "data.document_mask has no effect: it is for plain text that is packed." in said


# How full packed sequences are


def test_packing_fills_over_97_percent_on_real_lengths(write: Write, settings: Any, said: list[str]) -> None:
    # The functions of a few modules of Python's standard library: real documents, of which many are short and few long.
    folder = Path(sysconfig.get_paths()["stdlib"])
    records = []
    for name in ("argparse", "ast", "datetime", "inspect", "pathlib", "typing"):
        source = (folder / f"{name}.py").read_text()
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                records.append({"instruction": f"Write {node.name}.", "output": body})
    file = write("a.jsonl", records)
    summary = prepare(settings(source="json", path=file, max_length=4096), BYTES, report=said.append).summary
    assert summary.documents > 500
    assert summary.filled is not None
    assert summary.filled > 0.97
    assert f"packed into {summary.sequences:,} sequences, {summary.filled:.1%} full;" in said[0]


def test_equal_documents_share_sequences() -> None:
    packing = fit_documents(np.full(10, 3), 9)
    assert packing.counts.tolist() == [3, 3, 3, 1]
    assert packing.order.tolist() == list(range(10))

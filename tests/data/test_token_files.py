"""Files that are already tokenized: nanoGPT, llm.c, numpy and Megatron layouts, memory-mapped and not copied."""

import re
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.schema import DataConfig
from shoal.data import Order, Sequences, load_tokenizer, pack, prepare, prepare_sets, token_files
from shoal.data.first_look import check_first_record
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN
from shoal.mistakes import UserMistake

Write = Callable[[str, Any], Path]
BYTES = load_tokenizer("bytes")
END = BYTES.end
# Three documents with their end tokens, and a fourth that the file cuts off.
DOCUMENTS = [[*b"first", END], [*b"the second is longer", END], [END], [*b"rest"]]
STREAM = np.array([token for document in DOCUMENTS for token in document])
BEGINS = [0, 6, 27, 28]


def prepared(path: object, **given: Any) -> Sequences:
    given = {"max_length": 8, "validation": 0, **given}
    config = DataConfig(path=path if isinstance(path, list) else str(path), **given)
    check_first_record(config)
    return prepare(config, BYTES, report=lambda _: None)


def contents(sequences: Sequences) -> list[list[int]]:
    return [sequences[index][0].tolist() for index in range(len(sequences))]


def split(stream: np.ndarray, length: int = 8) -> list[list[int]]:
    bounds = pack.split_stream(len(stream), length)
    return [stream[start:end].tolist() for start, end in zip(bounds.starts, bounds.ends, strict=True)]


def refused(path: object, **given: Any) -> str:
    with pytest.raises(UserMistake) as caught:
        prepared(path, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def llm_c(tokens: np.ndarray, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + tokens.astype(dtype).tobytes()


def megatron(
    folder: Path,
    documents: list[list[list[int]]],
    dtype: str = "<u2",
    code: int = 8,
    gap: int = 0,
    reverse: bool = False,
) -> Path:
    """A .bin with its .idx: each document is a list of sequences. `gap`: bytes between sequences in the .bin."""
    sequences = [sequence for document in documents for sequence in document]
    written = list(reversed(sequences)) if reverse else sequences
    data, places = b"", []
    for sequence in written:
        places.append(len(data))
        data += np.array(sequence, dtype).tobytes() + b"\xff" * gap
    places = places[::-1] if reverse else places
    borders = np.cumsum([0, *(len(document) for document in documents)])
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(borders))
    index += np.array([len(sequence) for sequence in sequences], "<i4").tobytes()
    index += np.array(places, "<i8").tobytes() + borders.astype("<i8").tobytes()
    (folder / "text_document.bin").write_bytes(data)
    (folder / "text_document.idx").write_bytes(index)
    return folder / "text_document.bin"


def test_every_layout_gives_the_same_sequences_as_the_tokens_in_memory(write: Write, tmp_path: Path) -> None:
    expected = split(STREAM)
    array = tmp_path / "array.npy"
    np.save(array, STREAM.astype(">i4"))
    found = {
        "nanoGPT": prepared(write("train.bin", STREAM.astype("<u2").tobytes())),
        "nanoGPT, wide": prepared(write("wide.bin", STREAM.astype("<u4").tobytes()), token_dtype="uint32"),
        "llm.c": prepared(write("fineweb_train_000001.bin", llm_c(STREAM))),
        "llm.c, Llama 3": prepared(write("llama.bin", llm_c(STREAM, 20240801, 7, "<u4"))),
        "numpy": prepared(array),
        "Megatron": prepared(megatron(tmp_path, [[document] for document in DOCUMENTS])),
    }
    for layout, sequences in found.items():
        assert contents(sequences) == expected, layout
        assert sequences.lengths(np.arange(len(sequences))).tolist() == [len(one) for one in expected], layout
        flags = [sequences[index][1] for index in range(len(sequences))]
        # The first token of each document is an input and never a label.
        begins = [8 * n + at for n, one in enumerate(flags) for at in np.flatnonzero(one & DOCUMENT) if at < 8]
        assert begins == BEGINS, layout
        assert all(((one == LOSS_TOKEN) | (one == DOCUMENT)).all() for one in flags), layout
        counted = [int((one[1:] & LOSS_TOKEN).sum()) for one in flags]
        assert sequences.loss_tokens(np.arange(len(sequences))).tolist() == counted, layout
        summary = sequences.summary
        assert (summary.documents, summary.tokens, summary.sequences, summary.longest) == (4, 32, 4, 8), layout
        assert (summary.joined, summary.separate, summary.loss_tokens) == (True, False, sum(counted)), layout
    kept = {layout: sequences.summary.content for layout, sequences in found.items()}
    assert kept["nanoGPT"] == kept["llm.c"]  # wherever they are, and whatever is around them


def test_the_tokens_are_mapped_where_they_are_and_not_copied(write: Write, cache: Path) -> None:
    file = write("train.bin", np.tile(STREAM, 5000).astype("<u2").tobytes())
    sequences = prepared(file, max_length=1000)
    tokens, _ = sequences[0]
    base = tokens
    while getattr(base, "base", None) is not None:
        base = base.base
    assert type(base).__name__ == "mmap"
    assert sum(entry.stat().st_size for entry in cache.rglob("*") if entry.is_file()) < file.stat().st_size / 50


@pytest.mark.parametrize("length", [2, 3, 7, 8, 1000])
@pytest.mark.parametrize("at_once", [1, 5, 1 << 22])
def test_a_sequence_never_spans_two_files_and_each_token_is_a_label_once(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int, at_once: int
) -> None:
    monkeypatch.setattr(token_files, "_TOKENS_AT_ONCE", at_once)
    monkeypatch.setattr(token_files, "_MAPPED_AT_ONCE", 2)
    streams = [STREAM, STREAM[:1], STREAM[3:17], STREAM[::-1]]
    for number, stream in enumerate(streams):
        write(f"shards/{number}.bin", stream.astype("<u2").tobytes())
    sequences = prepared(tmp_path / "shards", max_length=length)
    expected = []
    for stream in streams:
        begins = np.concatenate([[True], stream[:-1] == END])
        flags = np.where(begins, DOCUMENT, LOSS_TOKEN)
        cut = zip(split(stream, length), split(flags, length), strict=True)
        expected += [(tokens, kinds) for tokens, kinds in cut if LOSS_TOKEN in kinds[1:]]
    assert [
        (tokens.tolist(), flags.tolist()) for tokens, flags in map(sequences.__getitem__, range(len(sequences)))
    ] == (expected)
    counted = [sum(kind == LOSS_TOKEN for kind in kinds[1:]) for _, kinds in expected]
    assert sequences.loss_tokens(np.arange(len(sequences))).tolist() == counted
    assert sum(counted) == sum(a != END for stream in streams for a, _ in pairwise(stream))


def test_sequences_without_a_loss_token_are_left_out(write: Write) -> None:
    padded = np.concatenate([STREAM[:9], np.full(40, END), STREAM[:9]])  # end tokens as padding
    sequences = prepared(write("padded.bin", padded.astype("<u2").tobytes()))
    assert len(sequences) + sequences.summary.dropped == len(split(padded))
    assert sequences.summary.dropped == 4
    assert all(sequences.loss_tokens(np.arange(len(sequences))) > 0)
    assert sequences[-1][0].tolist() == split(padded)[-1]


def test_the_rows_of_an_array_are_documents(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(12, dtype=np.int64).reshape(3, 4))
    sequences = prepared(tmp_path / "rows.npy", max_length=6)
    assert contents(sequences) == split(np.arange(12), 6)
    assert sequences[0][1].tolist() == [DOCUMENT, 1, 1, 1, DOCUMENT, 1, 1]
    assert sequences[1][1].tolist() == [1, 1, DOCUMENT, 1, 1, 1]
    assert sequences.summary.documents == 3


@pytest.mark.parametrize(("gap", "reverse"), [(0, False), (8, False), (0, True), (4, True)])
def test_a_megatron_index_says_where_sequences_and_documents_are(tmp_path: Path, gap: int, reverse: bool) -> None:
    documents = [[[1, 2, 3], [4, 5]], [[6]], [[], [7, 8, 9, 10]]]
    file = megatron(tmp_path, documents, "<i4", 4, gap, reverse)
    # Without end tokens, and named as Megatron does: by what the two files have in common.
    sequences = prepared(str(file).removesuffix(".bin"), max_length=4)
    assert contents(sequences) == split(np.arange(1, 11), 4)
    assert [sequences[index][1].tolist() for index in range(3)] == [
        [DOCUMENT, 1, 1, 1, 1],
        [1, DOCUMENT, DOCUMENT, 1, 1],
        [1, 1],
    ]
    assert contents(prepared(file.with_suffix(".idx"), max_length=4)) == contents(sequences)


def test_attention_can_be_confined_to_documents(write: Write) -> None:
    file = write("train.bin", STREAM.astype("<u2").tobytes())
    assert not prepared(file).separate
    assert prepared(file, document_mask=True).separate
    config = DataConfig(path=str(file), document_mask=True, validation=0)
    with pytest.raises(UserMistake, match=r"^data\.document_mask is true, but it has ALiBi; set it to false\.$"):
        prepare(config, BYTES, report=lambda _: None, not_apart="it has ALiBi")


def test_the_files_are_held_out_and_ordered_like_any_data(write: Write) -> None:
    train = write("train.bin", np.tile(STREAM, 20).astype("<u2").tobytes())
    val = write("val.bin", STREAM.astype("<u2").tobytes())
    config = DataConfig(path=str(train), validation=str(val), max_length=8)
    sets = prepare_sets(config, BYTES, seed=1, report=lambda _: None)
    assert isinstance(sets.order, Order)
    assert sets.validation is not None
    assert (len(sets.training), len(sets.validation)) == (80, 4)


def test_prepared_files_are_reused_until_they_or_their_index_change(tmp_path: Path) -> None:
    file = megatron(tmp_path, [[[1, 2, 3]], [[4, 5, 6]]])
    said: list[str] = []
    config = DataConfig(path=str(file), max_length=8, validation=0)

    def begins() -> list[int]:
        said.clear()
        return np.flatnonzero(prepare(config, BYTES, report=said.append)[0][1] & DOCUMENT).tolist()

    assert begins() == [0, 3]
    assert begins() == [0, 3]
    assert "Using cached" in said[-1]
    megatron(tmp_path, [[[1, 2], [3]], [[4], [5]], [[6]]])
    assert begins() == [0, 3, 5]


@pytest.mark.parametrize(
    ("name", "content", "given", "says"),
    [
        ("a.bin", np.array([1, 2, 300, 4], "<u2").tobytes(), {}, r"a\.bin has the id 300 at token 2, .* bytes has 259"),
        (
            "a.bin",
            np.array([1, -2], "<i4").tobytes(),
            {"token_dtype": "int32"},
            r"id -2 at token 1, .*another tokenizer",
        ),
        ("a.bin", STREAM.astype("<u2").tobytes(), {"token_dtype": "uint32"}, r"another data\.token_dtype than uint32"),
        ("a.bin", b"\0\0\0", {}, r"has 3 bytes, .* whole number of uint16 tokens\. Set data\.token_dtype"),
        ("a.bin", b"", {}, r"a\.bin is empty"),
        ("a.bin", b"\0\0", {}, r"hold 1 tokens, and none is a loss token"),
        ("a.bin", llm_c(STREAM)[:-2], {}, r"a\.bin is incomplete: its header says 32 tokens, but it has 31"),
        ("a.npy", b"junk", {}, r"a\.npy cannot be read as tokens \("),
        ("a.bin", STREAM.astype("<u2").tobytes(), {"format": "alpaca"}, r"no records of format alpaca"),
        ("a.bin", STREAM.astype("<u2").tobytes(), {"pack": False}, r"data\.pack: false is not supported"),
    ],
)
def test_files_that_are_not_tokens_are_one_sentence(
    write: Write, name: str, content: bytes, given: dict[str, Any], says: str
) -> None:
    file = write(name, content)
    assert re.search(says, refused(file, **given))


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(4), "1-dimensional float64"),
        (np.zeros((2, 2, 2), int), "3-dimensional int64"),
        (np.asfortranarray(np.zeros((2, 3), int)), "Fortran order"),
    ],
)
def test_arrays_that_are_not_tokens_are_one_sentence(tmp_path: Path, array: np.ndarray, says: str) -> None:
    np.save(tmp_path / "a.npy", array)
    assert says in refused(tmp_path / "a.npy")


def test_pickles_are_never_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    assert "cannot be read as tokens" in refused(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda index: b"x" + index[1:], "not an index of Megatron"),
        (lambda index: index[:20], "not an index of Megatron"),
        (lambda index: index[:-9], "is incomplete"),
        (lambda index: index[:9] + b"\2" + index[10:], "version 2"),
        (lambda index: index[:17] + b"\7" + index[18:], "data type 7"),
        (lambda index: index[:34] + b"\xff\xff" + index[36:], "does not belong to text_document.bin"),
        (lambda index: b"", "cannot be read as tokens"),
    ],
)
def test_a_broken_megatron_index_is_one_sentence(tmp_path: Path, change: Callable[[bytes], bytes], says: str) -> None:
    file = megatron(tmp_path, [[[1, 2, 3]], [[4]]])
    index = file.with_suffix(".idx")
    index.write_bytes(change(index.read_bytes()))
    assert says in refused(file)

"""`shoal data preview` and `shoal data stats`, mostly through the Python API."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from shoal import api
from shoal.config.schema import DataConfig
from shoal.data import Sequences, load_tokenizer, prepare, prepare_sets
from shoal.data.inspect.preview import Example
from shoal.data.inspect.spans import Span, decode_spans, mark, printable, shorten
from shoal.data.inspect.stats import describe_lengths, document_lengths
from shoal.data.sequences import DOCUMENT
from shoal.data.tokenizer import ByteTokenizer
from shoal.mistakes import UserMistake

Write = Callable[[str, Any], Path]
BYTES = load_tokenizer("bytes")
PROMPT = len(
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n\n\n### Response:\n"
)


def pair(instruction: str, output: Any) -> dict[str, Any]:
    return {"instruction": instruction, "output": output}


def examples(file: Path, *overrides: str, **options: Any) -> list[Example]:
    (source,) = api.data_preview(file, ["model.tokenizer=bytes", *overrides], **options).sources
    return source.examples


def test_an_example_is_shown_as_the_model_sees_it_with_its_loss_tokens_marked(write: Write) -> None:
    file = write("a.jsonl", [pair("Say hello.", "Hello."), pair("?", "!")])
    found = api.data_preview(file, ["model.tokenizer=bytes"], examples=1)
    (source,) = found.sources
    (example,) = source.examples
    assert (source.source, source.format, source.template) == ("json", "alpaca", None)
    assert (example.where, example.number, example.fate) == (f"{file}:1", 0, "kept")
    assert example.spans[1:] == [Span("Hello.<|end|>", True)]
    assert example.loss_tokens == len("Hello.") + 1
    assert example.tokens == PROMPT + len("Say hello.") + example.loss_tokens
    assert found.text().endswith("\n\n### Instruction:\nSay hello.\n\n### Response:\n⟦Hello.<|end|>⟧\n")
    assert found.as_dict()["sources"][0]["examples"][0]["spans"][1] == {"text": "Hello.<|end|>", "trained": True}


def test_all_tokens_but_the_first_are_marked_with_train_on_all(write: Write) -> None:
    (example,) = examples(write("a.jsonl", [pair("a", "b")]), "data.train_on=all")
    assert [span.trained for span in example.spans] == [False, True]
    assert len(example.spans[0].text) == 1


def test_what_happens_to_an_example_is_said(write: Write) -> None:
    file = write("a.jsonl", [pair("a", "b" * 40), pair("a" * 90, "b"), pair("a", "b")])
    length = f"data.max_length={PROMPT + 20}"
    truncated, dropped, kept = examples(file, length)
    assert (truncated.fate, dropped.fate, kept.fate) == ("truncated", "dropped", "kept")
    assert truncated.tokens == PROMPT + 1 + 40 + 1
    assert truncated.spans[-1].text == "b" * 20  # max_length inputs, and the last label
    assert truncated.loss_tokens == 20
    assert dropped.reason == "it has no loss token before data.max_length"
    assert [examples(file, f"data.max_length={PROMPT + most}")[2].fate for most in (1, 2)] == ["truncated", "kept"]
    text = write("a.txt", "x" * 50)
    (split,) = examples(text, "data.max_length=16")
    assert (split.fate, split.tokens) == ("split", 51)
    (empty,) = examples(write("b.jsonl", [{"text": ""}]))
    assert (empty.fate, empty.reason) == ("dropped", "it is empty")


def test_only_the_first_records_are_read(write: Write) -> None:
    good = json.dumps(pair("a", "b")) + "\n"
    file = write("a.jsonl", good * 50 + "not JSON\n")
    assert len(examples(file)) == 3
    assert [one.number for one in examples(file, first=48, examples=2)] == [48, 49]
    with pytest.raises(UserMistake, match=r"a\.jsonl:51 is not a JSON record"):
        examples(file, first=49, examples=2)
    with pytest.raises(UserMistake, match=r"a\.jsonl:51 is not a JSON record"):
        api.data_stats(file)
    found = api.data_preview(file, ["data.on_error=skip"], examples=2, first=49).sources[0]
    assert (len(found.examples), found.skipped, found.records) == (1, 1, 50)
    assert "1 invalid record skipped; the first: " in api.data_preview(file, ["data.on_error=skip"], first=49).text()


def test_a_random_sample_is_that_of_its_seed(write: Write) -> None:
    file = write("a.jsonl", [pair(str(number), "b") for number in range(60)])
    first, again, other = ([one.number for one in examples(file, examples=5, seed=seed)] for seed in (1, 1, 2))
    assert first == again != other
    assert first == sorted(set(first))
    seen = {one.number for seed in range(40) for one in examples(file, examples=5, seed=seed)}
    assert len(seen) > 50


@pytest.mark.parametrize("override", ["data.pack=auto", "data.pack=false"])
@pytest.mark.parametrize("kind", ["alpaca", "text"])
def test_sequences_are_packed_as_training_packs_them(kind: str, override: str, write: Write) -> None:
    random = np.random.default_rng(3)
    sizes = random.integers(1, 60, 40).tolist()
    records = [pair("a", "b" * size) if kind == "alpaca" else {"text": "c" * size} for size in sizes]
    file = write("a.jsonl", records)
    length = 3 * PROMPT if kind == "alpaca" else 50
    overrides = ["model.tokenizer=bytes", f"data.max_length={length}", override]
    (source,) = api.data_preview(file, overrides, sequences=True, examples=1000).sources
    data = DataConfig(path=str(file), max_length=length, pack="auto" if override.endswith("auto") else False)
    prepared = prepare(data, BYTES, report=lambda _: None)
    numbers = [one.number for one in source.sequences]
    assert numbers != sorted(numbers)  # shuffled, because packing begins with the longest documents
    assert sorted(numbers) == list(range(len(prepared)))
    for sequence in source.sequences:
        tokens, flags = prepared[sequence.number]
        assert sequence.inputs == len(tokens) - 1
        assert sequence.loss_tokens == prepared.loss_tokens(np.array([sequence.number]))[0]
        assert "".join(span.text for one in sequence.documents for span in one.spans) == BYTES.decode(tokens)
        begins = [0, *(np.flatnonzero(flags[1:] & DOCUMENT) + 1).tolist()]
        assert [one.tokens for one in sequence.documents] == np.diff([*begins, len(tokens)]).tolist()
        restart = [0] * len(begins) if prepared.separate else begins
        assert [one.first_position for one in sequence.documents] == restart


def test_document_boundaries_are_rules_with_where_the_document_is_from(write: Write) -> None:
    file = write("a.jsonl", [pair("a", "b" * 10), pair("c", "d" * 20)])
    overrides = ["model.tokenizer=bytes", f"data.max_length={2 * PROMPT + 60}"]
    lines = api.data_preview(file, overrides, sequences=True).text().splitlines()
    assert "packed from the first 2 records only" in lines
    assert f"── document 1  {file}:2  {PROMPT + 22} tokens, positions from 0 ──" in lines
    assert f"── document 2  {file}:1  {PROMPT + 12} tokens, positions restart at 0 ──" in lines
    stream = write("b.jsonl", [{"text": "x" * 9}, {"text": "y" * 90}])
    lines = api.data_preview(stream, ["data.max_length=64"], sequences=True).text().splitlines()
    assert f"── document 2  {stream}:2  55 tokens, positions go on at 10 ──" in lines
    assert f"── document 1, continued  {stream}:2  37 tokens, positions from 0 ──" in lines


def test_the_statistics_are_those_of_the_documents(write: Write) -> None:
    outputs = ["b" * size for size in (5, 70, 5, 1, 1, 900)]
    records = [pair("a", output) for output in outputs]
    records[2:2] = [pair("a", None), pair("a" * 800, "b")]  # invalid, and without a loss token within max_length
    file = write("a.jsonl", records)
    length = 2 * PROMPT + 60
    overrides = ["model.tokenizer=bytes", f"data.max_length={length}", "data.on_error=skip", "train.global_batch=2"]
    said: list[str] = []
    found = api.data_stats(file, [*overrides, "data.validation=0", "train.epochs=3"], report=said.append)
    (source,) = found.sources
    sizes = [PROMPT + 2 + len(output) for output in outputs]
    dropped = PROMPT + 802
    assert (found.documents, source.tokens) == (7, sum(sizes) + dropped)
    assert (source.lengths.median, source.lengths.max) == (sorted([*sizes, dropped])[3], PROMPT + 902)
    assert sum(one.documents for one in source.lengths.histogram) == 7
    assert (source.longer, source.long_documents, source.dropped) == (2, "truncate", 1)
    assert source.tokens_lost == PROMPT + 902 + dropped - 2 * (length + 1)
    assert (source.skipped, source.empty) == (1, 0)
    assert source.first_skipped is not None
    assert source.first_skipped.startswith(f"{file}:3: output must be a string")
    assert source.duplicates is not None
    assert source.duplicates.documents == 2
    assert (source.duplicates.first, source.duplicates.copy_of) == (f"{file}:5", f"{file}:1")
    # The long document alone, the others two by two, and one left over.
    assert (found.sequences, source.packing.packed.sequences, source.packing.unpacked.sequences) == (4, 4, 7)
    inputs = sum(min(size, length + 1) for size in sizes) - found.sequences
    assert found.tokens_per_epoch == inputs
    assert source.packing.packed.filled == round(inputs / (found.sequences * length), 4)
    trained = sum(min(len(output) + 1, length - PROMPT) for output in outputs)
    assert found.loss_tokens_per_epoch == source.loss_tokens == trained
    assert (found.steps_per_epoch, found.steps, found.epochs) == (2.0, 6, 3.0)
    assert any("is in the cache" in sentence for sentence in said)
    text = found.text()
    assert f"2 (28.6%); the first: {file}:5 is {file}:1" in text
    assert "left out     1 without a loss token, 1 invalid" in text


def test_statistics_use_the_cache_of_training_and_training_theirs(write: Write, settings: Any) -> None:
    file = write("a.jsonl", [pair(str(number), "b" * number) for number in range(1, 60)])
    data = settings(source="json", path=file, max_length=300, pack="auto", validation=0.1)
    sets = prepare_sets(data, BYTES, seed=1234, report=lambda _: None)
    said: list[str] = []
    overrides = ["model.tokenizer=bytes", "data.max_length=300", "data.validation=0.1", "train.global_batch=4"]
    found = api.data_stats(file, overrides, report=said.append)
    assert any(sentence.startswith("Using cached tokenized data") for sentence in said)
    assert found.training_sequences == sets.order.training_count
    assert found.validation_sequences == sets.order.validation_count > 0
    assert found.steps == sets.order.training_count // 4
    by_tokens = api.data_stats(file, [*overrides, f"train.tokens={found.loss_tokens_per_epoch * 2}"])
    assert by_tokens.steps is not None
    assert abs(by_tokens.steps - 2 * found.steps_per_epoch) < 1
    assert api.data_stats(file, [*overrides, "train.steps=7"]).steps == 7


def test_data_for_less_than_one_step_is_described_too(write: Write) -> None:
    found = api.data_stats(write("a.jsonl", [pair("a", "b")] * 3), ["data.validation=0"])
    assert (found.steps, found.epochs) == (None, None)
    assert "less than one step of train.global_batch 64" in found.text()
    single = api.data_stats(write("b.jsonl", [pair("a", "b")]), ["train.steps=4"])
    assert (single.documents, single.training_sequences, single.steps) == (1, 1, 4)
    assert "a single sequence, which cannot be both trained on and held out" in str(single.problem)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("vocab: 100, positions: 2048", "The tokenizer has 259 tokens, but the model's vocabulary is 100"),
        ("vocab: 260, positions: 64", "data.max_length is 2048, but the model supports 64 positions"),
        ("vocab: 260, positions: 2048", None),
    ],
)
def test_a_model_that_training_would_refuse_these_tokens_for_is_said(
    shape: str, says: str | None, write: Write
) -> None:
    file = write("a.jsonl", [pair("a", "b")] * 100)
    model = f"model.shape={{family: llama, hidden: 32, layers: 1, heads: 2, {shape}}}"
    found = api.data_stats(file, [model, "model.tokenizer=bytes", "train.steps=2"])
    assert (found.problem or "").startswith(says or "")
    assert (found.problem is None) == (says is None)
    assert says is None or says in found.text()
    added = api.data_stats(file, [model, "model.tokenizer=bytes", "train.steps=2", 'model.add_tokens=["<new>"]'])
    assert "vocabulary" not in str(added.problem)


def test_the_fill_of_a_stream_is_compared_with_documents_one_by_one(write: Write) -> None:
    file = write("a.jsonl", [{"text": "x" * 30}] * 10)
    overrides = ["data.max_length=64", "data.validation=0"]
    packing = api.data_stats(file, overrides).sources[0].packing
    assert (packing.chosen, packing.packed.sequences) == ("packed", 5)
    assert (packing.unpacked.sequences, packing.unpacked.filled) == (10, round(30 / 64, 4))
    assert packing.packed.filled == round(309 / (5 * 64), 4)
    unpacked = api.data_stats(file, [*overrides, "data.pack=false"]).sources[0].packing
    assert (unpacked.chosen, unpacked.packed, unpacked.unpacked) == ("unpacked", packing.packed, packing.unpacked)


def test_percentiles_are_lengths_that_occur_and_bins_double() -> None:
    found = describe_lengths(np.arange(1, 101))
    assert (found.median, found.p90, found.p99, found.max, found.mean) == (51, 91, 100, 100, 50.5)
    assert [(one.shortest, one.longest, one.documents) for one in found.histogram] == [
        (1, 1, 1), (2, 3, 2), (4, 7, 4), (8, 15, 8), (16, 31, 16), (32, 63, 32), (64, 127, 37),
    ]  # fmt: skip
    same = describe_lengths(np.full(3, 8))
    assert [(one.shortest, one.documents) for one in same.histogram] == [(8, 3)]


def test_lengths_are_counted_from_the_sequences_where_they_were_not_stored(
    make_sequences: Callable[..., Sequences],
) -> None:
    sequences = make_sequences(20)
    assert document_lengths(sequences).tolist() == sequences.lengths(np.arange(20)).tolist()


def test_a_config_without_a_model_and_a_run_folder_are_files_to_look_at(write: Write, tmp_path: Path) -> None:
    file = write("a.jsonl", [pair("a", "b")])
    config = {"data": {"path": str(file), "max_length": 300}, "model": {"tokenizer": "bytes"}, "seed": 5}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "runs" / "x"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for given in (tmp_path / "data.yaml", run):
        found = api.data_preview(given, ["data.max_length=200"])
        assert (found.sources[0].path, found.sources[0].max_length) == (str(file), 200)
    said: list[str] = []
    assert api.data_preview(None, [f"data.path={file}"], report=said.append).tokenizer == "bytes"
    assert said == ["No tokenizer is given: one token per byte. Set model.tokenizer=FOLDER for that of your model."]
    with pytest.raises(UserMistake, match=r"model\.from or model\.shape must be given"):
        api.load_config(tmp_path / "data.yaml")
    odd = write("${oc.env:HOME} 'x\".jsonl", [pair("a", "b")])
    assert api.data_preview(odd).sources[0].path == str(odd)


def test_mistakes_are_those_of_the_other_commands(write: Write, tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match=r"data\.path .*nowhere\.jsonl does not exist"):
        api.data_preview(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserMistake, match=r"is not a key shoal knows\. Did you mean max_length"):
        api.data_preview(write("a.jsonl", [pair("a", "b")]), ["data.maxlength=3"])
    with pytest.raises(UserMistake, match=r"empty\.jsonl is empty"):
        api.data_preview(write("empty.jsonl", "\n"))
    with pytest.raises(UserMistake, match=r"data\.format auto does not recognize .* data\.columns='{text: question}'"):
        api.data_stats(write("odd.jsonl", [{"question": "?"}]))
    odd = write("odd.jsonl", [{"id": 3, "question": "?", "reply": "!"}])
    with pytest.raises(UserMistake) as refused:
        api.data_stats(odd)
    example = str(refused.value).partition("as in ")[2].partition(", or set")[0].replace("'", "")
    assert example == "data.columns={prompt: question, completion: reply}"
    assert api.data_stats(odd, [example, "model.tokenizer=bytes"]).documents == 1  # what is said works


class _DropsLeadingSpaces(ByteTokenizer):
    """Decodes as SentencePiece models do."""

    def decode(self, ids: Any, *, keep_special: bool = True) -> str:
        return super().decode(ids, keep_special=keep_special).lstrip(" ")


def test_spans_keep_the_space_between_them_and_the_marks_when_shortened() -> None:
    tokens = BYTES.encode("one two three")
    trained = [False] * 3 + [True] * 4 + [False] * 6
    spans = decode_spans(_DropsLeadingSpaces(), tokens, trained)
    assert spans == [Span("one", False), Span(" two", True), Span(" three", False)]
    assert mark(spans) == "one⟦ two⟧ three"
    short, shortened = shorten(spans, 5)
    assert (mark(short), shortened) == ("one⟦ t⟧", True)
    assert shorten(spans, 13) == (spans, False)
    split = decode_spans(BYTES, np.array([0xC3, 0xA9]), [False, True])  # inside a character
    assert [span.text for span in split] == ["\ufffd", "\ufffd"]
    assert decode_spans(BYTES, np.empty(0, np.int32), []) == []


def test_data_cannot_change_the_terminal(write: Write) -> None:
    file = write("a.jsonl", [pair("a", "\x1b[31mred\x07\x9b2J\ttab")])
    shown = api.data_preview(file, ["model.tokenizer=bytes"]).text()
    assert "␛[31mred␇\ufffd2J\ttab" in shown
    assert printable("a\x1bb\nc") == "a␛b\nc"


def run_without_torch(folder: Path, *commands: list[str]) -> list[Any]:
    """The JSON objects that the commands print, in one process, which must not import torch."""
    program = (
        "import sys; from shoal.cli import main\n"
        f"for command in {commands!r}:\n"
        "    sys.argv = ['shoal', *command]\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert not ended.code, ended.code\n"
        "    print(chr(0))\n"
        "assert sys.modules.get('torch') is None\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "PyTorch" not in ended.stderr
    return [json.loads(text) for text in ended.stdout.split("\0")[:-1]]


# One token per character, spaces as in Llama's tokenizer. The model cannot keep packed documents apart.
CHARACTERS = "▁ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz.,:#"
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
END = {"content": "</s>", "special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
MODEL_FILES = {
    "config.json": {"model_type": "bloom", "hidden_size": 8, "n_layer": 1, "n_head": 1, "vocab_size": 300},
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [{"id": 58, **END}],
        "pre_tokenizer": METASPACE,
        "decoder": METASPACE,
        "model": {
            "type": "BPE",
            "vocab": {**{one: index for index, one in enumerate(CHARACTERS)}, "<unk>": 57, "</s>": 58},
            "merges": [],
            "unk_token": "<unk>",
        },
    },
}


def test_the_commands_import_no_torch_with_a_tokenizer_and_a_model_of_transformers(
    write: Write, tmp_path: Path
) -> None:
    write("a.jsonl", [pair("Say hello.", "Hello there.")] * 4)
    for name, content in MODEL_FILES.items():
        write(f"model/{name}", json.dumps(content))
    preview, stats = run_without_torch(
        tmp_path,
        ["data", "preview", "a.jsonl", "model.tokenizer=model", "-n", "1", "--json"],
        ["data", "stats", "a.jsonl", "model.from=model", "train.steps=2", "data.validation=0", "--json"],
    )
    (example,) = preview["sources"][0]["examples"]
    assert example["spans"][1] == {"text": " Hello there.</s>", "trained": True}
    assert (stats["documents"], stats["sequences"], stats["steps"]) == (4, 4, 2)
    assert stats["sources"][0]["packing"]["chosen"] == "unpacked"

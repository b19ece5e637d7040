import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config.schema import DataConfig
from shoal.data import Tokenizer, load_tokenizer, prepare, tokenize, workers
from shoal.mistakes import UserMistake

TEXTS = [
    "",
    "plain words",
    "line\r\nline\n\n\ttab  two spaces ",
    "naïve café — “quoted” 漢字 🐟👩‍👩‍👧 \u2028",
    "".join(map(chr, range(0x250))),
    "a name is only a name: <|end|><|begin|><|pad|> </s>",
    " leading and trailing ",
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    load_tokenizer("bytes").save(folder)
    return folder


def make_bpe(folder: Path, *, end: bool = True, begins: bool = False) -> Path:
    """A small tokenizer such as people have in a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat and the hat"] * 20, trainer)
    if begins:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = {"bos_token": "<s>"} | ({"eos_token": "</s>"} if end else {})
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(str(folder))
    return folder


def test_bytes_and_its_export_give_the_same_ids_for_any_text(exported: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer("bytes"), AutoTokenizer.from_pretrained(str(exported))
    assert (ours.begin, ours.end, ours.pad, ours.size) == (256, 257, 258, 259)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (256, 257, 258, 259)
    for text, ids in zip(TEXTS, ours.encode_many(TEXTS), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == theirs(text)["input_ids"] == list(text.encode())
        assert ours.decode(ids) == theirs.decode(ids.tolist()) == text


def test_bytes_decodes_special_and_broken_ids_as_its_export_does(exported: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer("bytes"), AutoTokenizer.from_pretrained(str(exported))
    for ids in ([256, 104, 105, 257, 258], [195], [104, 0xF0, 0x9F]):
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, keep_special=False) == theirs.decode(ids, skip_special_tokens=True)


def test_the_export_of_bytes_loaded_as_a_folder_is_the_same_tokenizer(exported: Path) -> None:
    ours, again = load_tokenizer("bytes"), load_tokenizer("mine", exported)
    assert (again.begin, again.end, again.pad, again.size) == (256, 257, 258, 259)
    assert not again.prepends_begin
    for first, second in zip(ours.encode_many(TEXTS), again.encode_many(TEXTS), strict=True):
        assert first.tolist() == second.tolist()


def test_a_folder_tokenizer_round_trips_through_save(tmp_path: Path) -> None:
    loaded = load_tokenizer(str(make_bpe(tmp_path / "bpe", begins=True)))
    assert loaded.prepends_begin
    assert loaded.begin == 0
    assert loaded.pad == loaded.end == 1
    ids = loaded.encode("the cat 🐟")
    assert loaded.begin not in ids.tolist()
    assert loaded.decode(ids) == "the cat 🐟"
    loaded.save(tmp_path / "again")
    again = load_tokenizer("again", tmp_path / "again")
    assert again.fingerprint == loaded.fingerprint
    assert again.encode("the mat").tolist() == loaded.encode("the mat").tolist()


def test_the_fingerprint_tells_tokenizers_apart_and_forgets_the_last_call(tmp_path: Path) -> None:
    plain = load_tokenizer("plain", make_bpe(tmp_path / "plain"))
    begins = load_tokenizer("begins", make_bpe(tmp_path / "begins", begins=True))
    assert not plain.prepends_begin
    assert len({plain.fingerprint, begins.fingerprint, load_tokenizer("bytes").fingerprint}) == 3
    used = load_tokenizer("plain", tmp_path / "plain")
    used.hugging_face(["the cat sat", "the"], truncation=True, max_length=2)
    assert used.fingerprint == plain.fingerprint
    assert len(used.encode("the cat sat on the mat")) > 2


def test_a_forked_process_may_encode_after_its_parent_did(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("mine", make_bpe(tmp_path / "bpe"))
    texts = ["the cat sat on the mat"] * 2000
    expected = len(tokenizer.encode_many(texts)[0])  # enough of them that the library starts its threads
    process = multiprocessing.get_context("fork").Process(target=_encode, args=(tokenizer, texts, expected))
    process.start()
    process.join(20)
    hanging = process.is_alive()
    process.kill()
    assert not hanging
    assert process.exitcode == 0


def test_worker_processes_give_the_tokens_of_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("mine", make_bpe(tmp_path / "bpe", begins=True))
    texts = [f"the cat sat on mat {number} 🐟" * (number % 7) for number in range(400)]
    expected = tokenizer.encode_many(texts)  # which may start the library's threads
    monkeypatch.setattr(tokenize, "WORTH_WORKERS", 1)
    monkeypatch.setattr(tokenize, "_CHARACTERS_AT_ONCE", 1000)
    monkeypatch.setattr(workers, "available_cores", lambda: 2)
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sequences = prepare(DataConfig(path=str(file)), tokenizer, cache=tmp_path, report=lambda sentence: None)
    whole = [[tokenizer.begin, *ids.tolist(), tokenizer.end] for ids in expected if len(ids)]
    assert sequences.tokens.tolist() == [token for one in whole for token in one]


def _encode(tokenizer: Tokenizer, texts: list[str], expected: int) -> None:
    assert len(tokenizer.encode_many(texts)[0]) == expected


def test_a_tokenizer_without_an_end_token_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match=r"no end token.*eos_token"):
        load_tokenizer("mine", make_bpe(tmp_path / "endless", end=False))


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match=r"No tokenizer could be loaded.*model\.tokenizer"):
        load_tokenizer("nowhere", tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "gemma", "bert", "t5"])
def test_a_folder_of_a_model_without_a_tokenizer_has_none(kind: str, tmp_path: Path) -> None:
    # transformers makes one of special tokens alone, to which a text is empty or unknown.
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(UserMistake, match=r"from .+ \(there is no vocabulary in it\)\. Set model\.tokenizer to a"):
        load_tokenizer(str(tmp_path))


def test_importing_and_using_bytes_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, threading, shoal.data as data; data.load_tokenizer('bytes').encode('x');"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules); assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

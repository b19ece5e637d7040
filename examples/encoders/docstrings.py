"""Texts for recipes/encoder-pretrain.yaml and encoder-finetune.yaml, from this Python's own standard library.

Each docstring of a function or class is an example; its label is the package it comes from. A WordPiece tokenizer is
trained on the same texts. No download. The numbers of docs/encoders.md are of Python 3.11.

usage: python examples/encoders/docstrings.py [FOLDER]        default: data/docstrings
"""

import ast
import json
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PACKAGES = 8  # the ones with the most docstrings
SHORTEST = 40  # characters
VOCABULARY = 4096
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def docstrings() -> Iterator[tuple[str, str]]:
    """(package, text) of each docstring, every text once."""
    library = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).parts
        if parts[0] in ("site-packages", "test", "idlelib", "lib2to3", "turtledemo") or "tests" in parts:
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                if len(text) >= SHORTEST and text not in seen:
                    seen.add(text)
                    yield parts[0].removesuffix(".py"), text


def train_tokenizer(texts: list[str], folder: Path) -> None:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL), show_progress=False)
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    PreTrainedTokenizerFast(tokenizer_object=backend, **dict(zip(names, SPECIAL, strict=True))).save_pretrained(folder)


def naive_bayes(rows: list[tuple[str, str]], split: int) -> float:
    """The accuracy of word counts alone, trained on the first rows: what a simple method does."""
    words = {label: Counter[str]() for label in {label for label, _ in rows}}
    for label, text in rows[:split]:
        words[label].update(re.findall(r"\w+", text.lower()))
    known = {word for counts in words.values() for word in counts}
    totals = {label: sum(counts.values()) + len(known) for label, counts in words.items()}
    share = Counter(label for label, _ in rows[:split])
    from math import log

    def score(label: str, text: str) -> float:
        found = (word for word in re.findall(r"\w+", text.lower()) if word in known)
        return log(share[label]) + sum(log((words[label][word] + 1) / totals[label]) for word in found)

    right = sum(max(words, key=lambda one: score(one, text)) == label for label, text in rows[split:])
    return right / len(rows[split:])


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data/docstrings")
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(docstrings())
    most = [label for label, _ in Counter(label for label, _ in rows).most_common(PACKAGES)]
    labelled = [(label, text) for label, text in rows if label in most]
    labelled.sort(key=lambda row: hash_of(row[1]))
    split = len(labelled) * 4 // 5
    files = {"all": rows, "train": labelled[:split], "test": labelled[split:]}
    held_out = {text for _, text in labelled[split:]}
    files["all"] = [row for row in rows if row[1] not in held_out]  # pretraining does not see them either
    for name, some in files.items():
        lines = (json.dumps({"text": text, "package": label}) + "\n" for label, text in some)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    train_tokenizer([text for _, text in files["all"]], folder / "tokenizer")
    counts = Counter(label for label, _ in labelled[split:])
    print(
        json.dumps(
            {
                "texts": len(rows),
                "labelled": len(labelled),
                "test": len(held_out),
                "packages": most,
                "majority": round(counts.most_common(1)[0][1] / len(held_out), 4),
                "naive_bayes": round(naive_bayes(labelled, split), 4),
            },
            indent=2,
        )
    )


def hash_of(text: str) -> str:
    """An order that has nothing to do with where a text comes from."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    main()

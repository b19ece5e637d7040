"""The tokenizer of cells: a gene is a token. It keeps what else a cell's tokens depend on: medians, and genes left out.

Saved, it is a folder that `AutoTokenizer` loads, with the genes in `vocab.txt` and the rest in `genes.json`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.tokenizer_base import Tokenizer, disable_parallelism
from shoal.files import write_atomically
from shoal.mistakes import UserMistake

GENES_FILE = "genes.json"
VOCABULARY_FILE = "vocab.txt"
FIRST_GENE = 4  # id of the first gene, after the special tokens


class GeneTokenizer(Tokenizer):
    """`<pad>`, `<mask>`, `<cls>` and `<eos>`, then genes. `medians`: of their expression, where ranks are relative to
    it. `left_out`: genes that are known, and not used."""

    SPECIAL = ("<pad>", "<mask>", "<cls>", "<eos>")

    def __init__(
        self,
        genes: Sequence[str],
        *,
        name: str = "genes",
        medians: Mapping[str, float] | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.genes = tuple(genes)
        self.left_out = frozenset(left_out)
        self.medians = None if medians is None else {gene: medians[gene] for gene in genes if gene in medians}
        self.tokens = (*self.SPECIAL, *self.genes)
        self.size = len(self.tokens)
        self.pad, self.mask, self.cls, self.end = range(FIRST_GENE)
        self.begin: int | None = self.cls
        self.prepends_begin = True
        self.added: dict[str, int] = {}
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self._hugging_face: Any = None

    @classmethod
    def load(cls, folder: Path, name: str) -> "GeneTokenizer":
        """The tokenizer that `save` has written."""
        try:
            kept = json.loads((folder / GENES_FILE).read_text())
            tokens = (folder / VOCABULARY_FILE).read_text().splitlines()
            assert tuple(tokens[:FIRST_GENE]) == cls.SPECIAL
            return cls(tokens[FIRST_GENE:], name=name, medians=kept["medians"], left_out=kept["left_out"])
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise UserMistake(
                f"{folder} has a damaged tokenizer of genes: {GENES_FILE} and {VOCABULARY_FILE} do not fit. "
                "Export the run again."
            ) from error

    def save(self, folder: Path) -> None:
        super().save(folder)
        medians = None if self.medians is None else {gene: float(value) for gene, value in self.medians.items()}
        kept = {"medians": medians, "left_out": sorted(self.left_out)}
        write_atomically(folder / VOCABULARY_FILE, "".join(f"{token}\n" for token in self.tokens))
        write_atomically(folder / GENES_FILE, json.dumps(kept, indent=1) + "\n")

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        return None

    @chat_template.setter
    def chat_template(self, text: str) -> None:
        raise UserMistake("A tokenizer of genes has no use for data.chat_template; leave it out.")

    @property
    def fingerprint(self) -> str:
        medians = None if self.medians is None else sorted(self.medians.items())
        described = ["genes-1", self.tokens, medians, sorted(self.left_out)]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array([self._id(name) for name in text.split()], dtype=np.int32) for text in texts]

    def _id(self, name: str) -> int:
        if name not in self.ids:
            raise UserMistake(f"{name!r} is not a gene of the vocabulary, which has {len(self.genes):,} genes.")
        return self.ids[name]

    def id_of(self, token: str) -> int:
        return self._id(token)

    def decode(self, ids: Sequence[int] | np.ndarray, *, keep_special: bool = True) -> str:
        return " ".join(self.tokens[one] for one in map(int, ids) if keep_special or one >= FIRST_GENE)

    @property
    def hugging_face(self) -> Any:
        if self._hugging_face is None:
            disable_parallelism()
            from tokenizers import Tokenizer as Backend
            from tokenizers import models, pre_tokenizers, processors
            from transformers import PreTrainedTokenizerFast

            pad, mask, cls, end = self.SPECIAL
            backend = Backend(models.WordLevel(vocab=self.ids, unk_token=pad))
            backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            backend.post_processor = processors.TemplateProcessing(
                single=f"{cls} $A {end}", special_tokens=[(cls, self.cls), (end, self.end)]
            )
            self._hugging_face = PreTrainedTokenizerFast(
                tokenizer_object=backend,
                pad_token=pad,
                mask_token=mask,
                cls_token=cls,
                bos_token=cls,
                eos_token=end,
                sep_token=end,
                clean_up_tokenization_spaces=False,
            )
        return self._hugging_face


def is_gene_tokenizer(folder: Path) -> bool:
    return (folder / GENES_FILE).is_file() and (folder / VOCABULARY_FILE).is_file()

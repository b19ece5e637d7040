"""The tokenizer interface, and a guard against deadlocks of the tokenizers library in forked processes."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shoal.mistakes import UserMistake

MASKS = ("<mask>", "[MASK]", "<|mask|>")  # names of mask tokens
Offsets = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids; start and end of each token, in characters


class Tokenizer(ABC):
    """The interface that shoal uses. `hugging_face` is the object other libraries expect."""

    name: str
    end: int  # written after every document
    begin: int | None
    prepends_begin: bool  # whether documents start with `begin` (Llama: yes, GPT-2: no)
    pad: int  # masked in the loss, so the end token serves if there is no pad token
    size: int  # ids are below this, added tokens included
    mask: int | None = None  # stands for a token that is to be predicted: of tokenizers for masked language models
    added: Mapping[str, int]  # the ids of the tokens of model.add_tokens that the tokenizer did not have

    @property
    def special(self) -> frozenset[int]:
        """The ids that stand for no text. A masked language model never sees one in place of a token."""
        own = (self.begin, self.end, self.pad, self.mask, *self.added.values())
        return frozenset(one for one in own if one is not None)

    @property
    @abstractmethod
    def chat_template(self) -> str | dict[str, str] | None:
        """The chat template, or several by name. It is saved with the tokenizer."""

    @chat_template.setter
    @abstractmethod
    def chat_template(self, text: str) -> None: ...

    @property
    @abstractmethod
    def hugging_face(self) -> Any: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Equal for two tokenizers if and only if they give the same ids; part of the cache key."""

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids (int32) of each text, without added special tokens."""

    def encode_joined(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """The ids of all texts, one after another, and how many each has."""
        encoded = self.encode_many(texts)
        return np.concatenate([np.empty(0, np.int32), *encoded]), [len(ids) for ids in encoded]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Offsets]:
        """Like `encode_many`, with the characters of each token."""
        raise UserMistake(
            f"The tokenizer {self.name} does not tell which characters a token has, so it cannot train on answers in "
            "a conversation. Set model.tokenizer to one with a tokenizer.json, or data.train_on: all."
        )

    def template_tokens(self) -> tuple[dict[str, str], list[str]]:
        """The special tokens that a chat template names (bos_token, eos_token …), and every text that is always one
        token wherever it stands."""
        return {}, []

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray, *, keep_special: bool = True) -> str: ...

    def encode(self, text: str) -> np.ndarray:
        return self.encode_many([text])[0]

    def id_of(self, token: str) -> int:
        """The id of a token of the vocabulary."""
        return int(self.hugging_face.convert_tokens_to_ids(token))

    def save(self, folder: Path) -> None:
        """Write a folder that `AutoTokenizer.from_pretrained` loads."""
        self.hugging_face.save_pretrained(str(folder))


def find_mask(added: Sequence[str]) -> str | None:
    """The mask token among tokens of `model.add_tokens`, by its usual names."""
    return next((name for name in MASKS if name in added), None)


# The tokenizers library has a thread pool that does not survive a fork: a child that uses its parent's pool deadlocks.
# So its parallelism is off (which also silences its warning), and on only while encoding in bulk, in a process that did
# not inherit a pool. A value set by the user in the environment is kept.
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_OURS = "false"
_pool_owner: int | None = None


def disable_parallelism() -> None:
    """Call this before the first use of the tokenizers library."""
    os.environ.setdefault(_PARALLELISM, _OURS)


def disable_threads() -> None:
    """For a worker process: the library encodes in the calling thread only, whatever the environment says."""
    global _pool_owner
    _pool_owner = 0  # no process
    os.environ[_PARALLELISM] = _OURS


@contextmanager
def parallel_when_safe() -> Iterator[None]:
    """Enable the library's threads while encoding in bulk."""
    global _pool_owner
    if os.environ.get(_PARALLELISM, _OURS) != _OURS or _pool_owner not in (None, os.getpid()):
        yield
        return
    _pool_owner = os.getpid()
    os.environ[_PARALLELISM] = "true"
    try:
        yield
    finally:
        os.environ[_PARALLELISM] = _OURS

"""Text to token ids and back: the built-in `bytes` and `chess`, or a local Hugging Face tokenizer.

transformers takes seconds to import, so it is imported lazily; `bytes` encodes and decodes without it.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

import shoal.offline  # noqa: F401
from shoal.data.cells.gene_tokenizer import GeneTokenizer, is_gene_tokenizer
from shoal.data.chess_tokenizer import ChessTokenizer
from shoal.data.tokenizer_base import Offsets, Tokenizer, disable_parallelism, find_mask, parallel_when_safe
from shoal.mistakes import UserMistake
from shoal.paths import user_path

# Names that need no folder.
BUILT_IN = ("bytes", "chess")


def load_tokenizer(name: str, folder: Path | None = None, *, add_tokens: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer called `name`: `bytes`, `chess`, or the one in `folder`, with `add_tokens` in its vocabulary.

    Without `folder`, `name` is a folder or an id in the local Hugging Face cache. Never uses the network and never runs
    code that comes with a tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer(add_tokens)
    if name == "chess":
        if add_tokens:
            raise UserMistake("model.add_tokens: the tokenizer chess encodes moves and nothing else; leave it out.")
        return ChessTokenizer()
    if folder is None and (named := user_path(name, "model.tokenizer")).exists():
        folder = named
    if folder is not None and is_gene_tokenizer(folder):
        if add_tokens:
            raise UserMistake("model.add_tokens: the tokenizer has genes and nothing else; leave it out.")
        return GeneTokenizer.load(folder, name)
    location = name if folder is None else str(folder)
    disable_parallelism()
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(location, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types here: OSError, ValueError, KeyError, its own
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _no_tokenizer(location, reason) from error
    if _is_blank(loaded):
        raise _no_tokenizer(location, "there is no vocabulary in it")
    return PretrainedTokenizer(name, loaded, add_tokens)


def _no_tokenizer(location: str, reason: str) -> UserMistake:
    return UserMistake(
        f"No tokenizer could be loaded from {location} ({reason.rstrip('.:')}). Set model.tokenizer to a folder with a "
        "tokenizer.json, to an id that is in the local Hugging Face cache, to `bytes`, or to `chess`."
    )


def _is_blank(loaded: Any) -> bool:
    """Whether it has special tokens alone. For a folder with a config.json and without a tokenizer, transformers makes
    such a one of many model types (qwen2, gemma, bert), to which every text is empty or unknown. T5's has a `▁` too."""
    special = {*loaded.all_special_tokens, *map(str, loaded.added_tokens_decoder.values()), "▁"}
    vocabulary: dict[str, int] = loaded.get_vocab()
    return vocabulary.keys() <= special


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte: id = byte value, then three special tokens.

    The name of a special token inside a text is encoded as text: no document can contain an end token. Tokens that are
    added to the vocabulary are found in texts: chat templates write them there.
    """

    SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")

    def __init__(self, add_tokens: Sequence[str] = ()) -> None:
        self.name = "bytes"
        self.begin, self.end, self.pad = 256, 257, 258
        self.prepends_begin = False
        present = {*self.SPECIAL, *_byte_level_alphabet()}
        new = [token for token in add_tokens if token not in present]
        self.added = {token: 259 + index for index, token in enumerate(new)}
        self.size = 259 + len(new)
        mask = find_mask(new)
        self.mask = None if mask is None else self.added[mask]
        self._tokens = (*self.SPECIAL, *new)  # from id 256
        longest_first = sorted(map(re.escape, new), key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(longest_first)})") if new else None
        self._hugging_face: Any = None
        self._chat_template: str | None = None

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        return self._chat_template

    @chat_template.setter
    def chat_template(self, text: str) -> None:
        self._chat_template, self._hugging_face = text, None

    @property
    def fingerprint(self) -> str:
        return f"bytes-1 and {list(self.added)}" if self.added else "bytes-1"

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._pattern is not None:
            return [np.concatenate([self._encode(part) for part in self._pattern.split(text)]) for text in texts]
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    def _encode(self, part: str) -> np.ndarray:
        if part in self.added:
            return np.array([self.added[part]], dtype=np.int32)
        return np.frombuffer(part.encode(), dtype=np.uint8).astype(np.int32)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Offsets]:
        found = []
        for text in texts:
            ids, starts, ends, at = [], [], [], 0
            for part in [text] if self._pattern is None else self._pattern.split(text):
                encoded = self._encode(part)
                inside = np.cumsum((encoded & 0xC0) != 0x80) - 1  # every other byte continues a character
                whole = part in self.added
                ids.append(encoded)
                starts.append(at + (0 * inside if whole else inside))
                ends.append(at + (0 * inside + len(part) if whole else inside + 1))
                at += len(part)
            found.append((np.concatenate(ids), np.concatenate(starts), np.concatenate(ends)))
        return found

    def template_tokens(self) -> tuple[dict[str, str], list[str]]:
        begin, end, pad = self.SPECIAL
        return {"bos_token": begin, "eos_token": end, "pad_token": pad}, []

    def decode(self, ids: Sequence[int] | np.ndarray, *, keep_special: bool = True) -> str:
        decoded = bytearray()
        for token in map(int, ids):
            if token < 256:
                decoded.append(token)
            elif keep_special:
                decoded += self._tokens[token - 256].encode()
        return decoded.decode(errors="replace")

    @property
    def hugging_face(self) -> Any:
        if self._hugging_face is None:
            disable_parallelism()
            from tokenizers import Tokenizer as Backend
            from tokenizers import decoders, models, pre_tokenizers
            from transformers import PreTrainedTokenizerFast

            backend = Backend(models.BPE(vocab=_byte_level_alphabet(), merges=[]))
            # No regex: it only restricts merges, and there are none.
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.decoder = decoders.ByteLevel()
            begin, end, pad = self.SPECIAL
            self._hugging_face = PreTrainedTokenizerFast(
                tokenizer_object=backend,
                bos_token=begin,
                eos_token=end,
                pad_token=pad,
                clean_up_tokenization_spaces=False,
                split_special_tokens=True,
                chat_template=self._chat_template,
            )
            _add(self._hugging_face, list(self.added))
            if (mask := find_mask(list(self.added))) is not None:
                self._hugging_face.mask_token = mask
        return self._hugging_face


class PretrainedTokenizer(Tokenizer):
    """A Hugging Face tokenizer behind the `Tokenizer` interface."""

    def __init__(self, name: str, loaded: Any, add_tokens: Sequence[str] = ()) -> None:
        # Tokenizers of encoders call them so.
        end = loaded.sep_token_id if loaded.eos_token_id is None else loaded.eos_token_id
        begin = loaded.cls_token_id if loaded.bos_token_id is None else loaded.bos_token_id
        if end is None:
            raise UserMistake(
                f"The tokenizer {name} has no end token, which separates documents. Add an `eos_token` "
                "to its tokenizer_config.json, or set model.tokenizer to one that has an end token."
            )
        self.name = name
        self._loaded = loaded
        self._fingerprint: str | None = None
        self.end = int(end)
        self.begin = None if begin is None else int(begin)
        self.pad = self.end if loaded.pad_token_id is None else int(loaded.pad_token_id)
        self.added = _add(loaded, add_tokens)
        self.size = max([len(loaded), *(number + 1 for number in self.added.values())])
        if loaded.mask_token_id is None and (mask := find_mask(list(self.added))) is not None:
            loaded.mask_token = mask  # so that it is saved and exported
        self.mask = None if loaded.mask_token_id is None else int(loaded.mask_token_id)
        # Found by calling it: `add_bos_token` in the tokenizer's config is often missing or wrong.
        first = list(loaded("a", return_attention_mask=False)["input_ids"])[:1]
        self.prepends_begin = self.begin is not None and first == [self.begin]

    @property
    def hugging_face(self) -> Any:
        return self._loaded

    @property
    def special(self) -> frozenset[int]:
        return super().special | {int(one) for one in self._loaded.all_special_ids}

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        template: str | dict[str, str] | None = getattr(self._loaded, "chat_template", None)
        return template

    @chat_template.setter
    def chat_template(self, text: str) -> None:
        self._loaded.chat_template = text

    @property
    def fingerprint(self) -> str:
        if self._fingerprint is None:
            backend = self._backend()
            if backend is not None:
                # As text: the library writes the same tokenizer the same way, and to parse the text takes much longer.
                behaviour = backend.to_str()
            else:
                behaviour = {"class": type(self._loaded).__name__, "vocabulary": self._loaded.get_vocab()}
            split = bool(getattr(self._loaded, "split_special_tokens", False))
            described = [behaviour, split, self.end, self.begin, self.prepends_begin, self.size]
            self._fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
        return self._fingerprint

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        ids, counts = self.encode_joined(texts)
        ends = list(accumulate(counts))
        return [ids[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def encode_joined(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        backend = self._backend()
        if not texts:
            found: list[list[int]] = []
        elif backend is None:
            called = self._loaded(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
            found = called["input_ids"]
        else:
            with parallel_when_safe():
                encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
            found = [encoding.ids for encoding in encodings]
        # One array of all: an array of each text takes twice as long.
        counts = [len(ids) for ids in found]
        return np.fromiter(chain.from_iterable(found), dtype=np.int32, count=sum(counts)), counts

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Offsets]:
        if not texts:
            return []
        backend = self._backend()
        if backend is None:
            return super().encode_with_offsets(texts)
        with parallel_when_safe():
            encodings = backend.encode_batch(list(texts), add_special_tokens=False)
        found = []
        for encoding in encodings:
            offsets = np.fromiter(chain.from_iterable(encoding.offsets), dtype=np.int64).reshape(-1, 2)
            found.append((np.asarray(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1]))
        return found

    def _backend(self) -> Any:
        """The tokenizers library directly: transformers would also build Python lists of the masks and offsets."""
        backend = getattr(self._loaded, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = bool(getattr(self._loaded, "split_special_tokens", False))
        return backend

    def template_tokens(self) -> tuple[dict[str, str], list[str]]:
        special = {
            name: str(token) for name, token in self._loaded.special_tokens_map.items() if isinstance(token, str)
        }
        if getattr(self._loaded, "split_special_tokens", False):
            return special, []
        added = {str(token) for token in getattr(self._loaded, "added_tokens_decoder", {}).values()}
        return special, sorted(added | {str(token) for token in self._loaded.all_special_tokens})

    def decode(self, ids: Sequence[int] | np.ndarray, *, keep_special: bool = True) -> str:
        text = self._loaded.decode([int(token) for token in ids], skip_special_tokens=not keep_special)
        assert isinstance(text, str)
        return text


def _add(loaded: Any, tokens: Sequence[str]) -> dict[str, int]:
    """Add those of `tokens` that the vocabulary does not have, as special tokens; returns their ids."""
    before = loaded.get_vocab()
    new = [token for token in tokens if token not in before]
    if not new:
        return {}
    from transformers import AddedToken

    # A tokenizer that encodes special tokens in a text as text would never produce those of a chat template.
    special = not getattr(loaded, "split_special_tokens", False)
    loaded.add_tokens([AddedToken(token, special=special, normalized=False) for token in new], special_tokens=special)
    added = {token: int(loaded.convert_tokens_to_ids(token)) for token in new}
    if taken := set(added.values()) & set(before.values()):
        raise UserMistake(
            f"model.add_tokens: this tokenizer's ids have gaps, and it gave an added token the id {min(taken)}, which "
            "is another token's; add them to its files, and then list them here."
        )
    return added


def _byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE uses for each byte: itself if printable, else the next one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, spare = {}, 0x100
    for byte in range(256):
        if byte in printable:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(spare)] = byte
            spare += 1
    return alphabet

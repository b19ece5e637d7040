"""The built-in tokenizer `chess`: a UCI move is two tokens, its origin square and its destination square.

Origin squares start with a space (" e2"), so that joined tokens are the text. Encoding therefore adds a space before
the first move, and decoding removes it.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.data.tokenizer_base import Tokenizer, disable_parallelism
from shoal.mistakes import UserMistake

_SQUARES = [file + rank for rank in "12345678" for file in "abcdefgh"]
_MOVE = re.compile(r"([a-h][1-8])([a-h][1-8])([qrbn]?)")


class ChessTokenizer(Tokenizer):
    """64 origin squares, 64 destination squares, 4 promotions, then 4 special tokens: 136 ids."""

    SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>", "<|unknown|>")
    TOKENS = (*(" " + square for square in _SQUARES), *_SQUARES, *"qrbn", *SPECIAL)

    def __init__(self) -> None:
        self.name = "chess"
        self.size = len(self.TOKENS)
        self.added: dict[str, int] = {}
        self._ids = {token: number for number, token in enumerate(self.TOKENS)}
        self.begin, self.end, self.pad, self._unknown = (self._ids[token] for token in self.SPECIAL)
        self.prepends_begin = True  # so that the first move is a loss token too
        self._hugging_face: Any = None

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        return None

    @chat_template.setter
    def chat_template(self, text: str) -> None:
        raise UserMistake("The tokenizer chess has only moves, so it has no use for data.chat_template; leave it out.")

    @property
    def fingerprint(self) -> str:
        return "chess-1"

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self._encode(text), dtype=np.int32) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        moves = text.split()
        for index, move in enumerate(moves):
            if (match := _MOVE.fullmatch(move)) is not None:
                origin, destination, promotion = match.groups()
                ids += (self._ids[" " + origin], self._ids[destination])
                if promotion:
                    ids.append(self._ids[promotion])
            elif index == len(moves) - 1 and move in _SQUARES:  # a prompt may end after an origin square
                ids.append(self._ids[" " + move])
            else:
                raise UserMistake(
                    f"{move!r} is not a chess move in UCI notation; write moves such as e2e4, e1g1 or e7e8q with "
                    "spaces between them, or set model.tokenizer to a tokenizer for other text."
                )
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray, *, keep_special: bool = True) -> str:
        first_special = self.size - len(self.SPECIAL)
        text = "".join(self.TOKENS[token] for token in map(int, ids) if keep_special or token < first_special)
        return text.removeprefix(" ")

    @property
    def hugging_face(self) -> Any:
        if self._hugging_face is None:
            disable_parallelism()
            from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
            from tokenizers import Tokenizer as Backend
            from transformers import PreTrainedTokenizerFast

            begin, end, pad, unknown = self.SPECIAL
            backend = Backend(models.WordLevel(vocab=self._ids, unk_token=unknown))
            backend.normalizer = normalizers.Sequence(
                [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(), normalizers.Prepend(" ")]
            )
            # A square after a space, a square, a promotion; anything else becomes one unknown token.
            backend.pre_tokenizer = pre_tokenizers.Split(Regex(" ?[a-h][1-8]|[qrbn]"), "isolated")
            backend.post_processor = processors.TemplateProcessing(
                single=f"{begin} $A", special_tokens=[(begin, self.begin)]
            )
            backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
            self._hugging_face = PreTrainedTokenizerFast(
                tokenizer_object=backend,
                bos_token=begin,
                eos_token=end,
                pad_token=pad,
                unk_token=unknown,
                clean_up_tokenization_spaces=False,
            )
        return self._hugging_face

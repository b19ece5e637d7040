"""Text from a model, piece by piece. Sampling is transformers' own; here is how it is asked and how text comes out."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.models.emulate import emulated_dtypes, emulated_matmuls
from shoal.use.load import LoadedRun
from shoal.use.prompt import Prompt, make_prompt, room_for_answer

# Enough of the prompt's end to know whether what follows begins with a space.
CONTEXT = 4


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0: always the likeliest one."""

    tokens: int = 100
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserMistake(f"--tokens {self.tokens}: at least 1 token must be asked for.")
        if not 0 <= self.temperature < float("inf"):
            raise UserMistake(f"--temperature {self.temperature:g} must be 0 (the likeliest token) or more.")
        if not 0 < self.top_p <= 1:
            raise UserMistake(f"--top-p {self.top_p:g} must be above 0 and at most 1 (1 leaves it out).")
        if self.top_k is not None and self.top_k < 1:
            raise UserMistake(f"--top-k {self.top_k} must be at least 1; leave it out to choose among all tokens.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserMistake(f"--seed {self.seed} must be from 0 up to 2^63.")

    def for_transformers(self) -> dict[str, Any]:
        if self.temperature == 0:
            return {"do_sample": False}
        # Left unset, transformers would cut to the likeliest 50; 0 is its word for all.
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k or 0}


def generate(
    loaded: LoadedRun,
    prompt: str,
    *,
    tokens: int = 100,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    raw: bool = False,
) -> str:
    """The text after `prompt`, up to the end token or `tokens` tokens. `raw`: instructions are not wrapped."""
    with stream(loaded, prompt, Sampling(tokens, temperature, top_p, top_k, seed), raw=raw) as answer:
        return "".join(answer)


def stream(loaded: LoadedRun, prompt: str, sampling: Sampling, *, raw: bool = False) -> "Answer":
    """As `generate`, piece by piece: `with stream(…) as answer: for piece in answer: …`."""
    return Answer(loaded, make_prompt(loaded, prompt, raw=raw), sampling)


def refuse_unknown_tokens(loaded: LoadedRun, ids: list[int]) -> None:
    """A tokenizer may have been given tokens that the model was not."""
    known = loaded.model.config.get_text_config().vocab_size
    if max(ids, default=0) >= known:
        raise UserMistake(
            f"The prompt has token {max(ids)}, but the vocabulary of {loaded.path} ends at {known - 1}: its tokenizer "
            "is another model's, or was given tokens that the model was not."
        )


@dataclass(frozen=True)
class Generated:
    """An answer that is complete, and what it took."""

    prompt: str
    text: str
    tokens: int
    step: int | None
    seed: int  # gives the same text again
    cut_off: bool  # the model had no positions left

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Answer(Iterator[str]):
    """Pieces of text as the model makes them. `text` and `ids` hold what there is so far.

    transformers pushes tokens and a reader pulls text, so the model works in a thread of its own.
    """

    def __init__(self, loaded: LoadedRun, prompt: Prompt, sampling: Sampling) -> None:
        self.text = ""
        self.ids: list[int] = []  # without the end token
        self.seed = random.SystemRandom().randrange(2**32) if sampling.seed is None else sampling.seed
        self.step = loaded.step
        refuse_unknown_tokens(loaded, prompt.ids)
        self._limit = room_for_answer(loaded, prompt.ids, sampling.tokens)
        self._short = self._limit < sampling.tokens
        self._prompt_seen = False
        self._pieces: SimpleQueue[str | BaseException | None] = SimpleQueue()
        self._stop = Event()
        self._ends = end_tokens(loaded)
        self._decoder = PieceDecoder(loaded.tokenizer, prompt.ids[-CONTEXT:] if prompt.continues else [])
        self._thread = Thread(target=self._work, args=(loaded, prompt, sampling), daemon=True)
        self._thread.start()

    def __next__(self) -> str:
        piece = self._pieces.get()
        if isinstance(piece, BaseException):
            raise piece
        if piece is None:
            self._pieces.put(None)  # whoever asks again hears the same
            raise StopIteration
        self.text += piece
        return piece

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def cut_off(self) -> bool:
        """Whether the answer ended because the model had no positions left."""
        return self._short and len(self.ids) == self._limit

    def result(self, prompt: str) -> Generated:
        return Generated(prompt, self.text, len(self.ids), self.step, self.seed, self.cut_off)

    def close(self) -> None:
        """Stop early; returns when the model does."""
        self._stop.set()
        self._thread.join()

    def put(self, tokens: Tensor) -> None:
        """Called by transformers: first with the prompt, which is not text of ours, then with each token."""
        if self._stop.is_set():
            raise _Stopped
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in tokens.flatten().tolist():
            if token not in self._ends:
                self.ids.append(token)
                if piece := self._decoder.add(token):
                    self._pieces.put(piece)

    def end(self) -> None:
        """Called by transformers after the last token."""
        if piece := self._decoder.rest():
            self._pieces.put(piece)

    def _work(self, loaded: LoadedRun, prompt: Prompt, sampling: Sampling) -> None:
        from transformers import GenerationConfig

        ids = torch.tensor([prompt.ids], device=loaded.device)
        settings = GenerationConfig(
            max_new_tokens=self._limit,
            eos_token_id=sorted(self._ends),
            pad_token_id=loaded.tokenizer.pad,
            **sampling.for_transformers(),
        )
        try:
            # The seed is this answer's own: whoever called keeps the random numbers he had.
            forked = torch.random.fork_rng(devices=[loaded.device] if loaded.device.type == "cuda" else [])
            with forked, emulated_matmuls(emulated_dtypes(loaded.device, loaded.model.dtype)):
                torch.manual_seed(self.seed)
                loaded.model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=self
                )
            self._pieces.put(None)
        except _Stopped:
            self._pieces.put(None)
        except BaseException as error:
            self._pieces.put(error)


class _Stopped(Exception):
    """Raised in transformers' loop, which has no other way out between two tokens."""


def end_tokens(loaded: LoadedRun) -> set[int]:
    """The tokens after which the model has said what it had to say; instruct models have several."""
    named = loaded.model.config.get_text_config().eos_token_id
    several = named if isinstance(named, list | tuple) else [named]
    return {loaded.tokenizer.end, *(int(token) for token in several if token is not None)}


class PieceDecoder:
    """The text of tokens as they come, cut so that the pieces joined are the text of all tokens.

    A token may be part of a character, or have a space only after another token. So each is decoded together with the
    piece before it, and what that adds is given out once it ends in a whole character.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._begin = 0
        self._given = len(self._ids)

    def add(self, token: int) -> str:
        self._ids.append(token)
        return self._new(last=False)

    def rest(self) -> str:
        """What was held back, at the end."""
        return self._new(last=True)

    def _new(self, last: bool) -> str:
        known = self._decode(self._ids[self._begin : self._given])
        text = self._decode(self._ids[self._begin :])
        if len(text) <= len(known) or (text.endswith("\N{REPLACEMENT CHARACTER}") and not last):
            return ""
        self._begin, self._given = self._given, len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, keep_special=False)

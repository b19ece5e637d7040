"""Streams generated text from a model. Sampling is done by transformers' `generate`."""

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
from shoal.use.load import LoadedRun, able_to_write
from shoal.use.prompt import Prompt, make_prompt, room_for_answer

# Tokens of the prompt that are decoded with the first new ones, to decide whether those begin with a space.
CONTEXT = 4
# Logits divided by less may not be finite.
LOWEST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy decoding."""

    tokens: int = 100
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserMistake(f"--tokens {self.tokens} must be at least 1.")
        if not 0 <= self.temperature < float("inf"):
            raise UserMistake(f"--temperature {self.temperature:g} must be 0 (greedy decoding) or more.")
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise UserMistake(
                f"--temperature {self.temperature:g} must be 0 (greedy decoding) or at least {LOWEST_TEMPERATURE:g}."
            )
        if not 0 < self.top_p <= 1:
            raise UserMistake(f"--top-p {self.top_p:g} must be above 0 and at most 1 (1 disables it).")
        if self.top_k is not None and self.top_k < 1:
            raise UserMistake(f"--top-k {self.top_k} must be at least 1; omit it to sample from all tokens.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserMistake(f"--seed {self.seed} must be at least 0 and less than 2^63.")

    def for_transformers(self) -> dict[str, Any]:
        if self.temperature == 0:
            return {"do_sample": False}
        # If unset, transformers would use top_k=50; 0 disables it.
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
    """Generate text after `prompt`, up to the end token or `tokens` tokens. `raw`: without the instruction template."""
    with stream(loaded, prompt, Sampling(tokens, temperature, top_p, top_k, seed), raw=raw) as answer:
        return "".join(answer)


def stream(loaded: LoadedRun, prompt: str, sampling: Sampling, *, raw: bool = False) -> "Answer":
    """Like `generate`, streamed: `with stream(…) as answer: for chunk in answer: …`."""
    return Answer(loaded, make_prompt(loaded, prompt, raw=raw), sampling)


def refuse_unknown_tokens(loaded: LoadedRun, ids: list[int]) -> None:
    """Tokens may have been added to the tokenizer but not to the model."""
    known = loaded.model.config.get_text_config().vocab_size
    if max(ids, default=0) >= known:
        raise UserMistake(
            f"The prompt has token {max(ids)}, but the vocabulary of {loaded.path} ends at {known - 1}: its tokenizer "
            "belongs to another model, or has added tokens that the model does not have."
        )


@dataclass(frozen=True)
class Generated:
    """A completed answer."""

    prompt: str
    text: str
    tokens: int
    step: int | None
    seed: int  # reproduces the text
    cut_off: bool  # the model's context length was reached

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Answer(Iterator[str]):
    """An iterator over chunks of generated text. `text` and `ids` hold the answer so far.

    transformers pushes tokens to a streamer, and the reader pulls text, so the model runs in its own thread.
    """

    def __init__(self, loaded: LoadedRun, prompt: Prompt, sampling: Sampling) -> None:
        able_to_write(loaded)
        self.text = ""
        self.ids: list[int] = []  # without the end token
        self.seed = random.SystemRandom().randrange(2**32) if sampling.seed is None else sampling.seed
        self.step = loaded.step
        refuse_unknown_tokens(loaded, prompt.ids)
        self._limit = room_for_answer(loaded, prompt.ids, sampling.tokens)
        self._short = self._limit < sampling.tokens
        self._prompt_seen = False
        self._chunks: SimpleQueue[str | BaseException | None] = SimpleQueue()
        self._stop = Event()
        self._ends = end_tokens(loaded)
        self._decoder = StreamDecoder(loaded.tokenizer, prompt.ids[-CONTEXT:] if prompt.continues else [])
        self._thread = Thread(target=self._generate, args=(loaded, prompt, sampling), daemon=True)
        self._thread.start()

    def __next__(self) -> str:
        chunk = self._chunks.get()
        if isinstance(chunk, BaseException):
            raise chunk
        if chunk is None:
            self._chunks.put(None)  # further calls raise StopIteration too
            raise StopIteration
        self.text += chunk
        return chunk

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def cut_off(self) -> bool:
        """Whether the answer ended because the model's context length was reached."""
        return self._short and len(self.ids) == self._limit

    def result(self, prompt: str) -> Generated:
        return Generated(prompt, self.text, len(self.ids), self.step, self.seed, self.cut_off)

    def close(self) -> None:
        """Stop generation and wait for the thread."""
        self._stop.set()
        self._thread.join()

    def put(self, tokens: Tensor) -> None:
        """Called by transformers: first with the prompt, which is ignored, then with each new token."""
        if self._stop.is_set():
            raise _Stopped
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in tokens.flatten().tolist():
            if token not in self._ends:
                self.ids.append(token)
                if chunk := self._decoder.add(token):
                    self._chunks.put(chunk)

    def end(self) -> None:
        """Called by transformers after the last token."""
        if chunk := self._decoder.rest():
            self._chunks.put(chunk)

    def _generate(self, loaded: LoadedRun, prompt: Prompt, sampling: Sampling) -> None:
        from transformers import GenerationConfig

        ids = torch.tensor([prompt.ids], device=loaded.device)
        settings = GenerationConfig(
            max_new_tokens=self._limit,
            eos_token_id=sorted(self._ends),
            pad_token_id=loaded.tokenizer.pad,
            **sampling.for_transformers(),
        )
        try:
            # The seed applies to this answer only: the caller's RNG state is unchanged.
            forked = torch.random.fork_rng(devices=[loaded.device] if loaded.device.type == "cuda" else [])
            with forked, emulated_matmuls(emulated_dtypes(loaded.device, loaded.model.dtype)):
                torch.manual_seed(self.seed)
                loaded.model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=self
                )
            self._chunks.put(None)
        except _Stopped:
            self._chunks.put(None)
        except BaseException as error:
            self._chunks.put(error)


class _Stopped(Exception):
    """Raised from the streamer: the only way to stop transformers' loop between two tokens."""


def end_tokens(loaded: LoadedRun) -> set[int]:
    """Return the tokens that end an answer; instruct models have several."""
    configured = loaded.model.config.get_text_config().eos_token_id
    tokens = configured if isinstance(configured, list | tuple) else [configured]
    return {loaded.tokenizer.end, *(int(token) for token in tokens if token is not None)}


class StreamDecoder:
    """Decodes a stream of tokens into chunks whose concatenation is the text of all tokens.

    A token may be a part of a character, or begin with a space only after another token. So each token is decoded
    together with the previous chunk, and the new text is returned once it ends in a complete character.
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
        """Return the text held back, at the end."""
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

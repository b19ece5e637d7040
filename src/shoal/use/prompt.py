"""Builds the prompt tokens in the format the run was trained on."""

import json
from dataclasses import dataclass

from shoal.config.run import RunDirectory
from shoal.data.formats.chat_template import TemplateFailed, no_template, tokenizer_template
from shoal.data.formats.choose import choose_format, prompt_of
from shoal.data.sources import find_reading, read_records
from shoal.mistakes import UserMistake
from shoal.use.load import LoadedRun


@dataclass(frozen=True)
class Prompt:
    """Prompt tokens. `continues`: the output continues the prompt's text, rather than starting a new answer."""

    ids: list[int]
    continues: bool


def make_prompt(loaded: LoadedRun, text: str, *, raw: bool = False) -> Prompt:
    """Tokenize `text` as in training: as an instruction or a user's turn if the run was trained so, unless `raw`."""
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes on the command line that are not UTF-8
        raise UserMistake("The prompt is not text in UTF-8.") from None
    if not raw and trained_on_chats(loaded):
        return chat_prompt(loaded, [{"role": "user", "content": text}])
    written = None if raw else prompt_of(_trained_format(loaded))
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode(text if written is None else written(text)).tolist()
    if tokenizer.prepends_begin and tokenizer.begin is not None:
        ids.insert(0, tokenizer.begin)
    # An empty prompt is not possible. In training, a document follows the end token of the previous one.
    return Prompt(ids or [tokenizer.end], continues=written is None)


def chat_prompt(loaded: LoadedRun, messages: list[dict[str, str]]) -> Prompt:
    """The conversation so far and the beginning of the answer, by the chat template of the tokenizer."""
    template = tokenizer_template(loaded.tokenizer)
    if template is None:
        raise no_template(f"of {loaded.path}")
    try:
        text = template.render(messages, prompt=True)[0]
    except TemplateFailed as error:
        raise UserMistake(f"The chat template of {loaded.path} failed: {error}") from None
    return Prompt(loaded.tokenizer.encode(text).tolist(), continues=False)


def trained_on_instructions(loaded: LoadedRun) -> bool:
    return prompt_of(_trained_format(loaded)) is not None


def trained_on_chats(loaded: LoadedRun) -> bool:
    return _trained_format(loaded) == "chat"


def room_for_answer(loaded: LoadedRun, ids: list[int], tokens: int) -> int:
    """Return how many of `tokens` new tokens fit in the model's context length."""
    if loaded.positions is None:
        return tokens
    room = loaded.positions - len(ids)
    if room < 1:
        raise UserMistake(
            f"The prompt has {len(ids):,} tokens, but the model has only {loaded.positions:,} positions for prompt and "
            "answer; shorten the prompt."
        )
    return min(tokens, room)


def _trained_format(loaded: LoadedRun) -> str | None:
    """Return the format of the run's training data, or None if it cannot be determined."""
    if loaded.config is None:
        return None
    data = loaded.config.data
    if data.format != "auto":
        return data.format
    try:
        found = json.loads(RunDirectory(loaded.path).plan.read_text())["data"]["format"]
        return str(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # an older run, which did not record it: inspect the data, if it still exists
    if not isinstance(data.source, str):
        return None
    try:
        first = next(read_records(find_reading(data)), None)
        return None if first is None else choose_format("auto", first).name
    except UserMistake:
        return None

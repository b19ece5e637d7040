"""What a person typed, as the tokens that the run was trained to answer to."""

import json
from dataclasses import dataclass

from shoal.config.run import RunDirectory
from shoal.data.formats import alpaca_prompt, choose_format
from shoal.data.sources import find_files, read_rows
from shoal.mistakes import UserMistake
from shoal.use.load import LoadedRun


@dataclass(frozen=True)
class Prompt:
    """`continues`: what follows goes on with the same text, and is not an answer that begins anew."""

    ids: list[int]
    continues: bool


def make_prompt(loaded: LoadedRun, text: str, *, raw: bool = False) -> Prompt:
    """`text` as documents of the run's training data begin: wrapped as an instruction if they were, unless `raw`."""
    wrapped = not raw and trained_on_instructions(loaded)
    tokenizer = loaded.tokenizer
    ids = tokenizer.encode(alpaca_prompt(text) if wrapped else text).tolist()
    if tokenizer.prepends_begin and tokenizer.begin is not None:
        ids.insert(0, tokenizer.begin)
    # A model continues something. In training a document stands after the end of the one before.
    return Prompt(ids or [tokenizer.end], continues=not wrapped)


def trained_on_instructions(loaded: LoadedRun) -> bool:
    return _trained_format(loaded) == "alpaca"


def room_for_answer(loaded: LoadedRun, ids: list[int], tokens: int) -> int:
    """How many of `tokens` more tokens the model has positions for."""
    if loaded.positions is None:
        return tokens
    room = loaded.positions - len(ids)
    if room < 1:
        raise UserMistake(
            f"The prompt has {len(ids):,} tokens, but the model was made for {loaded.positions:,} positions, the "
            "answer's among them; shorten the prompt."
        )
    return min(tokens, room)


def _trained_format(loaded: LoadedRun) -> str | None:
    """The format of the run's data; None where nobody can tell any more."""
    if loaded.config is None:
        return None
    data = loaded.config.data
    if data.format != "auto":
        return data.format
    try:
        found = json.loads(RunDirectory(loaded.path).plan.read_text())["data"]["format"]
        return str(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # an older run, which did not write it down: look at the data, if it is still there
    if not isinstance(data.source, str):
        return None
    try:
        first = next(read_rows(data.source, find_files(data.source, data.path)), None)
        return None if first is None else choose_format("auto", first).name
    except UserMistake:
        return None

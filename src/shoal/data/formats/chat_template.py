"""Chat templates: the tokenizer's own, one of ours by name, or a Jinja file; rendered in transformers' sandbox."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake, shortened, suggestion
from shoal.paths import user_path

Span = tuple[int, int]  # of characters
Messages = Sequence[dict[str, Any]]

# Our templates, each with the markers that should be tokens of the vocabulary.
NAMED = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "zephyr": ("<|system|>", "<|user|>", "<|assistant|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
}
_FOLDER = Path(__file__).parent / "chat_templates"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # as transformers looks for it
PLACEHOLDER = "\ue000answer\ue001"  # private-use characters: no text has them


class TemplateFailed(Exception):
    """The template raised. The message is its own."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with what it needs of the tokenizer. `texts`: by name, where a tokenizer has several."""

    texts: tuple[tuple[str, str], ...]
    special: tuple[tuple[str, str], ...]  # bos_token, eos_token …: variables of the template
    added: tuple[str, ...]  # texts that are always one token
    end: str  # the end token

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([self.texts, self.special]).encode()).hexdigest()

    def text(self, tools: Any) -> str:
        """The template for conversations with or without tools."""
        named = dict(self.texts)
        chosen = named.get("tool_use") if tools else None
        return chosen or named.get("default") or self.texts[0][1]

    def marks_answers(self, tools: Any) -> bool:
        """Whether the template has generation blocks."""
        return _GENERATION.search(self.text(tools)) is not None

    def render(self, messages: Messages, tools: Any = None, *, prompt: bool = False) -> tuple[str, list[Span]]:
        """The text, and its spans in generation blocks. `prompt`: with the beginning of an answer."""
        return self._render(list(map(_with_parts, messages)) if self.takes_parts else messages, tools, prompt=prompt)

    def _render(self, messages: Messages, tools: Any = None, *, prompt: bool = False) -> tuple[str, list[Span]]:
        # Imported here: seconds, and most runs have no conversations.
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self.text(tools)
        marked = self.marks_answers(tools)
        try:
            rendered, spans = render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=text,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **dict(self.special),
            )
        except Exception as error:  # a template is a program and can raise anything
            reason = shortened(" ".join(str(error).split())) or type(error).__name__
            raise TemplateFailed(reason if reason[-1] in ".!?…" else f"{reason}.") from error
        return str(rendered[0]), [(start, end) for start, end in spans[0] if end > start] if marked else []

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the content of a message must be a list of parts, as in templates for images and text."""
        opening, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": PLACEHOLDER}
        for parts in (False, True):
            messages = [_with_parts(one) if parts else one for one in (opening, answer)]
            try:
                if PLACEHOLDER in self._render(messages)[0]:
                    return parts
            except TemplateFailed:
                continue
        return False

    @cached_property
    def ends_of_turn(self) -> tuple[str, ...]:
        """The tokens that end an answer: the end token, and what follows an answer as the last and as another turn."""
        found = {self.end}
        opening, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": PLACEHOLDER}
        for messages in ([opening, answer], [opening, answer, opening, {"role": "assistant", "content": "b"}]):
            try:
                after = self.render(messages)[0].partition(PLACEHOLDER)[2]
            except TemplateFailed:
                continue
            found.add(self.token_at(after.lstrip()))
        return tuple(found & {*self.added})

    def token_at(self, text: str) -> str:
        """The added token that `text` starts with, or an empty string."""
        if not text.startswith(self.added):  # quick, where a vocabulary has thousands of added tokens
            return ""
        return next(token for token in self.added if text.startswith(token))


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def tokenizer_template(tokenizer: Tokenizer, chosen: str | None = None) -> ChatTemplate | None:
    """The template `chosen` (`data.chat_template`) for this tokenizer, or else the tokenizer's own, if it has one."""
    texts = read_template(chosen) if chosen is not None else tokenizer.chat_template
    if not texts:
        return None
    named = {"default": texts} if isinstance(texts, str) else texts
    special, added = tokenizer.template_tokens()
    return ChatTemplate(
        tuple(sorted(named.items())),
        tuple(sorted(special.items())),
        # The longest first, so that a token is not taken for another that it begins with.
        tuple(sorted((token for token in added if not token.isspace()), key=len, reverse=True)),
        tokenizer.decode([tokenizer.end]),
    )


def end_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end an answer in the tokenizer's chat template, its end token first."""
    template = tokenizer_template(tokenizer)
    ends = [] if template is None else [int(tokenizer.encode(text)[0]) for text in template.ends_of_turn]
    return [tokenizer.end, *sorted({*ends} - {tokenizer.end})]


def read_template(chosen: str) -> str:
    """The text of the template called `chosen`, or in the file of that name."""
    if chosen in NAMED:
        return (_FOLDER / f"{chosen}.jinja").read_text()
    file = user_path(chosen, "data.chat_template")
    if not file.is_file():
        raise UserMistake(
            f"data.chat_template {chosen} is neither a template ({', '.join(NAMED)}) nor a file."
            + suggestion(chosen, NAMED)
        )
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserMistake(f"data.chat_template {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserMistake(f"data.chat_template {file} is not text in UTF-8.") from None
    if not text.strip():
        raise UserMistake(f"data.chat_template {file} is empty.")
    _compile(text, file)
    return text


def _compile(text: str, file: Path) -> None:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise UserMistake(f"{file}:{error.lineno} is not a Jinja template: {str(error.message).rstrip('.')}.") from None
    except Exception:  # it compiles, and may not like this conversation
        return


def no_template(name: str) -> UserMistake:
    """The mistake of a tokenizer without a template."""
    return UserMistake(
        f"The tokenizer {name} has no chat template; set data.chat_template to {', '.join(NAMED)}, or to a Jinja file."
    )


def split_markers(tokenizer: Tokenizer, chosen: str | None) -> str | None:
    """A sentence if the markers of the named template `chosen` are not tokens of the vocabulary."""
    split = [marker for marker in NAMED.get(chosen or "", ()) if len(tokenizer.encode(marker)) != 1]
    if not split:
        return None
    return (
        f"The markers of data.chat_template {chosen} are several tokens each; to make them one token each, set "
        f"model.add_tokens: {json.dumps(split)}."
    )

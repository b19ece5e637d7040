"""Where answers are in a rendered conversation: by the template's generation blocks, or by comparing renderings."""

from shoal.data.chat_template import PLACEHOLDER, ChatTemplate, Messages, Span, TemplateFailed
from shoal.data.conversation import Conversation


class Ambiguous(Exception):
    """An answer cannot be told from the rest of the text."""


def find_answers(template: ChatTemplate, conversation: Conversation, text: str, blocks: list[Span]) -> list[Span]:
    """The spans of the conversation's answers in `text`, its rendering, each with the token that ends the turn.

    `blocks` are the generation blocks of the rendering.
    """
    if template.marks_answers(conversation.tools):
        spans = _chosen_blocks(template, conversation, blocks)
    else:
        finder = _Finder(template, conversation, text)
        spans = [finder.find(index) for index in conversation.answers]
    return [_with_end(template, text, span) for span in spans]


def is_closed(template: ChatTemplate, text: str) -> bool:
    """Whether a token that ends a turn is the last one."""
    return text.rstrip().endswith(template.ends_of_turn)


def _with_end(template: ChatTemplate, text: str, span: Span) -> Span:
    """The span with the token that ends the turn, where it follows directly: without it the model would not stop."""
    start, end = span
    if not text[start:end].rstrip().endswith(template.ends_of_turn):
        token = template.token_at(text[end:])
        return start, end + (len(token) if token in template.ends_of_turn else 0)
    return span


def _chosen_blocks(template: ChatTemplate, conversation: Conversation, blocks: list[Span]) -> list[Span]:
    """The blocks of the wanted answers. A turn may have any number of blocks."""
    every = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if conversation.answers == every:
        return blocks
    found: list[Span] = []
    for index in conversation.answers:
        before, until = (_count_blocks(template, conversation, stop) for stop in (index, index + 1))
        found += blocks[before:until]
    return found


def _count_blocks(template: ChatTemplate, conversation: Conversation, stop: int) -> int | None:
    """How many blocks the first `stop` messages have; None: all."""
    messages = conversation.messages
    if not any(message["role"] == "assistant" for message in messages[stop:]):
        return None
    if not any(message["role"] == "assistant" for message in messages[:stop]):
        return 0
    return len(template.render(messages[:stop], conversation.tools)[1])


class _Finder:
    """Finds answers in a rendering by comparing it with those of the first messages."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, text: str) -> None:
        self._template = template
        self._messages = conversation.messages
        self._tools = conversation.tools
        self._text = text

    def find(self, index: int) -> Span:
        """The answer at `index` starts where the prompt before it ends, and ends where a rendering up to it ends."""
        prompt = self._try(self._messages[:index], prompt=True) if index else None
        start = len(prompt) if prompt is not None and self._text.startswith(prompt) else None
        last = index == len(self._messages) - 1
        until = self._text if last else self._try(self._messages[: index + 1])
        end = len(until) if until is not None and self._text.startswith(until) else None
        if start is None or end is None or end <= start:
            # The template renders a prompt, or a last turn, differently (Qwen 3 keeps its thinking, for example).
            content, ending = self._content(index)
            start = content[0] if start is None else start
            end = content[1] + len(ending) if end is None or end <= start else end
        if end <= start:
            raise Ambiguous
        return start, self._trimmed(start, end)

    def _trimmed(self, start: int, end: int) -> int:
        """Without the white space after the token that ends the turn: the model stops before it."""
        stripped = self._text[start:end].rstrip()
        return start + len(stripped) if stripped.endswith(self._template.added) else end

    def _content(self, index: int) -> tuple[Span, str]:
        """Where the content of a message is, and how its turn ends, by rendering a placeholder in its place."""
        message = self._messages[index]
        if not message["content"] or "tool_calls" in message:
            raise Ambiguous
        replaced = {**message, "content": PLACEHOLDER}
        before, after = self._around([*self._messages[:index], replaced, *self._messages[index + 1 :]])
        start, end = len(before), len(self._text) - len(after)
        if end < start or not self._text.startswith(before) or not self._text.endswith(after):
            raise Ambiguous
        if self._text[start:end].strip() not in message["content"]:
            raise Ambiguous
        return (start, end), self._ending(index, after, replaced)

    def _ending(self, index: int, after: str, replaced: dict[str, object]) -> str:
        """What ends the turn: the token after the content, or without one the text that also ends a last turn."""
        blank = len(after) - len(after.lstrip())
        token = self._template.token_at(after[blank:])
        if token in self._template.ends_of_turn:
            return after[: blank + len(token)]
        closing = self._around([*self._messages[:index], replaced])[1].rstrip()
        if token or not after.startswith(closing):
            raise Ambiguous
        return closing

    def _around(self, messages: Messages) -> tuple[str, str]:
        rendered = self._try(messages)
        if rendered is None or rendered.count(PLACEHOLDER) != 1:
            raise Ambiguous
        before, _, after = rendered.partition(PLACEHOLDER)
        return before, after

    def _try(self, messages: Messages, *, prompt: bool = False) -> str | None:
        try:
            return self._template.render(messages, self._tools, prompt=prompt)[0]
        except TemplateFailed:
            return None

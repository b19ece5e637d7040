"""Where answers are in a rendered conversation: by the template's generation blocks, or by comparing renderings."""

from shoal.data.formats.chat_template import PLACEHOLDER, ChatTemplate, Messages, Span, TemplateFailed
from shoal.data.formats.conversation import Conversation


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
        """The answer at `index` starts where the prompt before it ends, and ends where a rendering up to it ends.

        Templates render some turns differently when they are the last (Qwen 3 keeps the thinking of the last one only,
        Phi 3 writes an end token after it), so either place may have to be found in another way.
        """
        start = self._start(index)
        last = index == len(self._messages) - 1
        until = self._text if last else self._try(self._messages[: index + 1])
        if until is not None and self._text.startswith(until):
            end = len(until)
        else:
            end = self._same_ending(start, until) or self._end_of_content(index)
        if end <= start:
            raise Ambiguous
        # Without the white space after the token that ends the turn: the model stops before it.
        stripped = self._text[start:end].rstrip()
        return start, start + len(stripped) if stripped.endswith(self._template.added) else end

    def _start(self, index: int) -> int:
        prompt = self._try(self._messages[:index], prompt=True) if index else None
        if prompt is not None and self._text.startswith(prompt):
            return len(prompt)
        if "tool_calls" not in self._messages[index]:
            return self._content(index)[0]
        before = self._try(self._messages[:index])
        if prompt is None or before is None or not self._text.startswith(before) or not prompt.startswith(before):
            raise Ambiguous
        # The prompt begins an answer in words (such as <think>) where this turn calls a tool: the header is what both
        # have in common, up to a token or a line.
        shared = len(before)
        while shared < len(prompt) and self._text.startswith(prompt[: shared + 1]):
            shared += 1
        header = prompt[len(before) : shared]
        ends = [header.rfind(token) + len(token) for token in {"\n", *self._template.added} if token in header]
        if not ends:
            raise Ambiguous
        return len(before) + max(ends)

    def _same_ending(self, start: int, until: str | None) -> int | None:
        """The end of a turn that is, from `start` to its closing token, also the end of the rendering up to it."""
        stripped = "" if until is None else until.rstrip()
        token = next((token for token in self._template.added if stripped.endswith(token)), None)
        at = -1 if token is None else self._text.find(token, start)
        if token is None or at < 0 or not stripped.endswith(self._text[start : at + len(token)]):
            return None
        return at + len(token)

    def _end_of_content(self, index: int) -> int:
        after = self._text[self._content(index)[1] :]
        blank = len(after) - len(after.lstrip())
        token = self._template.token_at(after[blank:])
        if token in self._template.ends_of_turn:
            return len(self._text) - len(after) + blank + len(token)
        # No token ends the turn: the text that also ends a last turn does.
        closing = self._around([*self._messages[:index], self._replaced(index)])[1].rstrip()
        if token or not after.startswith(closing):
            raise Ambiguous
        return len(self._text) - len(after) + len(closing)

    def _content(self, index: int) -> Span:
        """Where the content of a message is, by rendering a placeholder in its place."""
        message = self._messages[index]
        if not message["content"] or "tool_calls" in message:
            raise Ambiguous
        before, after = self._around([*self._messages[:index], self._replaced(index), *self._messages[index + 1 :]])
        start, end = len(before), len(self._text) - len(after)
        if end < start or not self._text.startswith(before) or not self._text.endswith(after):
            raise Ambiguous
        if self._text[start:end].strip() not in message["content"]:
            raise Ambiguous
        return start, end

    def _replaced(self, index: int) -> dict[str, object]:
        return {**self._messages[index], "content": PLACEHOLDER}

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

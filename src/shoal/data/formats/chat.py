"""The format `chat`: a conversation becomes one text by the chat template, and the loss counts the answers in it."""

from dataclasses import replace

from shoal.data.formats.answers import Ambiguous, find_answers, is_closed
from shoal.data.formats.chat_template import PLACEHOLDER, ChatTemplate, Span, TemplateFailed, no_template
from shoal.data.formats.conversation import Conversation, Message, read_conversation
from shoal.data.formats.document import REMEDY, Document, Options, Segment, check_unicode
from shoal.data.sources import Record
from shoal.mistakes import UserMistake


def read_chat(record: Record, options: Options) -> Document:
    """The document of a record that holds a conversation."""
    return render_conversation(record, read_conversation(record), options)


def render_conversation(record: Record, conversation: Conversation, options: Options) -> Document:
    """The text of a conversation and which of it is trained, without any token that the template does not write.

    Only an end token is appended, where the template does not close the last answer.
    """
    template = options.template
    if template is None:
        raise no_template("of this run")
    if options.train_on != "all" and not conversation.answers:
        raise UserMistake(
            f"{record.where} has no message of the assistant to learn. Fix the record, set "
            "data.train_on: all, or set data.on_error: skip."
        )
    try:
        conversation, text, blocks = _render(record, template, conversation)
    except TemplateFailed as error:
        raise UserMistake(f"{record.where}: the chat template refuses the conversation: {error} {REMEDY}") from None
    check_unicode(record, "the conversation", text)
    end = conversation.messages[-1]["role"] == "assistant" and not is_closed(template, text)
    if options.train_on == "all":
        return Document([(text, True)], whole=True, begin=False, end=end)
    if options.train_on == "last":
        conversation = replace(conversation, answers=conversation.answers[-1:])
    try:
        spans = find_answers(template, conversation, text, blocks)
    except (Ambiguous, TemplateFailed):
        raise UserMistake(
            f"{record.where}: the chat template does not tell where the answers are. Set data.chat_template to a "
            "template with {% generation %} blocks, set data.train_on: all, or set data.on_error: skip."
        ) from None
    if end and spans and not text[spans[-1][1] :].strip():
        spans[-1] = (spans[-1][0], len(text))  # the model has to write all that precedes the end token
    return Document(_segments(text, spans), whole=True, begin=False, end=end)


def _render(record: Record, template: ChatTemplate, conversation: Conversation) -> tuple[Conversation, str, list[Span]]:
    """The conversation in the variant that the template takes, and its text with the generation blocks in it."""
    failures: list[TemplateFailed | None] = []
    for messages in conversation.variants():
        try:
            text, blocks = template.render(messages, conversation.tools)
        except TemplateFailed as error:
            failures.append(error)
            continue
        if _has_calls(template, conversation, messages):
            return replace(conversation, messages=messages), text, blocks
        failures.append(None)
    if (refused := failures[0]) is not None and None not in failures:
        raise refused
    raise UserMistake(f"{record.where} has tool calls, which the chat template leaves out. {REMEDY}")


def _has_calls(template: ChatTemplate, conversation: Conversation, messages: list[Message]) -> bool:
    """Whether the text has every tool call: some templates leave them out, or do so if there is a content."""
    calls = sum(len(message.get("tool_calls", ())) for message in messages)
    if not calls:
        return True
    renamed = [
        {**message, "tool_calls": [{**call, "function": {**call["function"], "name": PLACEHOLDER}} for call in found]}
        if (found := message.get("tool_calls"))
        else message
        for message in messages
    ]
    return template.render(renamed, conversation.tools)[0].count(PLACEHOLDER) >= calls


def _segments(text: str, spans: list[Span]) -> list[Segment]:
    segments: list[Segment] = []
    done = 0
    for start, end in spans:
        segments += [(text[done:start], False), (text[start:end], True)]
        done = end
    return [segment for segment in [*segments, (text[done:], False)] if segment[0]]

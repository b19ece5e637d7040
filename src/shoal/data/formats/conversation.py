"""Conversations: the messages of a record in the form that chat templates take, whatever form the record has."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shoal.data.formats.document import REMEDY
from shoal.data.sources import Record
from shoal.mistakes import UserMistake, shortened, suggestion

Message = dict[str, Any]

# OpenAI's roles, and those of ShareGPT and its relatives.
ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response"), "tool"),
}


@dataclass(frozen=True)
class Conversation:
    """Messages with `role`, `content` and whatever else they have. `given`: how many of the first messages are a
    prompt, whose answers are not learned."""

    messages: list[Message]
    tools: list[Any] | None = None
    given: int = 0
    answers: list[int] = field(default_factory=list)  # indices of the assistant's messages that are learned

    def variants(self) -> Iterator[list[Message]]:
        """The messages as different templates want them: beside tool calls, no content is "" or None, and arguments
        are a dictionary or JSON."""
        yield self.messages
        if any("tool_calls" in message for message in self.messages):
            for content, as_json in ((None, False), ("", True), (None, True)):
                yield [_variant(message, content, as_json) for message in self.messages]


def read_conversation(record: Record) -> Conversation:
    """The conversation under `messages` or `conversations`, or in a `prompt` and a `completion` of messages."""
    fields = record.fields
    key = next((key for key in ("messages", "conversations") if fields.get(key) is not None), None)
    if key is not None:
        return conversation(record, read_messages(record, key))
    if fields.get("completion") is None:
        present = next((key for key in ("messages", "conversations") if key in fields), "completion")
        raise UserMistake(f"{record.where}: {present} is null. {REMEDY}")
    prompt = read_messages(record, "prompt", "user")
    return conversation(record, prompt + read_messages(record, "completion", "assistant"), given=len(prompt))


def conversation(record: Record, messages: list[Message], given: int = 0) -> Conversation:
    """A conversation of `messages` with the system message and the tools of the record."""
    system = record.fields.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages, given = [{"role": "system", "content": system}, *messages], given + (given > 0)
    answers = [
        index
        for index, one in enumerate(messages)
        # A weight of 0 is OpenAI's mark of an answer that is not learned.
        if one["role"] == "assistant" and index >= given and one.get("weight") != 0
    ]
    return Conversation(messages, _tools(record), given, answers)


def read_messages(record: Record, key: str, role: str | None = None) -> list[Message]:
    """The messages under `key`. `role`: text is one message of this role."""
    value = record.fields[key]
    if role is not None and isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list):
        found = "null" if value is None else type(value).__name__
        raise UserMistake(f"{record.where}: {key} must be a list of messages, found {found}. {REMEDY}")
    if not value:
        raise UserMistake(f"{record.where}: {key} is empty. {REMEDY}")
    return [_message(record, f"{key}[{index}]", one) for index, one in enumerate(value)]


def _message(record: Record, where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise UserMistake(
            f"{record.where}: {where} must be an object with role and content, found {type(value).__name__}. {REMEDY}"
        )
    role_key, content_key = ("from", "value") if "from" in value and "role" not in value else ("role", "content")
    named = value.get(role_key)
    if not isinstance(named, str) or named not in ROLES:
        shown = shortened(str(named)) if named is not None else "missing"
        raise UserMistake(
            f"{record.where}: the role of {where} is {shown}; it must be one of {', '.join(ROLES)}."
            + (suggestion(shown, ROLES) if named is not None else "")
            + f" {REMEDY}"
        )
    role = ROLES[named]
    # A missing key is null in columnar files, and templates ask whether a key is there.
    kept = {key: one for key, one in value.items() if key not in (role_key, content_key) and one is not None}
    calls = kept.pop("tool_calls", None)
    content = _content(record, where, value.get(content_key))
    if named == "function_call":
        calls, content = _called(record, where, content), None
    if role == "assistant" and calls:
        return {"role": role, "content": content or "", **kept, "tool_calls": _tool_calls(record, where, calls)}
    if content is None:
        raise UserMistake(f"{record.where}: the {content_key} of {where} is null. {REMEDY}")
    if role == "assistant" and not content.strip():
        raise UserMistake(f"{record.where}: the answer in {where} is empty. {REMEDY}")
    return {"role": role, "content": content, **kept}


def _content(record: Record, where: str, value: Any) -> str | None:
    """The text of a message, which may be a list of parts."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        other = next((part for part in value if not isinstance(part.get("text"), str)), None)
        if other is None:
            return "".join(part["text"] for part in value)
        raise UserMistake(
            f"{record.where}: {where} has a part of type {shortened(str(other.get('type')))}; only text can be "
            f"trained on. {REMEDY}"
        )
    raise UserMistake(
        f"{record.where}: the content of {where} must be a string or a list of text parts, found "
        f"{type(value).__name__}. {REMEDY}"
    )


def _tool_calls(record: Record, where: str, calls: Any) -> list[Message]:
    if not isinstance(calls, list):
        calls = [calls]
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserMistake(f"{record.where}: a tool call of {where} has no function with a name. {REMEDY}")
        around = {key: one for key, one in call.items() if key != "function" and one is not None}
        around = around if "function" in call else {}
        # OpenAI writes arguments as JSON; templates write the JSON themselves.
        arguments = _parsed(function.get("arguments", {}))
        found.append({"type": "function", **around, "function": {"name": function["name"], "arguments": arguments}})
    return found


def _called(record: Record, where: str, content: str | None) -> Any:
    """ShareGPT's function_call: the call as JSON in place of the content."""
    call = _parsed(content)
    if not isinstance(call, dict | list):
        raise UserMistake(f"{record.where}: {where} is a function_call, but its value is not JSON. {REMEDY}")
    return call


def _tools(record: Record) -> list[Any] | None:
    value = record.fields.get("tools")
    tools = _parsed(value)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserMistake(
            f"{record.where}: tools must be a list of JSON schemas, found {shortened(str(value))}. {REMEDY}"
        )
    return tools


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _variant(message: Message, content: str | None, as_json: bool) -> Message:
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if as_json:
        calls = [{**call, "function": {**call["function"], "arguments": _json(call)}} for call in calls]
    return {**message, "content": message["content"] or content, "tool_calls": calls}


def _json(call: Message) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

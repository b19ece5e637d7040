import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.data import load_tokenizer, prepare
from shoal.data.encode import encode
from shoal.data.formats.chat_template import read_template, tokenizer_template
from shoal.data.formats.choose import FORMATS, Document, Options, choose_format, read_document
from shoal.data.formats.conversation import read_conversation
from shoal.data.formats.preference import read_pair
from shoal.data.sequences import LOSS_TOKEN
from shoal.data.sources import Record
from shoal.mistakes import UserMistake

BYTES = load_tokenizer("bytes")
Write = Callable[[str, Any], Path]
Message = dict[str, Any]


def record(**fields: Any) -> Record:
    return Record(fields, Path("data.jsonl"), 7)


def options(train_on: str = "answers", template: str = "chatml") -> Options:
    return Options(train_on, tokenizer_template(BYTES, template))


def trained(document: Document) -> list[str]:
    return [text for text, loss in document.segments if loss]


def text_of(document: Document) -> str:
    return "".join(text for text, _ in document.segments)


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


CHAT = [user("One?"), assistant("Two.")]


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"messages": CHAT}, CHAT),
        (
            {"messages": [user([{"type": "text", "text": "On"}, {"type": "text", "text": "e?"}]), assistant("Two.")]},
            CHAT,
        ),
        ({"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}]}, CHAT),
        ({"prompt": [user("One?")], "completion": [assistant("Two.")]}, CHAT),
        ({"prompt": "One?", "completion": [assistant("Two.")]}, CHAT),
        ({"messages": CHAT, "system": "Be brief."}, [{"role": "system", "content": "Be brief."}, *CHAT]),
        # A column that some messages do not have is null in them.
        ({"messages": [user("One?") | {"tool_calls": None}, assistant("Two.", tool_calls=None, name=None)]}, CHAT),
    ],
)
def test_conversations_are_read_from_the_forms_people_have(fields: dict[str, Any], messages: list[Message]) -> None:
    assert choose_format("auto", record(**fields)).name == "chat"
    assert read_conversation(record(**fields)).messages == messages


def test_tool_calls_have_the_same_form_whatever_the_record_has() -> None:
    function = {"name": "look", "arguments": {"place": "mat"}}
    openai = [
        user("Where?"),
        assistant(
            None,
            tool_calls=[{"id": "a", "type": "function", "function": {**function, "arguments": '{"place": "mat"}'}}],
        ),
        {"role": "tool", "tool_call_id": "a", "content": "there"},
        assistant("There."),
    ]
    sharegpt = [
        {"from": "human", "value": "Where?"},
        {"from": "function_call", "value": json.dumps(function)},
        {"from": "observation", "value": "there"},
        {"from": "gpt", "value": "There."},
    ]
    schema = {"type": "function", "function": {"name": "look"}}
    first = read_conversation(record(messages=openai, tools=[schema]))
    second = read_conversation(record(conversations=sharegpt, tools=json.dumps([schema])))
    assert first.tools == second.tools == [schema]
    assert [one["role"] for one in first.messages] == [one["role"] for one in second.messages]
    assert first.messages[1]["tool_calls"] == [{"id": "a", "type": "function", "function": function}]
    assert second.messages[1]["tool_calls"] == [{"type": "function", "function": function}]
    document = read_document(FORMATS["chat"], record(messages=openai, tools=[schema]), options())
    assert trained(document) == [
        '<tool_call>{"name": "look", "arguments": {"place": "mat"}}</tool_call><|im_end|>',
        "There.<|im_end|>\n",
    ]


def test_of_a_prompt_and_a_completion_only_the_completion_is_learned() -> None:
    one = record(prompt="1 + 1 = ", completion="2")
    completion = choose_format("auto", one)
    assert completion.name == "completion"
    assert read_document(completion, one, Options("answers")).segments == [("1 + 1 = ", False), ("2", True)]
    assert read_document(completion, one, Options("all")).segments == [("1 + 1 = 2", True)]
    messages = record(prompt=[user("One?"), assistant("Two."), user("Three?")], completion=[assistant("Four.")])
    assert trained(read_document(choose_format("auto", messages), messages, options())) == ["Four.<|im_end|>\n"]


@pytest.mark.parametrize("template", ["chatml", "unmarked"])
def test_an_answer_of_weight_0_is_not_learned(write: Write, template: str) -> None:
    if template == "unmarked":
        bare = re.sub(r"\{%- (end)?generation %\}", "", read_template("chatml"))
        template = str(write("unmarked.jinja", bare))
    one = record(messages=[user("One?"), assistant("Two.", weight=0), user("Three?"), assistant("Four.", weight=1)])
    assert trained(read_document(FORMATS["chat"], one, options(template=template))) == ["Four.<|im_end|>\n"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": None}, "messages is null"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "messages must be a list of messages, found str"),
        ({"messages": ["hello"]}, r"messages\[0\] must be an object with role and content, found str"),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            r"the role of messages\[0\] is asistant.*Did you mean assis",
        ),
        ({"messages": [{"content": "x"}]}, r"the role of messages\[0\] is missing"),
        ({"messages": [user(None), assistant("x")]}, r"the content of messages\[0\] is null"),
        ({"messages": [user("x"), assistant(" \n")]}, r"the answer in messages\[1\] is empty"),
        ({"messages": [user(3), assistant("x")]}, r"content of messages\[0\] must be a string .* found int"),
        ({"messages": [user([{"type": "image_url", "image_url": "x"}]), assistant("x")]}, "part of type image_url"),
        ({"messages": [user("x")]}, "no message of the assistant.*train_on: all"),
        ({"messages": CHAT, "tools": {"a": 1}}, "tools must be a list of JSON schemas"),
        ({"messages": [user("x"), assistant(None, tool_calls=[{"id": 3}])]}, "has no function with a name"),
        ({"messages": [user("a\ud83d"), assistant("x")]}, "lone surrogate"),
        ({"conversations": [{"from": "function_call", "value": "look"}]}, "its value is not JSON"),
        ({"text": "x"}, "lacks messages or conversations or prompt and completion.*its keys are text"),
    ],
)
def test_a_bad_conversation_is_one_sentence_with_file_and_line(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserMistake, match=rf"^data\.jsonl:7.*{sentence}") as raised:
        read_document(FORMATS["chat"], record(**fields), options())
    assert "data.on_error: skip" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_the_template_refuses_is_its_own_sentence() -> None:
    twice = record(messages=[user("One?"), user("Two?"), assistant("Three.")])
    with pytest.raises(UserMistake, match=r"data\.jsonl:7: the chat template refuses.* must alternate.*on_error: skip"):
        read_document(FORMATS["chat"], twice, options(template="mistral"))
    calls = record(messages=[user("Where?"), assistant(None, tool_calls=[{"function": {"name": "look"}}]), *CHAT])
    with pytest.raises(UserMistake, match=r"data\.jsonl:7 has tool calls, which the chat template leaves out"):
        read_document(FORMATS["chat"], calls, options(template="zephyr"))


def test_answers_that_cannot_be_told_apart_are_refused(write: Write) -> None:
    numbered = "{% for message in messages %}{{ messages | length }}{{ message.content | upper }}{% endfor %}"
    template = str(write("numbered.jinja", numbered))
    one = record(messages=[*CHAT, user("Three?"), assistant("Four.")])
    with pytest.raises(UserMistake, match=r"does not tell where the answers are.*generation.*train_on: all"):
        read_document(FORMATS["chat"], one, options(template=template))
    assert trained(read_document(FORMATS["chat"], one, options("all", template))) == ["4ONE?4TWO.4THREE?4FOUR."]


def test_templates_that_cannot_be_used_are_named(write: Write) -> None:
    with pytest.raises(UserMistake, match=r"data\.chat_template chatmll is neither a template \(chatml, .*mean chatml"):
        read_template("chatmll")
    broken = write("broken.jinja", "{{ bos_token }}\n{% for message in messages %}\n{{ message.content }")
    with pytest.raises(UserMistake, match=r"broken\.jinja:3 is not a Jinja template"):
        read_template(str(broken))
    with pytest.raises(UserMistake, match=r"latin\.jinja is not text in UTF-8"):
        read_template(str(write("latin.jinja", b"\xff\xfe")))
    with pytest.raises(UserMistake, match="chess has only moves"):
        load_tokenizer("chess").chat_template = "{{ messages }}"


def test_the_sandbox_keeps_templates_from_python(write: Write) -> None:
    escape = write("escape.jinja", "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UserMistake, match="unsafe"):
        read_document(FORMATS["chat"], record(messages=CHAT), options(template=str(escape)))


@pytest.mark.parametrize("pack", [True, False])
def test_a_prepared_conversation_trains_on_its_answers(
    write: Write, settings: Any, said: list[str], pack: bool
) -> None:
    file = write("chats.jsonl", [{"messages": CHAT}, {"messages": [user("x")]}, {"text": "y"}])
    chosen = settings(source="json", path=file, max_length=300, pack=pack, chat_template="chatml", on_error="skip")
    sequences = prepare(chosen, BYTES, report=said.append)
    tokens, flags = sequences[0]
    assert BYTES.decode(tokens) == ("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n<|end|>")
    assert BYTES.decode(tokens[(flags & LOSS_TOKEN) > 0]) == "Two.<|im_end|>\n<|end|>"
    assert said[0].startswith("1 document (chat)")
    assert any(sentence.startswith("2 invalid records or files were skipped; the first: ") for sentence in said)
    assert any("model.add_tokens: [" in sentence and "<|im_start|>" in sentence for sentence in said)


def test_another_template_is_another_cache_entry(write: Write, settings: Any, said: list[str]) -> None:
    file = write("chats.jsonl", [{"messages": CHAT}])
    template = write("mine.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}")
    asked = {"source": "json", "path": file, "max_length": 300, "train_on": "all", "chat_template": str(template)}
    before = prepare(settings(**asked), BYTES, report=said.append)
    assert BYTES.decode(before[0][0]) == "One?Two.<|end|>"
    template.write_text("{% for message in messages %}{{ message.content }}|{% endfor %}")
    assert BYTES.decode(prepare(settings(**asked), BYTES, report=said.append)[0][0]) == "One?|Two.|<|end|>"
    assert not any("cached" in sentence for sentence in said)
    prepare(settings(**asked), BYTES, report=said.append)
    assert "cached" in said[-1]


def test_without_a_template_the_choices_are_named(write: Write, settings: Any) -> None:
    file = write("chats.jsonl", [{"messages": CHAT}])
    with pytest.raises(
        UserMistake, match=r"bytes has no chat template; set data.chat_template to chatml, llama3, mist"
    ):
        prepare(settings(source="json", path=file, on_error="skip"), BYTES, report=lambda _: None)


def test_documents_options_and_tokenizers_can_be_sent_to_other_processes() -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = read_template("chatml")
    choices = Options("answers", tokenizer_template(tokenizer))
    document = read_document(FORMATS["chat"], record(messages=CHAT), choices)
    again, same, there = pickle.loads(pickle.dumps((choices, document, tokenizer)))
    assert read_document(FORMATS["chat"], record(messages=CHAT), again) == same == document
    assert encode(there, [same]).ids.tolist() == encode(tokenizer, [document]).ids.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [user("One?")], "chosen": [assistant("Two.")], "rejected": [assistant("Six.")]},
        {"prompt": "One?", "chosen": [user("One?"), assistant("Two.")], "rejected": [user("One?"), assistant("Six.")]},
        {"chosen": [user("One?"), assistant("Two.")], "rejected": [user("One?"), assistant("Six.")]},
        {"prompt": [user("One?")], "chosen": "Two.", "rejected": "Six."},
    ],
)
def test_a_pair_of_conversations_differs_in_what_is_learned(fields: dict[str, Any]) -> None:
    assert choose_format("auto", record(**fields)).name == "preference"
    chosen, rejected = read_pair(record(**fields), options())
    assert text_of(chosen) == "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"
    assert (trained(chosen), trained(rejected)) == (["Two.<|im_end|>\n"], ["Six.<|im_end|>\n"])
    assert text_of(rejected) == text_of(chosen).replace("Two.", "Six.")


def test_a_pair_of_texts_shares_its_prompt() -> None:
    given = read_pair(record(prompt="1 + 1 =", chosen=" two", rejected=" ten"), Options())
    implied = read_pair(record(chosen="1 + 1 = two", rejected="1 + 1 = ten"), Options())
    assert given == implied
    assert given[0].segments == [("1 + 1 =", False), (" two", True)]
    assert given[1].segments == [("1 + 1 =", False), (" ten", True)]
    with pytest.raises(UserMistake, match=r"data\.jsonl:7: chosen and rejected are the same"):
        read_pair(record(chosen="x", rejected="x"), Options())
    with pytest.raises(UserMistake, match=r"data\.jsonl:7 lacks rejected"):
        read_pair(record(chosen="x"), Options())


def test_pairs_are_refused_where_single_documents_are_trained(write: Write, settings: Any) -> None:
    file = write("pairs.jsonl", [{"chosen": "x", "rejected": "y"}])
    with pytest.raises(UserMistake, match=r"data.format preference has pairs.*causal_lm cannot train on"):
        prepare(settings(source="json", path=file), BYTES, report=lambda _: None)

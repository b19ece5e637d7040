"""Token ids and masks of conversations against transformers, for ten families of chat templates.

The files in templates/ write the formats of these families, with generation blocks. Without the blocks, the answers
have to be found by comparing renderings.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data.encode import encode
from shoal.data.formats.chat_template import NAMED, end_ids, read_template, tokenizer_template
from shoal.data.formats.choose import FORMATS, Options, read_document
from shoal.data.sequences import LOSS_TOKEN
from shoal.data.sources import Record
from shoal.data.tokenizer import PretrainedTokenizer

TEMPLATES = Path(__file__).parent / "templates"
ANSWERED_BY_TOOLS = ("deepseek", "mistral_nemo", "qwen25", "qwen3")
FAMILIES = ("command_r", "gemma", "llama2", "llama3", "phi3", "zephyr", *ANSWERED_BY_TOOLS)
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"),
    *("<|SYSTEM_TOKEN|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    opening = [] if system is None else [{"role": "system", "content": system}]
    return opening + [{"role": roles[index % 2], "content": one} for index, one in enumerate(contents)]


CONVERSATIONS = {
    "one turn": turns("Where is the cat?", "On the mat."),
    "several turns": turns("One?", "Two.", "Three?", "Four.", "Five?", "Six."),
    "a repeated answer": turns("Say the cat", "the cat", "Say the cat", "the cat"),
    "white space": turns("  the cat \n", " \tsat on \n\n", "\nthe mat", "  the hat  "),
    "unicode": turns("Tiếng Việt 🐟?", "漢字 👩‍👩‍👧 naïve é", "“quoted”\u2028", "🐟"),
    "thinking": turns("Why?", "<think>\nthe mat\n</think>\n\nSo.", "And?", "<think>\nthe hat\n</think>\n\nThus."),
    "an unanswered question": turns("One?", "Two.", "Three?"),
}
SYSTEM = turns("Hello", "the cat", "Again", "the hat", system="Be brief.")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look for a cat.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
ARGUMENTS = {"place": "the mat"}


def with_tools(arguments: Any, content: Any) -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        *turns("Hello", "Hi", "Where is the cat?"),
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"},
        {"role": "assistant", "content": "On the mat, twice."},
    ]


@pytest.fixture(scope="module")
def tokenizer() -> PretrainedTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat and the hat\nassistant\n\nuser system\n"] * 20, trainer)
    loaded = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    return PretrainedTokenizer("small", loaded)


def ours(
    tokenizer: PretrainedTokenizer, template: str, train_on: str = "answers", **fields: Any
) -> tuple[list[int], str]:
    """The ids, and a 1 for each trained token."""
    tokenizer.chat_template = template
    record = Record(fields, Path("chats.jsonl"), 3)
    document = read_document(FORMATS["chat"], record, Options(train_on, tokenizer_template(tokenizer)))
    encoded = encode(tokenizer, [document])
    return encoded.ids.tolist(), "".join(map(str, encoded.flags & LOSS_TOKEN))


def theirs(tokenizer: PretrainedTokenizer, template: str, messages: Any, tools: Any = None) -> tuple[list[int], str]:
    found = tokenizer.hugging_face.apply_chat_template(
        messages,
        tools=tools,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(found["input_ids"]), "".join(map(str, found["assistant_masks"]))


def without_blocks(template: str) -> str:
    bare, count = re.subn(r"\{%- (end)?generation %\}", "", template)
    assert count
    return bare


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "compared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_masks_are_those_of_transformers(tokenizer: PretrainedTokenizer, family: str, blocks: bool) -> None:
    marked = (TEMPLATES / f"{family}.jinja").read_text()
    template = marked if blocks else without_blocks(marked)
    conversations = {**CONVERSATIONS, **({"system": SYSTEM} if family != "gemma" else {})}
    for name, messages in conversations.items():
        expected = theirs(tokenizer, marked, messages)
        assert "1" in expected[1]
        assert ours(tokenizer, template, messages=messages) == expected, name
    if family in ANSWERED_BY_TOOLS:
        as_json = family == "deepseek"  # which concatenates the arguments, so they must be text
        expected = theirs(tokenizer, marked, with_tools('{"place": "the mat"}' if as_json else ARGUMENTS, ""), TOOLS)
        for arguments in (ARGUMENTS, '{"place": "the mat"}'):
            given = with_tools(arguments, None)
            assert ours(tokenizer, template, messages=given, tools=TOOLS) == expected


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "compared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_answer_is_the_mask_of_all_answers_without_the_others(
    tokenizer: PretrainedTokenizer, family: str, blocks: bool
) -> None:
    template = (TEMPLATES / f"{family}.jinja").read_text()
    template = template if blocks else without_blocks(template)
    messages = CONVERSATIONS["several turns"]
    ids, last = ours(tokenizer, template, "last", messages=messages)
    assert ids == ours(tokenizer, template, messages=messages)[0]
    every = ours(tokenizer, template, messages=messages)[1]
    *_, longest = re.finditer("1+", every)
    assert last == "0" * longest.start() + longest.group() + every[longest.end() :]
    trained = tokenizer.decode([token for token, flag in zip(ids, last, strict=True) if flag == "1"])
    assert "Six." in trained
    assert "Four." not in trained
    assert set(ours(tokenizer, template, "all", messages=messages)[1][1:]) == {"1"}


def test_the_end_of_a_turn_is_trained_where_a_block_leaves_it_out(tokenizer: PretrainedTokenizer) -> None:
    narrow = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = CONVERSATIONS["several turns"]
    (ids, mask), (expected_ids, narrower) = (
        ours(tokenizer, narrow, messages=messages),
        theirs(tokenizer, narrow, messages),
    )
    assert ids == expected_ids
    end = int(tokenizer.encode("<|im_end|>")[0])
    added = [index for index, (one, other) in enumerate(zip(mask, narrower, strict=True)) if one != other]
    assert [ids[index] for index in added] == [end] * 3
    assert all(mask[index] == "1" == narrower[index - 1] for index in added)


def test_generation_stops_where_a_turn_ends(tokenizer: PretrainedTokenizer) -> None:
    ends = {"qwen25": ["</s>", "<|im_end|>"], "zephyr": ["</s>"], "phi3": ["</s>", "<|end|>"]}
    for family, expected in ends.items():
        tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
        assert [tokenizer.decode([token]) for token in end_ids(tokenizer)] == expected


def test_an_answer_that_no_token_closes_is_closed_by_the_end_token(tokenizer: PretrainedTokenizer) -> None:
    plain = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    ids, mask = ours(tokenizer, plain, messages=CONVERSATIONS["one turn"])
    assert tokenizer.decode(ids) == "user: Where is the cat?\nassistant: On the mat.\n</s>"
    trained = [token for token, flag in zip(ids, mask, strict=True) if flag == "1"]
    assert tokenizer.decode(trained) in ("On the mat.\n</s>", " On the mat.\n</s>")  # a token may begin with the space


@pytest.mark.parametrize("name", NAMED)
def test_the_named_templates_mark_what_a_comparison_finds(tokenizer: PretrainedTokenizer, name: str) -> None:
    template = read_template(name)
    for messages in (*CONVERSATIONS.values(), SYSTEM):
        found = ours(tokenizer, template, messages=messages)
        assert (
            found
            == ours(tokenizer, without_blocks(template), messages=messages)
            == theirs(tokenizer, template, messages)
        )
        ends = {
            int(one) for text in ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>") for one in tokenizer.encode(text)
        }
        last_of_runs = [found[0][run.end() - 1] for run in re.finditer("1+", found[1])]
        assert set(last_of_runs) <= ends
    if name in ("chatml", "llama3"):
        ids, _ = ours(tokenizer, template, messages=with_tools(ARGUMENTS, None), tools=TOOLS)
        assert '{"place": "the mat"}' in tokenizer.decode(ids)


def test_a_template_that_takes_parts_gets_parts(tokenizer: PretrainedTokenizer) -> None:
    template = without_blocks(read_template("chatml")).replace("message.content or ''", "message.content[0].text")
    template = template.replace("+ message.content +", "+ message.content[0].text +")
    ids, mask = ours(tokenizer, template, messages=CONVERSATIONS["several turns"])
    assert (ids, mask) == ours(tokenizer, read_template("chatml"), messages=CONVERSATIONS["several turns"])


@pytest.mark.parametrize("text", ["", "the cat", "漢字 🐟 é\u2028", " <|im_end|>\n\n the 👩‍👩‍👧"])
def test_offsets_cover_the_text_in_characters(tokenizer: PretrainedTokenizer, text: str) -> None:
    from shoal.data.tokenizer import load_tokenizer

    for one in (tokenizer, load_tokenizer("bytes")):
        ((ids, starts, ends),) = one.encode_with_offsets([text])
        assert ids.tolist() == one.encode(text).tolist()
        assert len(ids) == len(starts) == len(ends)
        covered = np.zeros(len(text), dtype=bool)
        for start, end in zip(starts, ends, strict=True):
            covered[start:end] = True
            assert start < end
        assert covered.all()

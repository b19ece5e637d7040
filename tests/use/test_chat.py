"""A conversation keeps its history, through a pipe as in a terminal."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal import api
from shoal.mistakes import UserMistake
from shoal.use.chat import Chat, converse
from shoal.use.generate import Sampling, generate
from shoal.use.load import load_run
from shoal.use.prompt import make_prompt

GREEDY = Sampling(tokens=12, temperature=0)


def test_each_answer_is_to_the_whole_conversation_so_far(chat_run, tmp_path, shoal):
    folder = api.export(chat_run, tmp_path / "hf")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)

    def expected(*conversation: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(conversation)]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        made = model.generate(ids, do_sample=False, max_new_tokens=12)
        text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    first = expected("hello")
    second = expected("hello", first, "import this")
    for run in (chat_run, folder):
        ended = shoal("chat", run, "--tokens", 12, "--temperature", 0, typed="hello\n\nimport this\n/reset\nhello")
        assert ended.status == 0, ended.err
        assert ended.out == f"{first}\n{second}\n{first}\n"
        assert "/reset" in ended.err


def test_a_mistyped_command_is_not_a_message_and_exit_exits(chat_run, shoal):
    asked = ("chat", chat_run, "--tokens", 12, "--temperature", 0)
    ended = shoal(*asked, typed="/help\n/rest\nhello\n/exit\nhello\n")
    assert (ended.status, ended.out) == (0, shoal(*asked, typed="hello\n").out)
    assert ended.err.splitlines()[-2:] == [
        "Ctrl-D exits, /reset clears the history, Ctrl-C stops an answer.",
        "There is no /rest. Ctrl-D exits, /reset clears the history, Ctrl-C stops an answer.",
    ]


def test_an_answer_without_text_is_said_to_have_none(chat_run, monkeypatch):
    said, chat = [], Chat(load_run(chat_run, device="cpu"), GREEDY)
    monkeypatch.setattr(chat, "ask", lambda _: iter([""]))
    converse(chat, ["hello"], lambda _: None, said.append)
    assert said == ["(no text: the model ended its answer at once)"]


def test_the_oldest_turns_are_dropped_when_the_context_is_full(chat_run):
    said: list[str] = []
    chat = Chat(load_run(chat_run, device="cpu"), GREEDY, said.append)
    for letter in "abcdef":
        list(chat.ask(letter * 120))
    users = [message["content"][0] for message in chat.history if message["role"] == "user"]
    assert users == ["d", "e", "f"]
    assert [message["role"] for message in chat.history] == ["user", "assistant"] * 3
    assert any("were dropped" in sentence for sentence in said)


def test_a_line_too_long_is_refused_and_the_history_is_kept(chat_run, shoal):
    asked = ("chat", chat_run, "--tokens", 12, "--temperature", 0)
    without = shoal(*asked, typed="hello\nimport this\n")
    ended = shoal(*asked, typed=f"hello\n{'x' * 600}\nimport this\n")
    assert (ended.status, ended.out) == (0, without.out)
    assert "shorten the prompt" in ended.err


def test_ctrl_c_ends_an_answer_and_not_the_conversation(chat_run):
    chat, heard = Chat(load_run(chat_run, device="cpu"), GREEDY), []

    def write(chunk: str) -> None:
        heard.append(chunk)
        if len(heard) == 2:
            raise KeyboardInterrupt

    converse(chat, ["hello", "import this"], write, lambda _: None)
    assert chat.history[1]["content"] == "".join(heard[:2])
    assert len(chat.history) == 4
    assert heard.count("\n") == 2


def test_an_interrupted_answer_is_in_the_history_as_far_as_it_was_streamed(chat_run):
    chat = Chat(load_run(chat_run, device="cpu"), Sampling(tokens=300, temperature=0))
    chunks = chat.ask("hello")
    heard = next(chunks)
    chunks.close()
    assert chat.history == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": heard}]


def test_without_a_template_a_run_trained_on_instructions_takes_each_line_as_one(instruction_run, shoal):
    loaded = load_run(instruction_run, device="cpu")
    expected = [generate(loaded, text, tokens=12, temperature=0) for text in ("turn as one", "follow")]
    ended = shoal("chat", instruction_run, "--tokens", 12, "--temperature", 0, typed="turn as one\nfollow\n")
    assert ended.out == "".join(text + "\n" for text in expected)
    assert "without history" in ended.err


def test_a_run_trained_on_instructions_does_not_use_the_chat_template_of_its_tokenizer(instruction_run, chat_run):
    said: list[str] = []
    loaded = load_run(instruction_run, device="cpu")
    loaded.tokenizer.hugging_face.chat_template = "{{ raise_exception('not the template of training') }}"
    answer = "".join(Chat(loaded, GREEDY, said.append).ask("turn as one"))
    assert answer == generate(
        load_run(instruction_run, device="cpu"), "turn as one", tokens=GREEDY.tokens, temperature=0
    )
    assert "without history" in said[0]
    # Where no template was trained, the tokenizer's is used, and that is said.
    Chat(load_run(chat_run, device="cpu"), GREEDY, said.append)
    assert "unseen in this training" in said[1]


def test_a_run_trained_on_conversations_renders_prompts_as_in_training(conversation_run, tmp_path):
    loaded, said = load_run(conversation_run, device="cpu"), []
    wanted = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    prompt = make_prompt(loaded, "hello")
    assert loaded.tokenizer.decode(prompt.ids) == wanted
    assert not prompt.continues
    assert loaded.tokenizer.decode(make_prompt(loaded, "hello", raw=True).ids) == "hello"
    chat = Chat(loaded, GREEDY, said.append)
    assert "unseen" not in "".join(said)
    assert "".join(chat.ask("hello")) == generate(loaded, "hello", tokens=GREEDY.tokens, temperature=0)
    assert [message["role"] for message in chat.history] == ["user", "assistant"]
    # The template is exported with the tokenizer.
    exported = AutoTokenizer.from_pretrained(api.export(conversation_run, tmp_path / "hf"))
    messages = [{"role": "user", "content": "hello"}]
    assert exported.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == wanted
    assert exported.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == prompt.ids


def test_a_run_without_chat_template_or_instructions_is_refused(text_run, tmp_path, shoal):
    refused = shoal("chat", text_run, typed="hello\n")
    refused.hold_mistake("has no chat template", "not trained on instructions", f"shoal generate {text_run} TEXT")
    folder = api.export(text_run, tmp_path / "hf")
    shoal("chat", folder).hold_mistake("has no chat template", "does not record how it was trained")


def test_a_failing_template_is_a_user_mistake(chat_run):
    chat = Chat(load_run(chat_run, device="cpu"), GREEDY)
    chat._loaded.tokenizer.hugging_face.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(UserMistake, match="no system message"):
        list(chat.ask("hello"))
    assert not chat.history

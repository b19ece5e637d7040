"""`model.add_tokens`: fine-tuning with tokens that the base model does not have, from the config to the export."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig, LlamaConfig

from shoal import api
from shoal.data import load_tokenizer
from shoal.mistakes import UserMistake
from shoal.observe.progress import Reporter
from shoal.train.inputs import Inputs, read_inputs
from tests.data.test_tokenizer import make_bpe
from tests.harness import lines, settings, slow, train_again_on, train_on, weights
from tests.models.every_type import small_settings
from tests.models.small import plain

TOKENS = ["<|im_start|>", "<|im_end|>", "<|tool|>"]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 88,
    "max_position_embeddings": 128,
}
EMBEDDING = {"tied": "model.embed_tokens.weight", "untied": "gpt_neox.embed_in.weight"}
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    turns = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat on the hat<|im_end|>\n"
    path = tmp_path_factory.mktemp("chats") / "chats.txt"
    path.write_text("".join(turns.replace("cat", f"cat {number}") for number in range(60)))
    return path


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied Llama without room for more tokens, and an untied Pythia in bf16 with one spare row."""
    folders = {name: make_bpe(tmp_path_factory.mktemp(name)) for name in ("tied", "untied")}
    size = len(AutoTokenizer.from_pretrained(folders["tied"]))
    tied = LlamaConfig(vocab_size=size, num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
    plain(tied).save_pretrained(folders["tied"])
    untied = GPTNeoXConfig(vocab_size=size + 1, tie_word_embeddings=False, **SIZES)
    plain(untied).to(torch.bfloat16).save_pretrained(folders["untied"])
    return folders


@pytest.fixture(scope="module")
def config_of(bases: dict[str, Path], chats: Path):
    def config(base: str, **changes: Any) -> dict[str, Any]:
        model = {"from": str(bases[base]), "add_tokens": TOKENS, "freeze": changes.pop("freeze", [])}
        wanted = {"data__max_length": 48, "train__steps": 3, "train__global_batch": 4, "train__micro_batch": 2}
        return settings(chats, model=model, checkpoint__every=2, **{**wanted, **changes})

    return config


@pytest.fixture(scope="module")
def alone(config_of, tmp_path_factory: pytest.TempPathFactory):
    """The run of one process, trained once."""

    @cache
    def train(base: str) -> Path:
        return train_again_on(1, config_of(base), tmp_path_factory.mktemp("alone"))

    return train


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_new_rows_start_as_the_mean_and_old_rows_as_they_were(base, bases, config_of, tmp_path, capfd):
    names = [EMBEDDING[base]] + ([HEAD] if base == "untied" else [])
    run = train_on(1, config_of(base, freeze=names, train__steps=1), tmp_path)
    said = capfd.readouterr().err
    assert all(f"{name} is frozen, so its rows of added tokens stay" in said for name in names)
    known = len(AutoTokenizer.from_pretrained(bases[base]))
    before, after = AutoModelForCausalLM.from_pretrained(bases[base], dtype=torch.float32), weights(run)
    assert (HEAD in after) == (base == "untied")
    for name in names:
        old, rows = before.get_parameter(name).detach()[:known], after[name]
        # 275 and 276 before: odd, and a multiple of four.
        assert rows.shape[0] == {"tied": 278, "untied": 280}[base]
        assert torch.equal(rows[:known], old)
        assert all(torch.equal(row, rows[-1]) for row in rows[known:])
        torch.testing.assert_close(rows[-1], old.double().mean(0).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("base", "parallel", "bitwise"),
    [
        pytest.param("tied", {"strategy": "fsdp"}, True, id="fsdp"),
        pytest.param("tied", {"tp": 2}, False, id="tp"),
        slow("untied", {"pp": 2}, False, id="pp"),
    ],
)
def test_every_strategy_starts_from_the_same_rows(base, parallel, bitwise, alone, config_of, tmp_path):
    changes = {f"parallel__{key}": value for key, value in parallel.items()}
    run, expected = train_again_on(2, config_of(base, **changes), tmp_path), alone(base)
    losses, wanted = ([line["loss"] for line in lines(one)] for one in (run, expected))
    assert losses == (wanted if bitwise else pytest.approx(wanted, rel=2e-6))
    one, other = weights(run), weights(expected)
    assert all(torch.allclose(one[name], other[name], atol=4e-5) for name in one)
    new = one[EMBEDDING[base]][275:]
    assert not torch.allclose(new[0], new[1])  # trained, each on its own


def test_a_run_with_added_tokens_resumes_on_another_mesh(alone, config_of, tmp_path):
    shutil.copytree(alone("tied"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000003")
    run = train_on(2, config_of("tied", parallel__tp=2), tmp_path, resume=True)
    assert lines(run)[-1]["loss"] == pytest.approx(lines(alone("tied"))[-1]["loss"], rel=2e-6)


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_an_export_has_the_tokens_and_the_same_logits(base, alone, bases, tmp_path):
    folder, known = api.export(alone(base), tmp_path / "export"), len(AutoTokenizer.from_pretrained(bases[base]))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    loaded = api.load_run(alone(base), device="cpu")
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == {"tied": 278, "untied": 280}[base]
    assert len(tokenizer) == known + len(TOKENS)
    assert model.config.tie_word_embeddings == (base == "tied")
    ids = tokenizer("<|im_start|>user\nthe cat<|im_end|>")["input_ids"]
    assert (ids[0], ids[-1]) == (known, known + 1)
    assert loaded.tokenizer.encode("<|im_start|>user\nthe cat<|im_end|>").tolist() == ids
    assert loaded.tokenizer.size == len(tokenizer)
    inputs = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=inputs).logits, loaded.model(input_ids=inputs).logits)


def test_bytes_has_the_tokens_in_training_in_use_and_in_the_export(chats, tmp_path):
    config = settings(chats, train__steps=1, train__global_batch=2, train__micro_batch=2)
    config["model"]["add_tokens"] = TOKENS
    run = train_again_on(1, config, tmp_path)
    loaded, exported = api.load_run(run, device="cpu"), AutoTokenizer.from_pretrained(api.export(run))
    text = "a<|im_start|>é<|end|><|tool|>"
    ids = loaded.tokenizer.encode(text).tolist()
    assert ids == [97, 259, *"é<|end|>".encode(), 261] == exported(text)["input_ids"]
    assert loaded.tokenizer.decode(ids) == text == exported.decode(ids)
    assert loaded.tokenizer.decode(ids, keep_special=False) == "aé<|end|>"
    assert loaded.tokenizer.fingerprint != load_tokenizer("bytes").fingerprint
    assert (
        loaded.model.get_input_embeddings().weight.shape[0] == 264
    )  # 262 are used; a multiple of four, as 260 in the shape


def read(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[Inputs, str]:
    inputs = read_inputs(api.config_from_mapping(config), Reporter(enabled=True))
    return inputs, capsys.readouterr().err


def test_tokens_that_the_tokenizer_has_are_not_added_again(config_of, capsys):
    config = config_of("tied")
    before = read({**config, "model": {**config["model"], "add_tokens": []}}, capsys)[0]
    size = before.tokenizer.size
    config["model"]["add_tokens"] = ["</s>", "<|im_end|>"]
    inputs, said = read(config, capsys)
    assert inputs.tokenizer.added == {"<|im_end|>": size}
    assert inputs.blueprint.vocabulary == inputs.tokenizer.size == size + 1
    assert inputs.tokenizer.fingerprint != before.tokenizer.fingerprint
    assert "the tokenizer has </s> already." in said
    assert f"1 new token; the vocabulary grows from {size} to {size + 1}" in said
    config["model"]["add_tokens"] = ["</s>"]
    inputs, said = read(config, capsys)
    assert inputs.blueprint.new_rows is None
    assert inputs.tokenizer.fingerprint == before.tokenizer.fingerprint


def test_a_tokenizer_may_have_been_given_the_tokens_before_the_model(bases, config_of, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(bases["tied"])
    size = len(tokenizer)
    tokenizer.add_tokens(TOKENS[:2], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    config = config_of("tied")
    config["model"] |= {"tokenizer": str(tmp_path), "add_tokens": TOKENS[:2]}
    inputs, _ = read(config, capsys)
    assert inputs.blueprint.new_rows.indices == (size, size + 1)
    assert (inputs.blueprint.new_rows.known, inputs.blueprint.vocabulary) == (size, size + 2)
    config["model"]["add_tokens"] = TOKENS[:1]
    with pytest.raises(UserMistake, match=f"has {size + 2} tokens, but the model's vocabulary is {size}; .*add_tokens"):
        read(config, capsys)


def test_a_model_with_an_embedding_per_layer_is_refused(chats, tmp_path, capsys):
    small_settings("gemma3n_text").save_pretrained(tmp_path)
    config = settings(chats, data__max_length=48, model={"from": str(tmp_path), "tokenizer": "bytes"})
    config["model"]["add_tokens"] = TOKENS
    with pytest.raises(UserMistake, match="gemma3n_text has an embedding per layer"):
        read(config, capsys)


def test_the_moves_of_chess_take_no_tokens(chats, capsys):
    config = settings(chats)
    config["model"] |= {"tokenizer": "chess", "add_tokens": TOKENS}
    with pytest.raises(UserMistake, match="chess encodes moves and nothing else"):
        read(config, capsys)


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["<a>", "<b>", "<a>"], "lists <a> more than once"),
        (["<a>", ""], "must not be empty"),
        (["<a>", 3], r"add_tokens\[1\] is 3, but must be a string"),
        ("<a>", "must be a list of strings"),
    ],
)
def test_tokens_that_are_none_are_mistakes(tokens, sentence, chats):
    config = settings(chats)
    config["model"]["add_tokens"] = tokens
    with pytest.raises(UserMistake, match=sentence):
        api.config_from_mapping(config)

"""Generation from a run equals that of plain transformers on its export, for any checkpoint of any strategy."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal import api
from shoal.data.formats.choose import FORMATS, alpaca_prompt
from shoal.data.tokenizer import ByteTokenizer, load_tokenizer
from shoal.mistakes import UserMistake
from shoal.use.generate import Sampling, StreamDecoder, generate, stream
from shoal.use.load import load_run
from shoal.use.prompt import make_prompt, trained_on_instructions
from tests.harness import weights


def plainly(folder: Path, prompt: str, tokens: int) -> str:
    """Greedy decoding in plain transformers, without shoal."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**ids, do_sample=False, max_new_tokens=tokens)
    text = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(set(text)) > tokens // 4, "a dull text proves little"
    return text


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_greedy_text_is_that_of_plain_transformers_on_the_export(strategy, text_runs, tmp_path, shoal):
    exported = api.export(text_runs[strategy], tmp_path / "hf")
    expected = plainly(exported, "def main(", 40)
    assert (
        shoal("generate", text_runs[strategy], "def main(", "--tokens", 40, "--temperature", 0).out == expected + "\n"
    )
    from_folder = shoal("generate", exported, "def main(", "--tokens", 40, "--temperature", 0, "--json").json
    assert (from_folder["text"], from_folder["step"]) == (expected, None)


def test_the_loaded_weights_are_the_checkpoints_bit_for_bit(text_runs):
    for run in text_runs.values():
        loaded = load_run(run, device="cpu")
        found = dict(loaded.model.named_parameters())
        for name, tensor in weights(run).items():
            assert torch.equal(found.pop(name), tensor)
        assert not found
        assert not loaded.model.training


def test_any_step_can_be_selected(text_run, tmp_path, shoal):
    older = plainly(api.export(text_run, tmp_path / "older", step=2), "import ", 40)
    newest = plainly(api.export(text_run, tmp_path / "newest"), "import ", 40)
    assert older != newest, "two steps at this learning rate generate different texts"
    asked = ("generate", text_run, "import ", "--tokens", 40, "--temperature", 0, "--json")
    assert [shoal(*asked, "--step", 2).json[key] for key in ("step", "text")] == [2, older]
    assert [shoal(*asked).json[key] for key in ("step", "text")] == [4, newest]


def test_a_seed_gives_the_same_text_again_and_no_seed_another(text_run, shoal):
    asked = ("generate", text_run, "def ", "--tokens", 30, "--json")
    first = shoal(*asked, "--seed", 5).json
    assert first["seed"] == 5
    assert shoal(*asked, "--seed", 5).json == first
    fresh = shoal(*asked).json
    assert fresh["text"] != shoal(*asked).json["text"]
    assert shoal(*asked, "--seed", fresh["seed"]).json == fresh


def test_sampling_does_not_change_the_callers_rng_state(text_run):
    loaded = load_run(text_run, device="cpu")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    generate(loaded, "def ", tokens=5, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_temperature_one_samples_from_all_tokens_and_not_from_the_top_fifty(text_run):
    loaded = load_run(text_run, device="cpu")
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight.zero_()  # every token equally likely
    with stream(loaded, "x", Sampling(tokens=150, seed=0)) as answer:
        list(answer)
        assert len(set(answer.ids)) > 80

    loaded = load_run(text_run, device="cpu")
    greedy = generate(loaded, "x", tokens=20, temperature=0)
    assert generate(loaded, "x", tokens=20, temperature=1.5, top_k=1, seed=0) == greedy
    assert generate(loaded, "x", tokens=20, temperature=1.5, top_p=1e-6, seed=0) == greedy


def test_generation_ends_at_an_end_token_which_is_not_in_the_text(text_run):
    loaded = load_run(text_run, device="cpu")
    greedy = generate(loaded, "def main(", tokens=40, temperature=0)
    first, second = greedy[10], greedy[20]
    loaded.tokenizer.end = ord(second)
    assert generate(loaded, "def main(", tokens=40, temperature=0) == greedy[: greedy.index(second)]
    loaded.model.config.eos_token_id = [257, ord(first)]  # as instruct models have it: the tokenizer's, and their own
    assert generate(loaded, "def main(", tokens=40, temperature=0) == greedy[: min(map(greedy.index, (first, second)))]


def test_generation_ends_at_the_context_length_with_a_notice(text_run, shoal):
    ended = shoal("generate", text_run, "x" * 500, "--tokens", 50, "--seed", 2, "--json")
    assert ended.json["tokens"] <= 12
    assert ended.json["cut_off"] == (ended.json["tokens"] == 12)
    shoal("generate", text_run, "x" * 512).hold_mistake("The prompt has 512 tokens", "512 positions", "shorten")


def test_generation_can_be_stopped_early(text_run):
    with stream(load_run(text_run, device="cpu"), "def ", Sampling(tokens=400, temperature=0)) as answer:
        next(answer)
    assert len(answer.ids) < 400
    assert not answer._thread.is_alive()


def test_an_error_in_the_model_is_raised_in_the_caller(text_run):
    loaded = load_run(text_run, device="cpu")
    loaded.model.get_input_embeddings().weight = torch.nn.Parameter(torch.zeros(3, 32), requires_grad=False)
    with pytest.raises(IndexError):
        generate(loaded, "def ", tokens=5)


def test_an_empty_prompt_starts_a_new_document(text_run, shoal):
    loaded = load_run(text_run, device="cpu")
    assert make_prompt(loaded, "").ids == [loaded.tokenizer.end]
    assert shoal("generate", text_run, "", "--tokens", 5, "--json").json["tokens"] <= 5


def test_instructions_are_formatted_as_in_training(instruction_run, instructions, shoal):
    loaded = load_run(instruction_run, device="cpu")
    prompt = make_prompt(loaded, "turn as one")
    assert loaded.tokenizer.decode(prompt.ids) == alpaca_prompt("turn as one")
    assert loaded.tokenizer.decode(make_prompt(loaded, "turn as one", raw=True).ids) == "turn as one"
    asked = ("--tokens", 20, "--temperature", 0, "--json")
    wrapped = shoal("generate", instruction_run, "turn as one", *asked).json
    assert wrapped["prompt"] == "turn as one"
    by_hand = shoal("generate", instruction_run, alpaca_prompt("turn as one"), "--raw", *asked).json
    assert wrapped["text"] == by_hand["text"]


def test_a_format_says_itself_how_a_prompt_is_written(instruction_run, monkeypatch):
    own = replace(FORMATS["alpaca"], prompt=lambda text: f"Q: {text}\nA:")
    monkeypatch.setitem(FORMATS, "alpaca", own)
    loaded = load_run(instruction_run, device="cpu")
    assert loaded.tokenizer.decode(make_prompt(loaded, "turn as one").ids) == "Q: turn as one\nA:"


def test_the_data_format_is_read_from_the_run_and_not_from_its_data(text_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(text_run, run)
    loaded = load_run(run, device="cpu")
    assert not trained_on_instructions(loaded)
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "data": {"format": "alpaca"}}))
    assert trained_on_instructions(loaded)


def test_weights_can_be_loaded_in_another_dtype(text_run, tmp_path, shoal):
    assert load_run(text_run, device="cpu").model.dtype == torch.float32
    assert load_run(text_run, device="cpu", dtype="bf16").model.dtype == torch.bfloat16
    exported = api.export(text_run, tmp_path / "hf", dtype="bf16")
    assert load_run(exported, device="cpu").model.dtype == torch.bfloat16
    assert shoal("generate", text_run, "a", "--tokens", 3, "--dtype", "bf16", "--json").json["tokens"] <= 3


@pytest.mark.parametrize("saved", [False, True])
def test_the_concatenated_chunks_are_the_text_of_all_tokens(saved, tmp_path):
    tokenizer = ByteTokenizer()
    if saved:
        tokenizer.save(tmp_path)
    used = load_tokenizer(str(tmp_path)) if saved else tokenizer
    ids = [*tokenizer.encode("Fische: 鱼 🐟 und\n\n ein Zeichen"), 0xE9, 0xB1]  # and an incomplete character
    decoder = StreamDecoder(used)
    chunks = [decoder.add(int(token)) for token in ids]
    assert "".join(chunks) == "Fische: 鱼 🐟 und\n\n ein Zeichen"
    assert "🐟" in chunks, "a character of four tokens is one chunk"
    assert "".join(chunks) + decoder.rest() == used.decode(ids)


def test_mistakes_in_the_options_are_sentences(text_run, shoal):
    for option, value, part in (
        ("--tokens", 0, "must be at least 1"),
        ("--temperature", -1, "must be 0 (greedy decoding) or more"),
        ("--top-p", 0, "above 0 and at most 1"),
        ("--temperature", 1e-320, "must be 0 (greedy decoding) or at least 1e-06"),
        ("--device", "meta", "is not supported; give auto, cpu, cuda or cuda:N"),
        ("--top-k", 0, "at least 1"),
        ("--seed", -1, "at least 0 and less than 2^63"),
        ("--device", "gpu", "is not a device"),
        ("--step", 3, "no complete checkpoint of step 3; available steps: 2, 4"),
    ):
        shoal("generate", text_run, "x", option, value).hold_mistake(part)
    if not torch.cuda.is_available():
        shoal("generate", text_run, "x", "--device", "cuda").hold_mistake("this machine has 0 CUDA devices")


def test_mistakes_in_the_run_are_sentences(text_run, tmp_path, shoal, monkeypatch):
    monkeypatch.chdir(text_run.parent.parent)
    shoal("generate", "runs/singel", "x").hold_mistake("There is no run runs/singel", "Did you mean runs/single?")
    shoal("generate", "single", "x").hold_mistake("Did you mean runs/single?")
    shoal("generate", tmp_path, "x").hold_mistake("neither a run (no config.yaml) nor a Hugging Face folder")
    checkpoint = Path("runs/single/checkpoints/step-00000002")
    shoal("generate", checkpoint, "x").hold_mistake("give its run: runs/single --step 2")
    exported = api.export(text_run, tmp_path / "hf")
    shoal("generate", exported, "x", "--step", 2).hold_mistake("has no steps")

    empty = tmp_path / "empty"
    shutil.copytree(text_run, empty, ignore=shutil.ignore_patterns("step-*"))
    shoal("generate", empty, "x").hold_mistake("holds no complete checkpoint.")

    damaged = tmp_path / "damaged"
    shutil.copytree(text_run, damaged)
    file = damaged / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    shoal("generate", damaged, "x").hold_mistake("rank-00000.safetensors is damaged")
    assert shoal("generate", damaged, "x", "--step", 2, "--tokens", 2).status == 0


def test_a_token_beyond_the_vocabulary_is_a_sentence(text_run):
    loaded = api.load_run(text_run)
    loaded.model.config.vocab_size = ord("e")
    with pytest.raises(UserMistake, match=r"has token 102, but the vocabulary of .* ends at 100"):
        api.generate(loaded, "def ", tokens=2)
    assert api.generate(loaded, "abcd", tokens=2, seed=1).tokens >= 0


def test_the_python_api_generates_the_same_text(text_run):
    heard: list[str] = []
    loaded = api.load_run(text_run)
    generated = api.generate(loaded, "def ", tokens=10, seed=4, write=heard.append)
    assert "".join(heard) == generated.text == api.generate(text_run, "def ", tokens=10, seed=4).text
    with pytest.raises(UserMistake, match="--tokens 0 must be at least 1"):
        api.generate(loaded, "def ", tokens=0)
    with pytest.raises(UserMistake, match="fp32, bf16, fp16"):
        api.load_run(text_run, dtype="float32")


def test_a_prompt_that_is_not_utf8_is_a_mistake(text_run):
    with pytest.raises(UserMistake, match=r"^The prompt is not text in UTF-8\.$"):
        api.generate(text_run, "\udcff", device="cpu")

"""Exports: plain transformers loads the folder, and its weights are those of the run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from shoal import api
from shoal.convert.export import export_hf
from shoal.data.tokenizer import load_tokenizer
from shoal.mistakes import UserMistake
from shoal.models.buffers import kept_buffers
from tests.harness import LLAMA, PYTHIA, settings, slow, train_again_on, weights
from tests.models.small import mixture_config, plain

SHAPES = {
    "llama tied": {**LLAMA, "tied": True},
    "llama untied": {**LLAMA, "tied": False},
    "pythia": {**PYTHIA, "tied": False},
    "gpt2": {**PYTHIA, "family": "gpt2", "tied": True},
}
CASES = [
    ("llama tied", "single", 1),
    ("llama tied", "ddp", 2),
    ("llama tied", "fsdp", 2),
    ("llama untied", "single", 1),
    ("pythia", "single", 1),
    ("gpt2", "single", 1),
]
IDS = torch.tensor([list(b"the shoal turns as one")])


def config_of(data: Path, shape: str, strategy: str, **changes: Any) -> dict[str, Any]:
    return settings(
        data,
        model__shape={**SHAPES[shape], "positions": 256},
        parallel__strategy=strategy,
        **{"train__steps": 2, "data__max_length": 48, "data__train_on": "all", "checkpoint__every": 1, **changes},
    )


@pytest.fixture(scope="module")
def trained(instructions: Path, tmp_path_factory: pytest.TempPathFactory):
    """The run of a case, trained once."""
    done: dict[tuple[str, str], Path] = {}

    def train(shape: str, strategy: str, world_size: int) -> Path:
        if (shape, strategy) not in done:
            config = config_of(instructions, shape, strategy)
            done[shape, strategy] = train_again_on(world_size, config, tmp_path_factory.mktemp("trained"))
        return done[shape, strategy]

    return train


@pytest.fixture
def run(trained, tmp_path: Path) -> Path:
    """A copy of one run, to change."""
    return Path(shutil.copytree(trained(*CASES[0]), tmp_path / "run"))


def stored_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def load_plainly(folder: Path) -> Any:
    """Load with transformers, without missing, unexpected or newly initialized tensors."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model.eval()


@pytest.mark.parametrize(("shape", "strategy", "world_size"), CASES)
def test_an_export_loads_in_plain_transformers_and_is_what_was_trained(shape, strategy, world_size, trained, tmp_path):
    run = trained(shape, strategy, world_size)
    folder = api.export(run, tmp_path / "model")
    assert folder == tmp_path / "model"
    model, expected = load_plainly(folder), weights(run)
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected[name]), name

    trained_model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run / "model")).eval()
    trained_model.load_state_dict(expected, strict=False)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, trained_model(IDS).logits)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied is SHAPES[shape]["tied"]


def test_training_changes_every_weight(trained, tmp_path):
    """Otherwise the test above would pass for an export of any checkpoint."""
    run = trained(*CASES[0])
    one = load_plainly(api.export(run, tmp_path / "one", step=1)).state_dict()
    two = load_plainly(api.export(run, tmp_path / "two")).state_dict()
    assert not any(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("shape", "strategy", "world_size"), CASES[2:])
def test_tensors_have_the_names_that_save_pretrained_gives_them(shape, strategy, world_size, trained, tmp_path):
    folder = api.export(trained(shape, strategy, world_size), tmp_path / "model")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(tmp_path / "plain")
    assert stored_names(folder) == stored_names(tmp_path / "plain")


def test_the_tokenizer_comes_along(trained, tmp_path, monkeypatch):
    # Else the tokenizers library starts threads here, which ranks forked by later tests would wait for forever.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    folder = api.export(trained(*CASES[0]), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Grüße, <|end|> shoal"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)


@pytest.mark.parametrize(
    ("shape", "strategy", "world_size", "architecture"),
    [
        (*CASES[0], "LlamaForCausalLM"),
        (*CASES[4], "GPTNeoXForCausalLM"),
        (*CASES[5], "GPT2LMHeadModel"),
    ],
)
def test_the_config_says_what_others_need_and_nothing_of_ours(
    shape, strategy, world_size, architecture, trained, tmp_path
):
    folder = api.export(trained(shape, strategy, world_size), tmp_path / "model")
    text = (folder / "config.json").read_text()
    said = json.loads(text)
    assert said["architectures"] == [architecture]
    assert said["dtype"] == "float32"
    assert (said["bos_token_id"], said["eos_token_id"]) == (256, 257)
    assert said.get("use_cache", True) is True
    assert "shoal" not in text
    assert "attn_implementation" not in text
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pkl", ".tmp", ".part")]
    model = load_plainly(folder)
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape[1] <= IDS.shape[1] + 3


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_an_export_in_another_dtype_is_cast_once_and_recorded_in_the_config(dtype, torch_dtype, trained, tmp_path):
    run = trained(*CASES[2])
    folder = api.export(run, tmp_path / "model", dtype=dtype)
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(torch_dtype).removeprefix("torch.")
    model, expected = load_plainly(folder), weights(run)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch_dtype
        assert torch.equal(parameter, expected[name].to(torch_dtype)), name


def test_an_unknown_dtype_is_a_mistake_that_leaves_nothing_behind(run, tmp_path):
    with pytest.raises(UserMistake, match="int3"):
        api.export(run, tmp_path / "out" / "model", dtype="int3")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=lambda case: case[0])
def test_an_export_in_several_files_is_the_same_model(case, trained, tmp_path):
    run, limit = trained(*case), 20_000
    folder = export_hf(run, tmp_path / "several", shard_bytes=limit)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    expected = weights(run)
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in expected.values())
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            assert {name for name, shard in index["weight_map"].items() if shard == file} == set(opened.keys())
            sizes = [4 * opened.get_tensor(name).numel() for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= limit or len(sizes) == 1
    for name, parameter in load_plainly(folder).named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_by_default_an_export_lies_in_the_run(run):
    assert api.export(run) == run / "hf"
    load_plainly(run / "hf")


def test_a_folder_that_is_not_empty_is_never_written_to(run, tmp_path):
    output = tmp_path / "mine"
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    for path in (output, output / "thesis.txt"):
        with pytest.raises(UserMistake, match="already exists and is not empty"):
            api.export(run, path)
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    assert (output / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_is_filled(run, tmp_path):
    (tmp_path / "empty").mkdir()
    load_plainly(api.export(run, tmp_path / "empty"))


def test_files_of_an_interrupted_export_are_not_in_the_next(run, tmp_path):
    left = tmp_path / "model.part"
    left.mkdir()
    (left / "model-00001-of-00009.safetensors").write_text("half")
    folder = api.export(run, tmp_path / "model")
    assert not left.exists()
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]


def test_a_run_without_a_checkpoint_is_a_mistake(run, tmp_path):
    for folder in (run / "checkpoints").glob("step-*"):
        (folder / "MANIFEST.json").unlink()
    with pytest.raises(UserMistake, match="holds no complete checkpoint"):
        api.export(run, tmp_path / "model")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserMistake, match="holds no checkpoints; give the folder of a run"):
        api.export(run, tmp_path / "model")
    with pytest.raises(UserMistake, match="There is no run"):
        api.export(tmp_path / "nowhere", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_step_that_was_not_saved_is_a_mistake(run, tmp_path):
    with pytest.raises(UserMistake, match="holds no complete checkpoint of step 7"):
        api.export(run, tmp_path / "model", step=7)


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path):
    file = run / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    with pytest.raises(UserMistake, match=r"rank-00000\.safetensors is damaged"):
        api.export(run, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_fine_tuned_model_keeps_its_own_config_and_tokenizer(instructions, tmp_path):
    start = tmp_path / "start"
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 260}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, attn_pdrop=0.3, summary_first_dropout=0.7)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(start)
    load_tokenizer("bytes").save(start)
    changes = config_of(instructions, "gpt2", "single", model={"from": str(start)}, train__steps=1)
    folder = api.export(train_again_on(1, changes, tmp_path / "runs"), tmp_path / "model")
    before, after = (json.loads((path / "config.json").read_text()) for path in (start, folder))
    assert before["dtype"] == "bfloat16"
    assert after == {**before, "dtype": "float32"}
    assert (folder / "tokenizer.json").read_text() == (start / "tokenizer.json").read_text()
    load_plainly(folder)


@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v3", "gpt_oss"),
        *map(slow, ("mixtral", "hrm_text")),
        *map(slow, ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2")),  # with the operations of mixtral
    ],
)
def test_tensors_with_another_layout_in_files_are_exported_in_that_layout(family, instructions, tmp_path):
    """Experts are separate tensors; HRM's query, key and value are fused, and so in one shard of any size limit."""
    start = tmp_path / "start"
    sizes = {"vocab_size": 260, "max_position_embeddings": 256, "num_key_value_heads": 4}
    plain(mixture_config(family, **sizes)).save_pretrained(start)
    changes = {"model": {"from": str(start), "tokenizer": "bytes"}, "train__steps": 1}
    run = train_again_on(2, config_of(instructions, "llama tied", "fsdp", **changes), tmp_path / "runs")
    expected, before = weights(run), AutoModelForCausalLM.from_pretrained(start)
    matrices = [name for name, parameter in before.named_parameters() if parameter.dim() >= 2]
    assert not any(torch.equal(expected[name], before.get_parameter(name)) for name in matrices)
    whole, several = api.export(run, tmp_path / "whole"), export_hf(run, tmp_path / "several", shard_bytes=1)
    for folder in (whole, several):
        assert stored_names(folder) == stored_names(start)
        plain_model = load_plainly(folder)
        found = {**dict(plain_model.named_parameters()), **kept_buffers(plain_model)}
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("shape", ["llama tied", "llama untied", "pythia"])
def test_a_run_becomes_a_litgpt_checkpoint_and_back_bit_for_bit(shape, trained, tmp_path):
    run = trained(shape, "single", 1)
    written = api.export(run, tmp_path / "lit", to="litgpt")
    assert {"lit_model.pth", "model_config.yaml", "tokenizer.json"} <= {file.name for file in written.iterdir()}
    # Without the config.json that lies beside it: the sizes are those of LitGPT's own config.
    (written / "config.json").unlink()
    api.import_checkpoint(written, tmp_path / "back")
    api.export(run, tmp_path / "hf")
    before, after = (load_plainly(tmp_path / name) for name in ("hf", "back"))
    expected = dict(before.named_parameters())
    assert expected.keys() == dict(after.named_parameters()).keys()
    assert [name for name, one in after.named_parameters() if not torch.equal(one, expected[name])] == []
    assert torch.equal(before(IDS).logits, after(IDS).logits)


def test_what_litgpt_has_no_format_for_is_refused(trained, tmp_path):
    with pytest.raises(UserMistake, match="is a gpt2, and LitGPT's format is written for llama, mistral"):
        api.export(trained("gpt2", "single", 1), tmp_path / "lit", to="litgpt")
    with pytest.raises(UserMistake, match="--adapter is for PEFT"):
        api.export(trained("gpt2", "single", 1), tmp_path / "lit", to="litgpt", adapter=True)
    assert not list(tmp_path.glob("lit*"))

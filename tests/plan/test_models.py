"""The shape that a config names: from the catalogue, from a folder's config.json, from the local cache."""

import json
from pathlib import Path

import pytest

from shoal.catalogue.gpus import find_gpu
from shoal.catalogue.shapes import NAMED, parameters
from shoal.config.schema import HardwareConfig, ModelConfig
from shoal.mistakes import UserMistake
from shoal.plan.machine import read_machine, usual_network
from shoal.plan.models import has_dropout, read_shape, shape_from_settings
from tests.plan.planning import plan

LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "head_dim": 64,
}  # fmt: skip


def write(folder: Path, settings: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_a_folders_config_is_read_without_transformers(tmp_path: Path):
    shape = read_shape(ModelConfig(from_=str(write(tmp_path / "model", LLAMA))))
    assert parameters(shape) == parameters(NAMED["llama3.2-1b"])
    assert shape.kv_heads == 8


def test_a_cached_model_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    write(tmp_path / "models--some--model" / "snapshots" / "0123", LLAMA)
    assert read_shape(ModelConfig(from_="some/model")).hidden == 2048


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3.3-70b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("google/gemma-2-9b-it", "gemma2-9b"),
        ("google/gemma-3-27b-pt", "gemma3-27b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi3-mini"),
        ("microsoft/phi-4", "phi4"),
        ("allenai/OLMo-2-1124-7B", "olmo2-7b"),
        ("HuggingFaceTB/SmolLM3-3B-Base", "smollm3-3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("meta-llama/Llama-3.2-1B", "llama3.2-1b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("EleutherAI/pythia-1b", "pythia-1b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
    ],
)
def test_a_well_known_model_that_is_not_cached_is_recognized_by_its_name(name, shape, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert read_shape(ModelConfig(from_=name)) == NAMED[shape]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], "must be a JSON object"),
        ({"model_type": "llama"}, "has no hidden_size"),
        ({**LLAMA, "num_attention_heads": 7, "head_dim": None}, "not divisible by 7 heads"),
        ({**LLAMA, "num_key_value_heads": 5}, "not a multiple of 5"),
        ({**LLAMA, "num_local_experts": "eight"}, "does not state the sizes of its experts"),
        ({**LLAMA, "kv_lora_rank": 512}, "of its attention as integers"),
    ],
)
def test_an_invalid_config_is_one_sentence(settings, says, tmp_path: Path):
    with pytest.raises(UserMistake, match=says):
        read_shape(ModelConfig(from_=str(write(tmp_path / "model", settings))))


def test_gpt2_size_names_are_read():
    settings = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "vocab_size": 50257,
        "n_positions": 1024,
    }
    assert parameters(shape_from_settings(settings)) == parameters(NAMED["gpt2"])


def test_distilbert_size_names_are_read():
    sizes = {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "vocab_size": 30522}
    shape = shape_from_settings({"model_type": "distilbert", "max_position_embeddings": 512, **sizes})
    assert (shape.family, shape.hidden, shape.layers, shape.heads, shape.ffn) == ("distilbert", 768, 6, 12, 3072)


SMALL = "model.shape={family: llama, hidden: 96, heads: 4, ffn: 160, vocab: 260}"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("model.shape=gpt2", "adapter={kind: lora, dora: true}"), "store their matrices transposed"),
        ((SMALL, "adapter=qlora"), "have no linear layers whose input size is a multiple of 64"),
        ((SMALL, "adapter={kind: lora, rank: 100}"), "adapter.rank 100 is larger than a matrix that it adapts; use at"),
    ],
)
def test_an_adapter_that_training_refuses_is_refused(overrides, says):
    with pytest.raises(UserMistake, match=says):
        plan(*overrides, "data.max_length=512", "train.global_batch=8")


@pytest.mark.parametrize(
    ("kind", "overrides", "says"),
    [
        ("jamba", ("data.pack=true",), "data.pack is true, but jamba cannot keep documents apart"),
        ("jamba", ("train.objective=dpo",), "dpo needs to know the documents of a sequence, but jamba cannot keep"),
        ("llama", ("data.max_length=4096",), "data.max_length 4096 exceeds the 1024 positions"),
    ],
)
def test_what_training_refuses_of_a_model_is_said_after_its_forecast(kind, overrides, says, tmp_path: Path):
    folder = write(tmp_path / "model", {**LLAMA, "model_type": kind, "max_position_embeddings": 1024})
    common = (f"model.from={folder}", "data.path=some.jsonl", "data.max_length=512", "hardware.gpu=a100-80gb")
    notes = plan(*common, *overrides).notes
    assert [note for note in notes if note.startswith("shoal train does not accept this: ") and says in note]
    assert not [note for note in plan(*common).notes if "does not accept" in note]


def test_the_dropout_of_a_model_is_read(tmp_path: Path):
    dropping = write(tmp_path / "drops", {**LLAMA, "resid_pdrop": 0.1})
    assert has_dropout(ModelConfig(from_=str(dropping)))
    assert not has_dropout(ModelConfig(shape="gpt2"))


def test_added_tokens_widen_the_vocabulary():
    assert read_shape(ModelConfig(shape="gpt2", add_tokens=("<a>", "<b>"))).vocab == 50259
    # One that the head's kernels like stays so: a multiple of 64.
    assert read_shape(ModelConfig(shape="llama3-8b", add_tokens=("<a>", "<b>"))).vocab == 128320


def test_local_gpus_are_read_from_the_driver(tmp_path: Path):
    for index in range(4):
        card = tmp_path / f"0000:0{index}:00.0"
        card.mkdir()
        (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 123\n")
    machine = read_machine(HardwareConfig(), driver=tmp_path)
    assert (machine.gpu.name, machine.devices, machine.link.name) == ("h200", 4, "nvlink4")
    assert not machine.notes
    # Named hardware is not detected.
    assert read_machine(HardwareConfig(gpu="t4"), driver=tmp_path).devices == 1


def test_an_unknown_device_is_noted(tmp_path: Path):
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "information").write_text("Model: NVIDIA GeForce GTX 970\n")
    machine = read_machine(HardwareConfig(), driver=tmp_path)
    assert machine.is_cpu
    assert "GTX 970" in machine.notes[0]


@pytest.mark.parametrize(
    ("gpu", "network"),
    [
        *(("h100-80gb", "infiniband-ndr"), ("a100-80gb", "infiniband-hdr"), ("v100-32gb", "infiniband-edr")),
        *(("l40s", "ethernet-25"), ("cpu", "ethernet-10")),
    ],
)
def test_devices_have_their_usual_network(gpu, network):
    assert usual_network(find_gpu(gpu)) == network


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("parallel.sharding=hybrid_shard parallel.strategy=fsdp", "on one machine hybrid_shard equals full_shard"),
        (
            "parallel.pp=4 train.global_batch=2 train.micro_batch=1",
            "with 1 micro-batch per step leaves each device idle",
        ),
        ("train.recompute=cheap train.compile=false", "train.recompute cheap has no effect"),
        (
            "parallel.reshard=false parallel.strategy=ddp",
            "parallel.reshard false has no effect: parallel.strategy is ddp",
        ),
    ],
)
def test_a_setting_without_the_effect_that_it_promises_is_said_before_the_run(setting, says):
    common = ("model.shape=llama3.2-1b", "hardware.gpu=h100-80gb", "hardware.devices=8", "hardware.price=2")
    assert [note for note in plan(*common, *setting.split()).notes if says in note]
    assert not plan(*common).notes


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "gemma3", "vision_config": {}, "text_config": {"hidden_size": 2560, "intermediate_size": 10_240,
         "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}},
        {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256_000},
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151_936, "tie_word_embeddings": True},
    ],
    ids=lambda settings: settings["model_type"],
)  # fmt: skip
def test_what_a_config_leaves_out_is_what_transformers_takes(settings, tmp_path: Path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(settings))
    whole = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert shape_from_settings(settings) == shape_from_settings(whole)


def test_the_modules_of_a_multimodal_model_that_are_not_forecast_are_named(tmp_path: Path):
    text = {"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 2}
    settings = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    notes = plan(f"model.from={tmp_path}", "hardware.gpu=h100-80gb").notes
    assert f"Only the text model is forecast; the vision modules of {tmp_path} are not." in notes

"""Imports: checkpoints of other programs load in plain transformers and in shoal, and no file can run code."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shoal.convert.imports import import_hf
from shoal.mistakes import UserMistake
from tests.convert.imported import Weights, holds, model_of, rounded, save_config
from tests.models.small import HIDDEN, VOCAB, mixture_config, plain


def wrapped(weights: Weights) -> Weights:
    return {f"module._fsdp_wrapped_module.{name}": one for name, one in weights.items()}


def wrapped_inside(weights: Weights) -> Weights:
    return {
        f"_orig_mod.{name}".replace("layers.1.", "layers.1._checkpoint_wrapped_module."): one
        for name, one in weights.items()
    }


@pytest.mark.parametrize(
    "saved",
    [
        lambda weights: weights,
        lambda weights: {"model": wrapped(weights), "optimizer": {"state": {}}, "step": torch.tensor(3)},
        lambda weights: {"state_dict": wrapped_inside(weights), "epoch": 1},
        lambda weights: {"model_state_dict": weights, "args": {"lr": 0.1}},
        lambda weights: {
            "module": {f"module.{name}": one for name, one in weights.items()},
            "param_shapes": [{name: one.shape for name, one in weights.items()}],
        },
    ],
    ids=["bare", "model", "state_dict", "model_state_dict", "module"],
)
@pytest.mark.parametrize("family", ["llama", "neox"])
def test_a_state_dict_is_found_and_its_wrappers_are_not(family, saved, tmp_path):
    model = model_of(family)
    extra = {"model.layers.0.rotary_emb.inv_freq": torch.ones(4), "lm_head._extra_state": torch.ones(1)}
    torch.save(saved(model.state_dict() | extra), tmp_path / "full.pt")
    imported = import_hf(tmp_path / "full.pt", tmp_path / "out", model=str(save_config(model, tmp_path / "config")))
    holds(tmp_path / "out", model)
    assert imported.tensors == len(list(model.parameters()))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "config" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("form", ["in memory", "in files"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_may_be_saved_together_or_one_by_one(form, family, tmp_path):
    model = plain(mixture_config(family))
    weights: Weights = model.state_dict()
    if form == "in files":
        model.save_pretrained(tmp_path / "plain")
        with safe_open(tmp_path / "plain" / "model.safetensors", framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    torch.save(weights, tmp_path / "full.pt")
    import_hf(
        tmp_path / "full.pt", tmp_path / "out", model=str(save_config(model, tmp_path / "config")), shard_bytes=9999
    )
    holds(tmp_path / "out", model)


def write_deepspeed(folder: Path, state: dict[str, Any], tag: str = "global_step7") -> Path:
    (folder / tag).mkdir(parents=True)
    (folder / "latest").write_text(f"{tag}\n")
    torch.save({"module": state, "ds_version": "0.19"}, folder / tag / "mp_rank_00_model_states.pt")
    return folder


def test_a_deepspeed_folder_gives_the_checkpoint_that_latest_names(tmp_path):
    model, other = model_of("llama"), model_of("llama")
    source = write_deepspeed(tmp_path / "run", other.state_dict(), "global_step3")
    write_deepspeed(source, rounded(model).state_dict())
    (source / "global_step7" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"not looked at")
    save_config(model, source)  # as Hugging Face's trainer leaves it; no --model is needed then
    said: list[str] = []
    assert import_hf(source, tmp_path / "out", report=said.append).format == "DeepSpeed"
    assert any("fp32 master weights" in line for line in said)
    holds(tmp_path / "out", model)


def test_weights_in_several_bin_files_are_merged(tmp_path):
    model = model_of("llama")
    source = save_config(model, tmp_path / "full")
    table = {}
    for index, (name, tensor) in enumerate(model.state_dict().items()):
        table[name] = f"pytorch_model-{index:05d}.bin"
        torch.save({name: tensor}, source / table[name])
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    import_hf(source, tmp_path / "out")
    holds(tmp_path / "out", model)
    (source / table["lm_head.weight"]).unlink()
    with pytest.raises(UserMistake, match="which is not a file in that folder"):
        import_hf(source, tmp_path / "again")


def empty_parameters(folder: Path, weights: Weights) -> Path:
    torch.save({"module": {name: torch.empty(0) for name in weights}}, folder / "states.pt")
    return folder / "states.pt"


def zero3(folder: Path, weights: Weights) -> Path:
    source = write_deepspeed(folder / "run", {})
    checkpoint = source / "global_step7"
    (checkpoint / "mp_rank_00_model_states.pt").rename(checkpoint / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return source


def tensor_parallel(folder: Path, weights: Weights) -> Path:
    source = write_deepspeed(folder / "run", weights)
    (source / "global_step7" / "mp_rank_01_model_states.pt").write_bytes(b"")
    return source


def pipeline(folder: Path, weights: Weights) -> Path:
    torch.save({"module": None}, folder / "mp_rank_00_model_states.pt")
    return folder / "mp_rank_00_model_states.pt"


def sharded(folder: Path, weights: Weights) -> Path:
    (folder / "shards").mkdir()
    (folder / "shards" / "__0_0.distcp").write_bytes(b"")
    return folder / "shards"


def astray(folder: Path, weights: Weights) -> Path:
    source = write_deepspeed(folder / "run", weights)
    (source / "latest").write_text("../elsewhere")
    return source


def saved_as(value: Callable[[Weights], Any]) -> Callable[[Path, Weights], Path]:
    def write(folder: Path, weights: Weights) -> Path:
        torch.save(value(weights), folder / "full.pt")
        return folder / "full.pt"

    return write


def without(weights: Weights, *names: str) -> Weights:
    return {name: one for name, one in weights.items() if name not in names}


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (zero3, r"holds no optim_states\.pt, in which ZeRO 3 has the weights"),
        (empty_parameters, r"states\.pt belongs to a ZeRO-3 checkpoint"),
        (tensor_parallel, "split by tensor parallelism over 2 files"),
        (pipeline, "its module is None"),
        (sharded, r"no \.metadata, their index"),
        (astray, r"latest names '\.\./elsewhere', which is not a folder"),
        (lambda folder, weights: folder / "nothing", "nothing does not exist"),
        (saved_as(lambda weights: without(weights, "lm_head.weight", "model.norm.weight")), "no .* and 1 more, which"),
        (saved_as(lambda weights: weights | {"score.weight": torch.ones(2)}), r"holds score\.weight, which Llama"),
        (
            saved_as(lambda weights: weights | {"lm_head.weight": torch.ones(VOCAB + 1, HIDDEN)}),
            rf"lm_head\.weight with another shape than the config's: \({VOCAB + 1}, {HIDDEN}\), not \({VOCAB}, ",
        ),
        (saved_as(lambda weights: {name: one.to(torch.int8) for name, one in weights.items()}), "quantized weights"),
        (saved_as(lambda weights: weights | {"module.lm_head.weight": torch.ones(1)}), r"holds lm_head\.weight twice"),
        (saved_as(lambda weights: weights | {"name": "mine"}), "holds name as str, not as a tensor"),
        (saved_as(lambda weights: list(weights.values())), "holds a list, not a state dict"),
        (saved_as(lambda weights: {"optimizer": {"state": {}}}), "holds no state dict: .* but optimizer"),
    ],
)
def test_anything_but_a_complete_model_is_refused_with_the_reason(write, sentence, tmp_path):
    model = model_of("llama")
    source = write(tmp_path, model.state_dict())
    with pytest.raises(UserMistake, match=sentence) as refused:
        import_hf(source, tmp_path / "out", model=str(save_config(model, tmp_path / "config")))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("out*"))


def test_the_config_must_be_given_if_there_is_none_next_to_the_weights(tmp_path):
    torch.save(model_of("llama").state_dict(), tmp_path / "full.pt")
    with pytest.raises(UserMistake, match="give --model, a folder with that model's config"):
        import_hf(tmp_path / "full.pt", tmp_path / "out")


def test_a_tied_head_may_be_there_or_not_but_not_be_another(tmp_path):
    model = model_of("llama", tied=True)
    config = str(save_config(model, tmp_path / "config"))
    weights = model.state_dict()
    for index, dropped in enumerate(["", "lm_head.weight", "model.embed_tokens.weight"]):
        torch.save(without(weights, dropped), tmp_path / f"{index}.pt")
        import_hf(tmp_path / f"{index}.pt", tmp_path / f"out{index}", model=config)
        holds(tmp_path / f"out{index}", model)
    torch.save(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, tmp_path / "other.pt")
    with pytest.raises(UserMistake, match=r"holds a lm_head\.weight that differs from model\.embed_tokens\.weight"):
        import_hf(tmp_path / "other.pt", tmp_path / "out", model=config)


class Touch:
    """Creates a folder when it is unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("way", ["zip", "legacy", "bare pickle", "protocol 5"])
def test_code_in_a_pickle_is_not_run(way, tmp_path):
    trap, file = tmp_path / "trapped", tmp_path / "full.pt"
    value = {"model.norm.weight": torch.ones(3), "more": Touch(trap)}
    if way == "bare pickle":
        file.write_bytes(pickle.dumps(Touch(trap), protocol=2))
    else:
        options = {"pickle_protocol": 5} if way == "protocol 5" else {}
        torch.save(value, file, _use_new_zipfile_serialization=way != "legacy", **options)
    with pytest.raises(UserMistake) as refused:
        import_hf(file, tmp_path / "out", model=str(save_config(model_of("llama"), tmp_path / "config")))
    expected = "protocol 4 or newer" if way == "protocol 5" else "loading it would run posix.mkdir"
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not trap.exists()
    torch.load(file, weights_only=False) if way == "zip" else pickle.loads(pickle.dumps(Touch(trap)))
    assert trap.exists()  # the trap works, so the assertion above means something


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda contents: contents[: len(contents) // 2], "is truncated"),
        (lambda contents: contents[:-30], "is truncated"),
        (lambda contents: contents[:20_000] + bytes([contents[20_000] ^ 1]) + contents[20_001:], "is damaged.*CRC"),
        (lambda contents: b"", "is damaged, or was not written by torch.save"),
        (lambda contents: b"weights, I swear", "is damaged"),
        (lambda contents: contents.replace(b"ctorch._utils\n", b"ctorch._futils\n"), "full.pt"),
    ],
)
def test_a_damaged_file_is_a_mistake_of_one_sentence(damage, sentence, tmp_path):
    model = model_of("llama")
    torch.save(model.state_dict(), tmp_path / "full.pt")
    (tmp_path / "full.pt").write_bytes(damage((tmp_path / "full.pt").read_bytes()))
    with pytest.raises(UserMistake, match=sentence) as refused:
        import_hf(tmp_path / "full.pt", tmp_path / "out", model=str(save_config(model, tmp_path / "config")))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("out*"))


def test_files_are_no_larger_than_they_may_be_and_hold_the_asked_for_dtype(tmp_path):
    model = model_of("llama")
    torch.save(model.state_dict(), tmp_path / "full.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "model.safetensors").write_text("half")
    config = str(save_config(model, tmp_path / "config"))
    import_hf(tmp_path / "full.pt", tmp_path / "out", model=config, dtype="bf16", shard_bytes=20_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 21_000 for file in files)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    holds(tmp_path / "out", rounded(model))
    assert not (tmp_path / "out.part").exists()


def test_a_folder_that_is_not_empty_is_never_written_to(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserMistake, match="already exists and is not empty"):
        import_hf(tmp_path / "full.pt", tmp_path / "out")

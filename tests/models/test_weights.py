"""Materializing a model: bitwise what transformers loads, or the values of the seed whatever the sharding."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from shoal import api
from shoal.config.mesh import Mesh
from shoal.launch.join import joined
from shoal.mistakes import UserMistake
from shoal.models.anatomy import read_anatomy
from shoal.models.prepare import blueprint, prepare_model
from shoal.models.tensor_slices import local_tensor
from shoal.models.weights import Weights, materialize
from tests.harness import parallelized, run_ranks, slow
from tests.models.small import CPU, FAMILIES, HIDDEN, drawn, loaded, on_meta, plain, small_config, tokens


def llama3_scaled() -> Any:
    settings = small_config("llama")
    settings.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    return settings


SAVED = {
    "llama tied": lambda: small_config("llama"),
    "llama untied": lambda: small_config("llama", tied=False),
    "llama with rope scaling": llama3_scaled,
    "qwen3": lambda: small_config("qwen3"),
    "neox": lambda: small_config("neox", tied=False),
    "gpt2": lambda: small_config("gpt2"),
    "bert": lambda: small_config("bert"),
}


def hold_like_plain(folder: Path) -> None:
    """Loaded by shoal and by transformers: bitwise the same parameters, buffers and logits."""
    found, expected = loaded(folder).eval(), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert not any(tensor.is_meta for tensor in (*found.parameters(), *found.buffers()))
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(found, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    with torch.no_grad():
        # The attention implementation of transformers: this is about weights.
        found.set_attn_implementation(expected.config._attn_implementation)
        assert torch.equal(found(input_ids=tokens()).logits, expected(input_ids=tokens()).logits)


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_is_loaded_as_transformers_loads_it(name, tmp_path):
    plain(SAVED[name]()).save_pretrained(tmp_path)
    hold_like_plain(tmp_path)


@pytest.mark.parametrize("name", ["llama tied", "neox"])
def test_a_model_saved_in_several_files_is_loaded_completely(name, tmp_path):
    plain(SAVED[name]()).save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    hold_like_plain(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama tied"])
def test_a_model_saved_from_its_bare_backbone_is_loaded_without_the_prefix(name, tmp_path):
    whole = plain(SAVED[name]())
    whole.base_model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["architectures"] = [type(whole).__name__]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert not any(key.startswith(f"{whole.base_model_prefix}.") for key in opened.keys())  # noqa: SIM118
    hold_like_plain(tmp_path)


def test_a_model_saved_in_bf16_is_trained_in_fp32_with_the_same_values(tmp_path):
    saved = plain(small_config("llama")).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    for name, parameter in loaded(tmp_path).named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, saved.get_parameter(name).float())


def test_a_tied_head_stays_the_embedding_itself(tmp_path):
    plain(small_config("llama")).save_pretrained(tmp_path)
    for model in (loaded(tmp_path), drawn(small_config("llama"))):
        assert model.lm_head.weight is model.model.embed_tokens.weight


# Random weights.


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_depend_on_the_seed(family):
    one, same, other = (dict(drawn(small_config(family), seed=seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    matrices = [name for name in one if one[name].dim() >= 2]
    assert [name for name in matrices if torch.equal(one[name], other[name])] == []


def test_random_weights_do_not_depend_on_the_global_generator():
    torch.manual_seed(1)
    one = drawn(small_config("llama"))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    other = drawn(small_config("llama"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state()), "the generator is left unchanged"


def test_blocks_are_initialized_by_name_so_a_deeper_model_has_the_same_first_blocks():
    shallow, deep = small_config("llama"), small_config("llama")
    deep.num_hidden_layers = 3
    one, other = drawn(shallow).model.layers, drawn(deep).model.layers
    for index in range(2):
        assert torch.equal(one[index].mlp.up_proj.weight, other[index].mlp.up_proj.weight)
    assert not torch.equal(other[0].mlp.up_proj.weight, other[2].mlp.up_proj.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_have_the_statistics_of_transformers(family):
    settings = small_config(family, tied=False)
    settings.initializer_range = 0.05
    found, expected = drawn(settings), plain(settings)
    for name, parameter in found.named_parameters():
        like = expected.get_parameter(name)
        if like.dim() < 2:
            assert torch.equal(parameter, like), f"{name}: norms are ones, biases zeros"
            continue
        error = 6 / math.sqrt(2 * parameter.numel())  # six standard errors
        wanted = float(like.detach().std())
        assert float(parameter.detach().std()) == pytest.approx(wanted, rel=2 * error), name
        assert abs(float(parameter.detach().mean())) < 6 * wanted / math.sqrt(parameter.numel()), name
        residual = family == "gpt2" and name.endswith("c_proj.weight")
        factor = 1 / math.sqrt(2 * settings.num_hidden_layers) if residual else 1.0
        assert float(parameter.detach().std()) == pytest.approx(0.05 * factor, rel=error), name


def run_config(model: dict[str, Any]) -> Any:
    return api.config_from_mapping(
        {
            "model": {"tokenizer": "bytes", **model},
            "data": {"path": "unused", "max_length": 32},
            "train": {"precision": "32-true"},
        }
    )


def shards(model: dict[str, Any]) -> list[dict[str, tuple[Any, Any]]]:
    """(local shard, full tensor) of every parameter on this rank, after fully_shard."""
    config = run_config(model)
    with joined(config) as ranks:
        prepared = prepare_model(blueprint(config.model), longest=32)
        mesh = Mesh(dp_shard=ranks.world_size)
        parallel = parallelized(prepared, config, strategy="fsdp", mesh=mesh, ranks=ranks)
        assert all(isinstance(parameter, DTensor) for parameter in parallel.parameters.values())
        assert not any(buffer.is_meta for buffer in prepared.model.buffers())
        # As numpy: a pipe sends tensors by file descriptors, which are closed when the rank exits.
        return {
            name: (local_tensor(parameter).numpy().copy(), parameter.full_tensor().detach().numpy().copy())
            for name, parameter in parallel.parameters.items()
        }


def explicit(family: str, tied: bool) -> dict[str, Any]:
    # Vocabulary and intermediate size are odd, so that shards are uneven.
    sizes = {"hidden": 24, "layers": 2, "heads": 4, "ffn": 33, "vocab": 261, "positions": 64}
    return {"shape": {"family": family, "tied": tied, **sizes}}


@pytest.mark.parametrize(
    ("family", "tied", "world_size"),
    [
        *(("llama", True, 2), ("neox", False, 2)),
        *(slow("llama", True, 4), slow("neox", False, 4), slow("gpt2", True, 2), slow("gpt2", True, 4)),
    ],
)
def test_random_weights_are_the_same_however_they_are_sharded(family, tied, world_size):
    config = run_config(explicit(family, tied))
    alone = prepare_model(blueprint(config.model), longest=32).model
    materialize(alone, read_anatomy(alone), device=CPU, dtype=torch.float32, source=Weights(None, config.seed))
    expected = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    answers = run_ranks(world_size, lambda: shards(explicit(family, tied)))
    for answer in answers:
        assert answer.keys() == expected.keys()
        assert [n for n in expected if not torch.equal(torch.from_numpy(answer[n][1]), expected[n])] == []
    # Each rank allocates its own rows only.
    for name, parameter in expected.items():
        rows = [len(answer[name][0]) for answer in answers]
        most = -(-len(parameter) // world_size)
        assert sum(rows) == len(parameter)
        assert max(rows) == most, name
        assert torch.equal(torch.cat([torch.from_numpy(answer[name][0]) for answer in answers]), parameter)


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_ranks_read_their_own_slices_of_a_saved_model(world_size, tmp_path):
    saved = plain(small_config("gpt2"))
    saved.save_pretrained(tmp_path, max_shard_size="12KB")
    for answer in run_ranks(world_size, lambda: shards({"from": str(tmp_path)})):
        for name, (local, whole) in answer.items():
            assert torch.equal(torch.from_numpy(whole), saved.get_parameter(name)), name
            assert local.size < whole.size


def test_a_rank_has_memory_for_its_own_shard_and_no_more():
    def held_and_whole() -> tuple[int, int]:
        config = run_config(explicit("llama", True))
        with joined(config) as ranks:
            prepared = prepare_model(blueprint(config.model), longest=32)
            mesh = Mesh(dp_shard=ranks.world_size)
            parallel = parallelized(prepared, config, strategy="fsdp", mesh=mesh, ranks=ranks, values=False)
        parameters = parallel.parameters.values()
        # The storage, not the shape: a shard that is a view would keep the full tensor alive.
        held = sum(local_tensor(parameter).untyped_storage().nbytes() for parameter in parameters)
        return held, sum(4 * parameter.numel() for parameter in parameters)

    for held, whole in run_ranks(4, held_and_whole):
        assert held < 0.3 * whole


# Folders that cannot be loaded.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plain(small_config("llama")).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, change: Any) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_a_mistake_that_names_it(folder):
    rewrite(folder, lambda held: held.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserMistake, match=r"holds no tensor model\.layers\.1\.mlp\.up_proj\.weight, which Llama"):
        loaded(folder)


def test_several_missing_tensors_are_counted(folder):
    rewrite(folder, lambda held: [held.pop(name) for name in list(held) if "mlp" in name])
    with pytest.raises(UserMistake, match=r"model\.layers\.0\.mlp\.gate_proj\.weight and 5 more"):
        loaded(folder)


def test_a_wrong_shape_is_a_mistake_with_both_shapes(folder):
    rewrite(folder, lambda held: held.update({"model.norm.weight": torch.ones(HIDDEN + 1)}))
    with pytest.raises(UserMistake, match=r"model\.norm\.weight with shape \(33,\).*makes it \(32,\)"):
        loaded(folder)


def test_a_folder_with_only_pickles_is_refused(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserMistake, match=r"pytorch_model\.bin is a pickle, which shoal does not read"):
        loaded(folder)


def test_a_folder_without_weights_is_a_mistake(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserMistake, match=r"holds no model\.safetensors; save it with save_pretrained"):
        loaded(folder)


@pytest.mark.parametrize("damage", [b"", b"not safetensors at all", None])
def test_a_damaged_file_is_a_mistake(folder, damage):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-200] if damage is None else damage)
    with pytest.raises(UserMistake, match=r"model\.safetensors is damaged"):
        loaded(folder)


def into_several(folder: Path) -> Path:
    """The same model in several files; returns the index."""
    shutil.rmtree(folder)
    plain(small_config("llama")).save_pretrained(folder, max_shard_size="12KB")
    return folder / "model.safetensors.index.json"


def test_a_damaged_file_of_several_is_a_mistake(folder):
    into_several(folder)
    file = sorted(folder.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(UserMistake, match=f"{file.name} is damaged"):
        loaded(folder)


@pytest.mark.parametrize("outside", ["../elsewhere.safetensors", "/elsewhere.safetensors", "..", "absent.safetensors"])
def test_an_index_that_points_outside_its_folder_is_refused(folder, outside):
    index = into_several(folder)
    (folder.parent / "elsewhere.safetensors").write_bytes((sorted(folder.glob("model-*"))[0]).read_bytes())
    table = json.loads(index.read_text())
    wanted = str(folder.parent) + outside if outside.startswith("/") else outside
    table["weight_map"] = dict.fromkeys(table["weight_map"], wanted)
    index.write_text(json.dumps(table))
    with pytest.raises(UserMistake, match="which is not a file of that folder"):
        loaded(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_an_invalid_index_is_a_mistake(folder, text):
    into_several(folder).write_text(text)
    with pytest.raises(UserMistake, match="is not a safetensors index"):
        loaded(folder)


def test_a_buffer_that_cannot_be_recomputed_is_a_mistake():
    model = on_meta(small_config("llama"))
    model.model.register_buffer("secret", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(UserMistake, match=r"cannot recompute the buffer model\.secret of LlamaForCausalLM"):
        materialize(model, read_anatomy(model), device=CPU, dtype=torch.float32, source=Weights(None, 0))

"""LitGPT imports: the model computes in transformers what it computes in LitGPT, or is refused with the reason.

The files are built here from a transformers model, head by head, independently of shoal's code for their layout.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from shoal import api
from shoal.convert.imports import import_hf
from shoal.convert.litgpt_export import litgpt_tensors, model_config
from shoal.data.tokenizer import load_tokenizer
from shoal.mistakes import UserMistake
from tests.convert.imported import Weights, holds, model_of, save_config
from tests.launch.command import forked_shoal
from tests.models.small import FFN, HIDDEN, LAYERS, POSITIONS, VOCAB, tokens

HEADS, SIZE = 4, 8
GATED = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.proj": "self_attn.o_proj",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
    "attn.norm_q": "self_attn.q_norm",
    "attn.norm_k": "self_attn.k_norm",
}
NEOX = {
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.proj": "attention.dense",
    "mlp.fc": "mlp.dense_h_to_4h",
    "mlp.proj": "mlp.dense_4h_to_h",
}


def by_head(weights: Weights, block: str, kind: str, neox: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The rows of each query, key and value head of a transformers model."""
    if neox:
        rows = weights[f"{block}attention.query_key_value.{kind}"].split(SIZE)
        return list(rows[0::3]), list(rows[1::3]), list(rows[2::3])
    query, key, value = (list(weights[f"{block}self_attn.{one}_proj.{kind}"].split(SIZE)) for one in "qkv")
    return query, key, value


def as_litgpt(model: Any, *, old: bool) -> Weights:
    """The weights in LitGPT's layout; `old`: that of versions before 0.5.5."""
    weights, neox = model.state_dict(), model.config.model_type == "gpt_neox"
    core, embedding, norm = ("gpt_neox", "embed_in", "final_layer_norm") if neox else ("model", "embed_tokens", "norm")
    found = {
        "transformer.wte.weight": weights[f"{core}.{embedding}.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    for kind in ("weight", "bias"):
        if f"{core}.{norm}.{kind}" in weights:
            found[f"transformer.ln_f.{kind}"] = weights[f"{core}.{norm}.{kind}"]
        for layer in range(LAYERS):
            block, theirs = f"{core}.layers.{layer}.", f"transformer.h.{layer}."
            for name, other in (NEOX if neox else GATED).items():
                if f"{block}{other}.{kind}" in weights:
                    found[f"{theirs}{name}.{kind}"] = weights[f"{block}{other}.{kind}"]
            fused = "attention.query_key_value" if neox else "self_attn.q_proj"
            if f"{block}{fused}.{kind}" not in weights:
                continue
            query, key, value = by_head(weights, block, kind, neox)
            share = len(query) // len(key)
            order: list[Tensor] = []
            if old:
                for group in range(len(key)):
                    order += [*query[group * share : (group + 1) * share], key[group], value[group]]
            else:
                order = [*query, *key, *value]
            found[f"{theirs}attn.{'attn' if old else 'qkv'}.{kind}"] = torch.cat(order)
    return found


LITGPT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window_size": 5},
    "qwen2": {"attn_bias": True, "norm_eps": 1e-6, "rope_base": 1_000_000},
    "qwen3": {"norm_qk": True, "norm_eps": 1e-6, "rope_base": 1_000_000},
    "neox": {
        "norm_class_name": "LayerNorm",
        "mlp_class_name": "GptNeoxMLP",
        "parallel_residual": True,
        "bias": True,
        "rotary_percentage": 0.25,
        "n_query_groups": HEADS,
    },
}


def write_litgpt(folder: Path, model: Any, family: str, *, old: bool = False, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    said = {
        "name": "tiny",
        "hf_config": {"org": "shoal", "name": "tiny"},
        "n_layer": LAYERS,
        "n_embd": HIDDEN,
        "n_head": HEADS,
        "n_query_groups": 2,
        "head_size": SIZE,
        "intermediate_size": FFN,
        "block_size": POSITIONS,
        "vocab_size": VOCAB - 3,
        "padded_vocab_size": VOCAB,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
        "parallel_residual": False,
        "bias": False,
        "norm_eps": 1e-5,
        "rotary_percentage": 1.0,
        "rope_base": 10_000,
        "rope_condense_ratio": 1,
        "n_expert": 0,
        **LITGPT[family],
        **changes,
    }
    (folder / "model_config.yaml").write_text(yaml.safe_dump(said))
    torch.save({"model": as_litgpt(model, old=old)}, folder / "lit_model.pth")
    return folder


@pytest.mark.parametrize("old", [False, True], ids=["qkv", "attn"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", LITGPT)
def test_a_litgpt_model_computes_the_same_in_transformers(family, tied, old, tmp_path):
    model = model_of(family, tied=tied, **({"sliding_window": 5} if family == "mistral" else {}))
    source = write_litgpt(tmp_path / "lit", model, family, old=old)
    imported = api.import_checkpoint(source, tmp_path / "out")
    assert (imported.format, imported.architecture) == ("LitGPT", type(model).__name__)
    assert imported.parameters == sum(parameter.numel() for parameter in model.parameters())
    holds(tmp_path / "out", model)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["architectures"], said["dtype"]) == ([type(model).__name__], "float32")
    assert said["tie_word_embeddings"] is tied


@pytest.mark.parametrize("family", LITGPT)
def test_litgpts_layout_is_written_as_it_is_read(family):
    model = model_of(family, **({"sliding_window": 5} if family == "mistral" else {}))
    expected = as_litgpt(model, old=False)
    named = {
        name.replace("lm_head.", "embed_out.") if family == "neox" else name: one
        for name, one in model.state_dict().items()
    }
    found = litgpt_tensors(named, model.config)
    assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []
    said = model_config(model.config, "tiny")
    wanted = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "padded_vocab_size": VOCAB, **LITGPT[family]}
    assert {key: said.get(key) for key in wanted} == wanted


@pytest.mark.parametrize("family", ["llama", "qwen3", "neox"])
def test_litgpt_itself_computes_the_same_with_what_is_written(family):
    lit = pytest.importorskip("litgpt.model", exc_type=ImportError)
    from litgpt.config import Config

    model = model_of(family)
    theirs = lit.GPT(Config(**model_config(model.config, "tiny"))).eval()
    named = {
        name.replace("lm_head.", "embed_out.") if family == "neox" else name: one
        for name, one in model.state_dict().items()
    }
    theirs.load_state_dict(litgpt_tensors(named, model.config))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens()), model(tokens()).logits, rtol=1e-4, atol=1e-4)


def test_the_file_alone_is_enough_and_so_is_another_description_of_the_model(tmp_path):
    model = model_of("llama")
    source = write_litgpt(tmp_path / "lit", model, "llama", old=True)
    import_hf(source / "lit_model.pth", tmp_path / "file")
    holds(tmp_path / "file", model)
    (source / "model_config.yaml").unlink()
    with pytest.raises(UserMistake, match=r"model_config\.yaml does not exist; give --model"):
        import_hf(source, tmp_path / "out")
    import_hf(source, tmp_path / "described", model=str(save_config(model, tmp_path / "config")))
    holds(tmp_path / "described", model)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_condense_ratio": 4}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_adjustments": {"factor": 8.0}}, {"rope_type": "linear", "factor": 8.0}),
        (
            {
                "rope_adjustments": {
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_seq_len": 32,
                }
            },
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_rope_scaling_is_translated(changes, expected, tmp_path):
    import_hf(write_litgpt(tmp_path / "lit", model_of("llama"), "llama", **changes), tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert expected.items() <= said.items()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mlp_class_name": "LLaMAMoE", "n_expert": 8}, "n_expert: 8"),
        ({"mlp_class_name": "GemmaMLP"}, "mlp_class_name: GemmaMLP"),
        ({"name": "Gemma-2b"}, "name: Gemma-2b"),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name: LayerNorm with mlp_class_name: LLaMAMLP"),
        ({"parallel_residual": True}, "parallel_residual: True with"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0"),
        ({"norm_1": False}, "norm_1: False"),
        ({"rotary_percentage": 0.5}, "rotary_percentage: 0.5 with"),
        ({"rope_adjustments": {"factor": 2.0, "beta_fast": 32, "beta_slow": 1}}, "rope_adjustments: "),
        ({"sliding_window_size": 8, "sliding_window_indices": [1, 0]}, "sliding_window_indices with zeros"),
        ({"a_switch_of_tomorrow": True}, "a_switch_of_tomorrow: True"),
        ({"n_layer": "two"}, "n_layer: two, which must be a positive integer"),
        ({"norm_eps": "little"}, "is not a config that transformers accepts"),
        ({"n_head": 8, "n_query_groups": 4}, "need 128: it belongs to another config"),
    ],
)
def test_a_litgpt_model_that_would_compute_something_else_is_refused_by_name(changes, named, tmp_path):
    source = write_litgpt(tmp_path / "lit", model_of("llama"), "llama", **changes)
    with pytest.raises(UserMistake) as refused:
        import_hf(source, tmp_path / "out")
    assert named in str(refused.value)
    assert not list(tmp_path.glob("out*"))


def test_the_command_says_what_it_made_and_a_mistake_is_status_2(tmp_path):
    source = write_litgpt(tmp_path / "lit", model_of("llama"), "llama")
    load_tokenizer("bytes").save(source)
    done = forked_shoal(tmp_path, "import", str(source), "--output", "out", "--json")
    assert done.status == 0, done.err
    said = json.loads(done.out)
    assert (said["output"], said["format"], said["architecture"]) == ("out", "LitGPT", "LlamaForCausalLM")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    forked_shoal(tmp_path, "import", "nowhere", "--output", "other").hold_mistake(
        "nowhere does not exist; give a config, a script or a checkpoint of another system."
    )

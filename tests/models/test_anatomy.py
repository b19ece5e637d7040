"""Reading a model's structure: the right modules, or an error that names what is missing."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GPTJConfig,
    GraniteConfig,
    LlamaModel,
    PretrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
)

from shoal.mistakes import UserMistake
from shoal.models.anatomy import matmul_parameters, read_anatomy, require_blocks
from tests.models.small import FAMILIES, FFN, HIDDEN, LAYERS, VOCAB, on_meta, small_config

GATED = {"backbone": "model", "blocks": "model.layers", "embedding": "model.embed_tokens", "final_norm": "model.norm"}
PARTS = {
    "llama": {**GATED, "head": "lm_head"},
    "mistral": {**GATED, "head": "lm_head"},
    "qwen2": {**GATED, "head": "lm_head"},
    "qwen3": {**GATED, "head": "lm_head"},
    "neox": {
        "backbone": "gpt_neox",
        "blocks": "gpt_neox.layers",
        "embedding": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
    },
    "gpt2": {
        "backbone": "transformer",
        "blocks": "transformer.h",
        "embedding": "transformer.wte",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    "bert": {
        "backbone": "bert",
        "blocks": "bert.encoder.layer",
        "embedding": "bert.embeddings.word_embeddings",
        "final_norm": None,
        "head": "cls.predictions.decoder",
    },
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_every_family_are_found_where_they_are(family, tied):
    model = on_meta(small_config(family, tied=tied))
    anatomy = read_anatomy(model)
    expected = PARTS[family]
    assert anatomy.blocks == tuple(f"{expected['blocks']}.{index}" for index in range(LAYERS))
    for part in ("backbone", "embedding", "final_norm", "head"):
        assert getattr(anatomy, part) == expected[part], part
    assert anatomy.tied is (tied or family == "bert")
    assert len({type(block) for block in anatomy.block_modules(model)}) == 1
    assert anatomy.block_modules(model)[-1] is model.get_submodule(anatomy.blocks[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_only_a_head_with_layers_of_its_own_needs_the_models_forward(family):
    # BERT's head has a dense layer, a norm and a bias per token between the last block and the logits.
    assert read_anatomy(on_meta(small_config(family))).linear_head is (family != "bert")


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 96}
TRANSFORMED = {
    "gemma2 caps": Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0),
    "cohere scales": CohereConfig(**SMALL, logit_scale=0.0625),
    "granite scales": GraniteConfig(**SMALL, logits_scaling=8.0),
    "recurrent gemma caps": RecurrentGemmaConfig(**SMALL, num_key_value_heads=1, lru_width=32, logits_soft_cap=30.0),
    "falcon-h1 scales": FalconH1Config(
        **SMALL, num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, lm_head_multiplier=0.5
    ),
    "gpt-j adds a bias": GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, vocab_size=96),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_logits_are_never_called_linear(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(TRANSFORMED[name])
    assert not read_anatomy(model).linear_head


def test_a_logit_setting_that_changes_nothing_leaves_the_head_linear():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GraniteConfig(**SMALL, logits_scaling=1.0))
    assert read_anatomy(model).linear_head


QKV = HIDDEN * (HIDDEN + 2 * HIDDEN // 2)  # four heads, two key-value heads
BLOCK = {
    "llama": QKV + HIDDEN * HIDDEN + 3 * HIDDEN * FFN,
    "mistral": QKV + HIDDEN * HIDDEN + 3 * HIDDEN * FFN,
    "qwen2": QKV + HIDDEN * HIDDEN + 3 * HIDDEN * FFN,
    "qwen3": QKV + HIDDEN * HIDDEN + 3 * HIDDEN * FFN,
    "neox": 4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN,
    "gpt2": 4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN,
    "bert": 4 * HIDDEN * HIDDEN + 2 * HIDDEN * FFN,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_matmul_parameters_are_the_blocks_matrices_and_one_head(family, tied):
    model = on_meta(small_config(family, tied=tied))
    found = matmul_parameters(dict(model.named_parameters()), read_anatomy(model))
    assert found == LAYERS * BLOCK[family] + VOCAB * HIDDEN


class Unusual(PreTrainedModel):
    """A language model without some of its parts."""

    config_class = PretrainedConfig
    base_model_prefix = "inner"

    def __init__(self, *, layers: list[nn.Module], embedding: bool = True, head: bool = True) -> None:
        super().__init__(PretrainedConfig(vocab_size=8))
        self.inner = nn.Module()
        if embedding:
            self.inner.embed_tokens = nn.Embedding(8, 4)
        self.inner.layers = nn.ModuleList(layers)
        self.out = nn.Linear(4, 8, bias=False) if head else None

    def get_input_embeddings(self):
        if not hasattr(self.inner, "embed_tokens"):
            raise NotImplementedError("as transformers does where it finds none")
        return self.inner.embed_tokens

    def get_output_embeddings(self):
        return self.out


IDENTICAL = [nn.Linear(4, 4), nn.Linear(4, 4)]


def test_the_unusual_model_is_readable_when_nothing_is_missing():
    assert read_anatomy(Unusual(layers=IDENTICAL)).blocks == ("inner.layers.0", "inner.layers.1")


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"layers": IDENTICAL, "head": False}, "head"),
        ({"layers": IDENTICAL, "embedding": False}, "input embedding"),
        ({"layers": [], "embedding": False, "head": False}, "input embedding and the head"),
    ],
)
def test_a_model_that_cannot_be_read_is_a_mistake_that_names_what_is_missing(options, missing):
    with pytest.raises(UserMistake, match=f"cannot find the {missing} of Unusual"):
        read_anatomy(Unusual(**options))


@pytest.mark.parametrize("layers", [[], [nn.Linear(4, 4), nn.Conv1d(4, 4, 1)]])
def test_a_model_without_identical_blocks_can_be_read_but_not_split(layers):
    model = Unusual(layers=layers)
    anatomy = read_anatomy(model)
    assert anatomy.blocks == ()
    with pytest.raises(UserMistake, match=r"tp needs a model whose blocks are .* in Unusual; use fsdp instead"):
        require_blocks(anatomy, model, "parallel.tp", "use fsdp instead")


def test_a_backbone_without_head_is_a_mistake():
    with torch.device("meta"):
        model = LlamaModel(small_config("llama"))
    with pytest.raises(UserMistake, match="cannot find the head and the backbone of LlamaModel"):
        read_anatomy(model)

"""The further models by name, and the architectures that are read from a config.json alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from shoal import api
from shoal.catalogue.earlier_models import EARLIER
from shoal.catalogue.forecast_families import CODE_FROM_HUB, FORECAST_ONLY
from shoal.catalogue.hub_names import name_of
from shoal.catalogue.shapes import NAMED, parameters
from shoal.mistakes import UserMistake
from shoal.plan.memory.activations import block_kept
from shoal.plan.models import shape_from_settings
from shoal.plan.run.blocks import linears
from tests.catalogue.forecast_only import ALIKE, config_of, counted
from tests.plan.planning import make_run, plan

TOTALS = {
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-125m": 125_226_240,
    "gpt3-350m": 355_871_744,
    "gpt3-760m": 760_300_032,
    "gpt3-1.3b": 1_315_723_264,
    "gpt3-2.7b": 2_651_553_280,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-1.4b": 1_414_647_808,
    "pythia-12b": 11_846_072_320,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "open-llama-3b": 3_426_473_600,
    "codellama-13b": 13_016_028_160,
    "codellama-70b": 68_976_910_336,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "ministral-8b": 8_019_808_256,
    "yi-6b": 6_061_035_520,
    "yi-34b": 34_388_917_248,
    "qwen-1.8b": 1_836_828_672,
    "qwen-7b": 7_721_324_544,
    "qwen-14b": 14_167_290_880,
    "qwen-72b": 72_287_920_128,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "stablelm-3b": 2_795_443_200,
    "starcoder-15b": 15_517_456_384,
    "santacoder": 1_124_886_528,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "internlm2-7b": 7_737_708_544,
    "internlm2-20b": 19_861_149_696,
    "baichuan2-7b": 7_505_973_248,
    "baichuan2-13b": 13_896_668_160,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-llm-67b": 67_425_001_472,
    "deepseek-coder-1.3b": 1_346_471_936,
    "deepseek-coder-6.7b": 6_740_512_768,
    "deepseek-coder-33b": 33_342_991_360,
    "nemotron4-15b": 15_628_775_424,
    "nemotron4-340b": 341_029_195_776,
    "distilbert-base": 66_985_530,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "xlm-roberta-base": 278_295_186,
    "xlm-roberta-large": 560_142_482,
    "esm2-150m": 148_140_154,
    "esm2-650m": 651_043_254,
    "esm2-3b": 2_839_005_634,
}
GROUPED = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 130, "pad_token_id": None,
}  # fmt: skip
PLAIN = {key: value for key, value in GROUPED.items() if key != "num_key_value_heads"}
GPT = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 130}
ESM = {**PLAIN, "pad_token_id": 1, "mask_token_id": 32}
# What the models of one type differ in.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {**PLAIN, "type_vocab_size": 1}),
    ("bloom", {"hidden_size": 64, "n_layer": 4, "n_head": 4, "vocab_size": 130}),
    ("camembert", {**PLAIN, "type_vocab_size": 1}),
    ("cohere", GROUPED),
    ("cohere", {**GROUPED, "use_qk_norm": True, "attention_bias": True}),
    ("distilbert", {"dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 96, "vocab_size": 130}),
    ("electra", {**PLAIN, "embedding_size": 64}),
    ("electra", {**PLAIN, "embedding_size": 32, "type_vocab_size": 1}),
    ("esm", {**ESM, "position_embedding_type": "rotary"}),
    ("esm", {**ESM, "position_embedding_type": "absolute", "emb_layer_norm_before": True}),
    ("falcon", PLAIN),
    ("falcon", {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("falcon", {**PLAIN, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}),
    ("falcon", {**PLAIN, "ffn_hidden_size": 100}),
    ("gemma", {**GROUPED, "head_dim": 32}),
    ("gpt_bigcode", GPT),
    ("gpt_bigcode", {**GPT, "multi_query": False}),
    ("gpt_neo", {
        "hidden_size": 64, "num_layers": 4, "num_heads": 4, "vocab_size": 130,
        "attention_types": [[["global", "local"], 2]],
    }),
    ("gpt_neox", {**PLAIN, "attention_bias": False}),
    ("gptj", {**GPT, "rotary_dim": 8}),
    ("gptj", {**GPT, "rotary_dim": 8, "n_inner": 100}),
    ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    ("opt", {**PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("opt", {**PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("opt", {
        **PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False, "layer_norm_elementwise_affine": False,
    }),
    ("phi", GROUPED),
    ("phi", {**GROUPED, "qk_layernorm": True}),
    ("roberta", PLAIN),
    ("roberta", {**PLAIN, "type_vocab_size": 1}),
    ("stablelm", GROUPED),
    ("stablelm", {**GROUPED, "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    ("xlm-roberta", {**PLAIN, "type_vocab_size": 1}),
]  # fmt: skip
# As on the hub, of models that transformers does not build, with the type that has the same parameters.
FROM_HUB: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    (
        {
            **PLAIN,
            "model_type": "qwen",
            "intermediate_size": 192,
            "kv_channels": 16,
            "no_bias": True,
            "seq_length": 8192,
        },
        "qwen2",
        {**PLAIN, "num_key_value_heads": 4},
    ),
    ({**PLAIN, "model_type": "baichuan", "model_max_length": 4096}, "llama", PLAIN),
    ({**GROUPED, "model_type": "internlm2", "bias": False}, "llama", GROUPED),
    ({**PLAIN, "model_type": "internlm", "bias": True}, "llama", {**PLAIN, "attention_bias": True}),
    ({**PLAIN, "model_type": "internlm", "bias": False}, "llama", PLAIN),
]
HUB_IDS = {
    "EleutherAI/gpt-neox-20b": "gpt-neox-20b",
    "EleutherAI/pythia-1.4b-deduped": "pythia-1.4b",
    "FacebookAI/roberta-large": "roberta-large",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": "smollm2-1.7b",
    "Qwen/Qwen-1_8B-Chat": "qwen-1.8b",
    "Qwen/Qwen2-7B-Instruct": "qwen2-7b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "bigcode/starcoder": "starcoder-15b",
    "bigcode/starcoder2-3b": "starcoder2-3b",
    "bigscience/bloom": "bloom-176b",
    "codellama/CodeLlama-70b-Instruct-hf": "codellama-70b",
    "deepseek-ai/deepseek-llm-7b-base": "deepseek-llm-7b",
    "distilbert-base-uncased": "distilbert-base",
    "facebook/esm2_t33_650M_UR50D": "esm2-650m",
    "facebook/opt-1.3b": "opt-1.3b",
    "google/gemma-2-2b-it": "gemma2-2b",
    "google/gemma-7b": "gemma-7b",
    "huggyllama/llama-7b": "llama-7b",
    "meta-llama/Llama-2-7b-chat-hf": "llama2-7b",
    "microsoft/phi-1_5": "phi-1.5",
    "mistralai/Ministral-8B-Instruct-2410": "ministral-8b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-v0.3",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "mistralai/Mistral-7B-v0.3": "mistral-7b-v0.3",
    "mistralai/Mistral-Nemo-Base-2407": "mistral-nemo-12b",
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistral-small-24b",
    "nvidia/Nemotron-4-340B-Base": "nemotron4-340b",
    "openai-community/gpt2-xl": "gpt2-xl",
    "openlm-research/open_llama_3b": "open-llama-3b",
    "roberta-large": "roberta-large",
    "stabilityai/stablelm-3b-4e1t": "stablelm-3b",
    "tiiuae/falcon-7b": "falcon-7b",
}
# PEFT's TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, and what people adapt besides.
PEFT_TARGETS = {
    "baichuan2-7b": "[W_pack,o_proj,gate_proj]",
    "bloom-560m": "[query_key_value,dense,dense_h_to_4h]",
    "distilbert-base": "[q_lin,v_lin,lin1]",
    "esm2-150m": "[query,key,value,dense]",
    "falcon-7b": "[query_key_value]",
    "gpt-j-6b": "[q_proj,v_proj,fc_in]",
    "gpt-neo-1.3b": "[q_proj,v_proj,c_fc,c_proj]",
    "gpt-neox-20b": "[query_key_value]",
    "gpt2-xl": "[c_attn,c_proj]",
    "internlm2-7b": "[wqkv,wo]",
    "mpt-1b": "[Wqkv]",
    "opt-1.3b": "[q_proj,v_proj,fc1,fc2]",
    "phi-2": "[q_proj,v_proj,dense,fc1,fc2]",
    "qwen-7b": "[c_attn,c_proj,w1]",
    "roberta-large": "[query,value]",
    "santacoder": "[c_attn]",
    "stablelm-3b": "[q_proj,v_proj]",
    "starcoder-15b": "[c_attn,c_proj,c_fc]",
}


@pytest.mark.parametrize(("name", "total"), TOTALS.items())
def test_the_count_is_the_published_total(name: str, total: int) -> None:
    assert parameters(NAMED[name]) == total


def test_every_further_model_has_a_total() -> None:
    assert TOTALS.keys() == EARLIER.keys()


@pytest.mark.parametrize("name", EARLIER)
def test_transformers_builds_as_many_parameters_and_its_config_is_read_as_the_shape(name: str) -> None:
    shape = EARLIER[name]
    config = config_of(shape)
    assert counted(config) == parameters(shape)
    if shape.model_type not in ALIKE:
        read = shape_from_settings(json.loads(json.dumps(config.to_dict())))
        same = ("family", "hidden", "layers", "heads", "kv_heads", "ffn", "head_size", "vocab", "tied", "model_type")
        same += ("others", "outside", "shared_norm")
        assert {key: getattr(read, key) for key in same} == {key: getattr(shape, key) for key in same}


@pytest.mark.parametrize(("model_type", "settings"), VARIANTS)
@pytest.mark.parametrize("whole", [True, False])
def test_what_the_models_of_a_type_differ_in_is_counted(model_type: str, settings: dict[str, Any], whole: bool) -> None:
    config = AutoConfig.for_model(model_type, **settings)
    written = config.to_dict() if whole else {**config.to_diff_dict(), "model_type": model_type}
    assert parameters(shape_from_settings(json.loads(json.dumps(written)))) == counted(config)


@pytest.mark.parametrize(("settings", "model_type", "alike"), FROM_HUB)
def test_models_with_code_on_the_hub_are_counted_as_what_they_are_like(
    settings: dict[str, Any], model_type: str, alike: dict[str, Any]
) -> None:
    config = AutoConfig.for_model(model_type, **alike, tie_word_embeddings=False)
    assert parameters(shape_from_settings(settings)) == counted(config)


@pytest.mark.parametrize("model_type", ["t5", "bart", "whisper"])
def test_an_encoder_decoder_is_refused_in_a_sentence(model_type: str, tmp_path: Path) -> None:
    settings = AutoConfig.for_model(model_type).to_dict() | {"is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserMistake, match=f"a {model_type} has an encoder and a decoder, and models of") as found:
        plan(f"model.from={tmp_path}")
    assert "\n" not in str(found.value)


def test_a_config_json_instead_of_its_folder_is_answered_with_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(UserMistake) as found:
        plan(f"model.from={file}")
    assert str(found.value) == f"{file} is a file; model.from is the folder that it is in: model.from={tmp_path}"


def test_an_unknown_name_is_answered_with_near_ones_and_not_with_all_of_them() -> None:
    for key, says in (("from", "in the local Hugging Face cache"), ("shape", "No model shape is called")):
        with pytest.raises(UserMistake, match=says) as found:
            plan(f"model.{key}=llama4-8b")
        assert "Did you mean llama3-8b" in str(found.value)
        assert len(str(found.value)) < 400


@pytest.mark.parametrize(("hub_id", "name"), HUB_IDS.items())
def test_an_id_of_the_hub_is_a_name(hub_id: str, name: str) -> None:
    assert name_of(hub_id) == name


@pytest.mark.parametrize("hub_id", ["google-bert/bert-base-cased", "llama3-8b", "codellama/CodeLlama-13b-Python-hf"])
def test_an_id_of_another_model_is_no_name(hub_id: str) -> None:
    assert name_of(hub_id) is None


def test_an_id_that_is_not_cached_is_forecast_by_its_name() -> None:
    by_id, by_name = (
        plan(one, "hardware.gpu=h200") for one in ("model.from=tiiuae/falcon-7b", "model.shape=falcon-7b")
    )
    assert by_id.choice.run == by_name.choice.run


@pytest.mark.parametrize(("name", "targets"), PEFT_TARGETS.items())
def test_adapters_have_the_names_that_peft_has(name: str, targets: str) -> None:
    objective = "causal_lm" if NAMED[name].traits.causal else "masked_lm"
    for wanted in (targets, "all-linear"):
        found = plan(
            f"model.shape={name}", "adapter.kind=lora", f"adapter.targets={wanted}", "hardware.gpu=h200",
            "data.max_length=512", f"train.objective={objective}",
        )  # fmt: skip
        adapter = found.choice.run.adapter
        assert adapter is not None
        given = set(targets.strip("[]").split(","))
        assert {one.rpartition(".")[2] for one in adapter.targets} >= given
        every = {one.name for one in linears(NAMED[name])}
        assert wanted != "all-linear" or set(adapter.targets) == every


@pytest.mark.parametrize("name", ["falcon-7b", "roberta-large", "xlm-roberta-base", "opt-1.3b", "gemma-7b", "mpt-7b"])
def test_training_refuses_a_model_that_is_only_forecast_in_a_sentence(name: str) -> None:
    with pytest.raises(UserMistake, match=rf"model\.shape {name} is only forecast: train a \S+ from a folder"):
        api.load_config(None, [f"model.shape={name}"])


def test_a_model_with_code_on_the_hub_is_not_to_be_trained_from_a_folder() -> None:
    with pytest.raises(UserMistake, match="transformers builds a qwen only with code from the hub"):
        api.load_config(None, ["model.shape=qwen-7b"])
    assert {name for name in CODE_FROM_HUB if name in FORECAST_ONLY} == ALIKE.keys()


def test_a_norm_that_attention_and_mlp_share_is_saved_and_counted_once() -> None:
    shared = make_run("phi-1.5", precision="bf16-true")
    apart = replace(shared, shape=replace(shared.shape, shared_norm=False))
    assert parameters(apart.shape) == parameters(shared.shape) + shared.shape.layers * 2 * shared.shape.hidden
    terms = [{one.name: one.amount for one in block_kept(run).parts} for run in (shared, apart)]
    differ = {name for name in terms[0] if terms[0][name] != terms[1][name]}
    assert differ == {"norm inputs", "linear inputs"}
    assert all(terms[1][name] == 2 * terms[0][name] for name in differ)

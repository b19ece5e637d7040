"""Runs with an adapter: PEFT loads what is exported, the merged model is the same, and both are what shoal runs."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPTNeoXConfig, LlamaConfig

from shoal import api
from tests.harness import settings, train_on, weights
from tests.models.small import plain

SIZES = {"vocab_size": 260, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257}
BASES: dict[str, Any] = {
    "llama": LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        tie_word_embeddings=True,
        **SIZES,
    ),
    "neox": GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        tie_word_embeddings=False,
        **SIZES,
    ),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, **SIZES),
}
LORA = {"kind": "lora", "rank": 4, "alpha": 8}
TOKENS = ["<|user|>", "<|bot|>", "<|tool|>"]
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "lora": ("llama", {**LORA, "targets": ["q_proj", "v_proj"], "dropout": 0.1}, []),
    "rslora": ("llama", {**LORA, "rslora": True, "targets": ["model.layers.1.*"]}, []),
    "dora also": ("llama", {**LORA, "dora": True, "train_also": ["*norm*", "embed_tokens"]}, []),
    "neox dora": ("neox", {**LORA, "dora": True, "train_also": ["lm_head", "*.final_layer_norm.bias"]}, []),
    "conv1d": ("gpt2", LORA, []),
    "tokens": ("llama", LORA, TOKENS),
    "tokens also": ("neox", {**LORA, "train_also": ["embed_in", "lm_head"]}, TOKENS),
}
IDS = torch.tensor([list(b"the shoal turns as one")])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, described in BASES.items():
        described.initializer_range = 0.2  # so that an adapter changes the logits
        folders[name] = tmp_path_factory.mktemp(name)
        plain(described).save_pretrained(folders[name])
    return folders


def config_of(data: Path, base: Path, adapter: dict[str, Any], tokens: list[str], **changes: Any) -> dict[str, Any]:
    return settings(
        data,
        model={"from": str(base), "tokenizer": "bytes", "add_tokens": tokens},
        adapter=adapter,
        **{
            "train__steps": 3,
            "train__lr": 1e-2,
            "train__global_batch": 2,
            "train__micro_batch": 1,
            "data__max_length": 48,
            "data__train_on": "all",
            "checkpoint__every": 3,
            **changes,
        },
    )


@pytest.fixture(scope="module")
def run_of(instructions: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """The run of a case, trained once."""

    @cache
    def train(case: str) -> Path:
        base, adapter, tokens = CASES[case]
        return train_on(1, config_of(instructions, bases[base], adapter, tokens), tmp_path_factory.mktemp("adapter"))

    return train


@pytest.fixture(scope="module", autouse=True)
def _trained_first(run_of: Callable[[str], Path]) -> None:
    """Ranks are forked, which the threads of a model that has run here would not survive."""
    for case in CASES:
        run_of(case)


@pytest.fixture
def run(run_of, tmp_path: Path) -> Path:
    """A copy of one run, to change."""
    return Path(shutil.copytree(run_of("lora"), tmp_path / "run"))


@cache
@torch.no_grad()
def our_logits(run: Path) -> torch.Tensor:
    return api.load_run(run, device="cpu").model(IDS).logits


def load_base(folder: Path, rows: int | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_the_exported_adapter_with_equal_logits(case, run_of, bases, tmp_path):
    from peft import PeftModel

    run, base = run_of(case), bases[CASES[case][0]]
    folder = api.export(run, tmp_path / "adapter", adapter=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = json.loads((run / "model" / "config.json").read_text())["vocab_size"]
    plain_logits = load_base(base)(IDS).logits
    model = PeftModel.from_pretrained(load_base(base, rows if CASES[case][2] else None), folder).eval()
    logits = model(IDS).logits
    assert all(tokenizer.convert_tokens_to_ids(token) >= 259 for token in CASES[case][2])
    torch.testing.assert_close(logits, our_logits(run), rtol=0, atol=1e-5)
    assert (logits[..., :260] - plain_logits).abs().max() > 0.05  # it does something
    adapted = {name.rpartition(".lora_A")[0] for name, _ in model.named_modules() if name.endswith("lora_A")}
    ours = {name.rpartition(".lora_A")[0] for name in weights(run) if "lora_A" in name}
    assert adapted == {f"base_model.model.{name}" for name in ours}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_has_the_same_logits_and_says_so(case, run_of, tmp_path):
    run = run_of(case)
    merged = api.merge(run, tmp_path / "merged", device="cpu")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    difference = (model.eval()(IDS).logits - our_logits(run)).abs().max()
    assert difference < 2e-5
    assert merged.dtype == "float32"
    assert 0 < merged.largest_logit_difference < 2e-5
    assert merged.largest_logit > 0.1
    assert merged.tensors == sum("lora_A" in name for name in weights(run))
    assert not any("lora" in name for name in load_file(tmp_path / "merged" / "model.safetensors"))

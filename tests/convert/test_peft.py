"""Runs with an adapter: PEFT loads what is exported, the merged model is the same, and both are what shoal runs."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal import api
from shoal.cli import main
from shoal.mistakes import UserMistake
from shoal.models.base import fingerprint
from shoal.use.merge import EXACT, ROUNDING, Merged, Merger, merge_run
from tests.convert.adapted import BASES, LORA, config_of, make_base
from tests.harness import LLAMA, settings, slow, train_again_on, weights

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
QUICK = ("lora", "dora also", "conv1d", "tokens")
IDS = torch.tensor([list(b"the shoal turns as one")])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_base(name, tmp_path_factory.mktemp(name)) for name in BASES}


@pytest.fixture(scope="module")
def run_of(instructions: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """The run of a case, trained once."""

    @cache
    def train(case: str) -> Path:
        base, adapter, tokens = CASES[case]
        return train_again_on(
            1, config_of(instructions, bases[base], adapter, tokens), tmp_path_factory.mktemp("adapter")
        )

    return train


@pytest.fixture
def run(run_of, tmp_path: Path) -> Path:
    """A copy of one run, to change."""
    return Path(shutil.copytree(run_of("lora"), tmp_path / "run"))


@pytest.fixture(scope="module")
def other_runs(instructions: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run whose base was drawn from the seed, one in bf16-mixed with held-out data, and one without an adapter."""
    short = {"train__steps": 2, "data__max_length": 48, "data__train_on": "all"}
    base = bases["llama"]
    configs = {
        "drawn": settings(instructions, adapter={**LORA, "dora": True}, **short),
        "mixed": config_of(
            instructions, base, LORA, train__precision="bf16-mixed", data__validation=0.1, eval__every=3
        ),
        "full": settings(instructions, **short),
    }
    return {name: train_again_on(1, config, tmp_path_factory.mktemp(name)) for name, config in configs.items()}


@cache
@torch.no_grad()
def our_logits(run: Path) -> torch.Tensor:
    return api.load_run(run, device="cpu").model(IDS).logits


def load_base(folder: Path, rows: int | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model


@pytest.mark.parametrize("case", [*QUICK, *(slow(case) for case in CASES if case not in QUICK)])
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


@pytest.mark.parametrize("case", [*QUICK, *(slow(case) for case in CASES if case not in QUICK)])
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


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_merged_weights_are_computed_in_fp32_and_rounded_once(run_of, bases, tmp_path):
    run, base = run_of("lora"), stored(bases["llama"])
    merged = api.merge(run, tmp_path / "merged", dtype="bf16", compare=False)
    assert (merged.dtype, merged.largest_logit_difference) == ("bfloat16", None)
    found, trained = stored(tmp_path / "merged"), weights(run)
    assert found.keys() == base.keys()
    for name, weight in found.items():
        layer = name.removesuffix(".weight")
        expected = base[name]
        if f"{layer}.lora_A.weight" in trained:
            expected = expected + 2 * trained[f"{layer}.lora_B.weight"] @ trained[f"{layer}.lora_A.weight"]
            assert not torch.equal(expected, base[name])
        assert torch.equal(weight, expected.to(torch.bfloat16)), name


def test_a_merged_model_has_the_dtype_of_its_base_and_shards_of_bounded_size(run_of, bases, run, tmp_path):
    half = shutil.copytree(bases["llama"], tmp_path / "half")
    save_file({name: one.bfloat16() for name, one in stored(half).items()}, half / "model.safetensors")
    recorded = json.loads((run / "base.json").read_text())
    (run / "base.json").write_text(json.dumps(recorded | {"folder": str(half), "fingerprint": fingerprint(half)}))
    merged = merge_run(run, tmp_path / "merged", shard_bytes=20_000, device="cpu")
    assert merged.dtype == "bfloat16"
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert 1e-4 < merged.largest_logit_difference < 0.1 * merged.largest_logit


def test_a_run_on_a_base_that_was_drawn_from_the_seed_is_loaded_and_merged(other_runs, tmp_path):
    run = other_runs["drawn"]
    assert json.loads((run / "base.json").read_text())["seed"] == 1234
    merged = api.merge(run, tmp_path / "merged", device="cpu")
    assert merged.largest_logit_difference < 1e-5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(model(IDS).logits, our_logits(run), rtol=0, atol=1e-5)
    with pytest.raises(
        UserMistake, match=r"was drawn from the seed, so there is none for PEFT to load; use shoal merge"
    ):
        api.export(run, tmp_path / "adapter", adapter=True)


def test_evaluation_of_an_adapter_gives_the_loss_of_training(other_runs):
    run = other_runs["mixed"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = next(line["eval_loss"] for line in lines if line.get("step") == 3 and "eval_loss" in line)
    assert api.evaluate(run, device="cpu").eval_loss == pytest.approx(expected, rel=1e-6)


def test_generation_uses_the_adapter_and_its_key_value_cache(run_of, bases, tmp_path):
    """Greedy decoding with a cache gives the tokens that the whole sequence gives without one."""
    run = run_of("dora also")
    loaded = api.load_run(run, device="cpu")
    generated = loaded.model.generate(IDS, max_new_tokens=8, do_sample=False, use_cache=True, eos_token_id=-1)
    with torch.no_grad():
        logits = loaded.model(generated[:, :-1]).logits
    assert torch.equal(logits.argmax(-1)[:, IDS.shape[1] - 1 :], generated[:, IDS.shape[1] :])
    assert loaded.model.config.use_cache is not False
    text = api.generate(run, "the shoal", tokens=5, temperature=0, raw=True, device="cpu").text
    base = shutil.copytree(bases["llama"], tmp_path / "base")
    for path in (run / "model").glob("tokenizer*"):
        shutil.copy2(path, base)
    assert text != api.generate(base, "the shoal", tokens=5, temperature=0, raw=True, device="cpu").text


CHANGES: dict[str, Callable[[Path, Path], Any]] = {
    "load": lambda run, out: api.load_run(run, device="cpu"),
    "merge": lambda run, out: api.merge(run, out),
    "export": lambda run, out: api.export(run, out, adapter=True),
}


@pytest.mark.parametrize("use", CHANGES)
def test_a_base_that_has_changed_is_refused(use, run, bases, tmp_path):
    other = shutil.copytree(bases["llama"], tmp_path / "base")
    recorded = json.loads((run / "base.json").read_text())
    (run / "base.json").write_text(json.dumps(recorded | {"folder": str(other)}))
    CHANGES[use](run, tmp_path / "as before")
    changed = stored(other)
    changed["model.layers.1.mlp.up_proj.weight"] *= 1.001
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserMistake, match=r"^The weights in .+/base are not those on which the adapter of .+ restore"):
        CHANGES[use](run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(other)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(bases["llama"]), str(other)))
    with pytest.raises(UserMistake, match=r"its base model in .+/base is gone; restore it, or write .+/base.json\.$"):
        CHANGES[use](run, tmp_path / "out")


def test_the_same_weights_in_other_files_are_the_same_base(bases, tmp_path):
    split = tmp_path / "split"
    model = AutoModelForCausalLM.from_pretrained(bases["llama"])
    model.save_pretrained(split, max_shard_size="20KB")
    assert len(list(split.glob("*.safetensors"))) > 2
    assert fingerprint(split) == fingerprint(bases["llama"])
    with torch.no_grad():
        model.model.norm.weight[7] += 1e-3
    model.save_pretrained(tmp_path / "changed")
    assert fingerprint(tmp_path / "changed") != fingerprint(bases["llama"])


def test_what_a_run_is_not_is_said_with_the_command_for_it(other_runs, run_of, tmp_path):
    full, adapter = other_runs["full"], run_of("lora")
    with pytest.raises(UserMistake, match=r"has no adapter: it trained the model itself; use shoal export .+ --to hf"):
        api.merge(full, tmp_path / "out")
    with pytest.raises(UserMistake, match=r"has no adapter"):
        api.export(full, tmp_path / "out", adapter=True)
    with pytest.raises(UserMistake, match=r"trained an adapter, .+ shoal merge .+ shoal export .+ --adapter"):
        api.export(adapter, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for write in (api.merge, lambda run, out: api.export(run, out, adapter=True)):
        with pytest.raises(UserMistake, match=r"already exists and is not empty"):
            write(adapter, tmp_path / "out")


def test_the_commands_print_what_they_wrote(run, tmp_path, monkeypatch, capsys):
    def shoal(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["shoal", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert shoal("export", str(run), "--adapter") == f"{run / 'adapter'}\n"
    said = json.loads(shoal("merge", str(run), "-o", str(tmp_path / "m"), "--json", "--device", "cpu"))
    assert said["output"] == str(tmp_path / "m")
    assert 0 < said["largest_logit_difference"] < 1e-5
    text = shoal("merge", str(run), "--device", "cpu")
    assert text.startswith(f"{run / 'merged'}\nThe logits of 64 random tokens differ from the run's by ")
    assert "% (root mean square); the adapter changes them by " in text
    assert text.endswith("%. That is the rounding of float32.\n")
    text = shoal("merge", str(run), "-o", str(tmp_path / "half"), "--dtype", "bf16", "--device", "cpu")
    assert ". Before the weights are rounded to bfloat16 they differ by " in text
    assert "%. That is the rounding of bfloat16." in text
    summary = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert summary["target_modules"] == ["q_proj", "v_proj"]
    assert summary["lora_dropout"] == 0.1
    files = {path.name for path in (run / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
    assert "config.json" not in files


@pytest.mark.parametrize(
    "factor",
    [lambda layer: 1.05, lambda layer: 0.0 if layer == "model.layers.1.self_attn.v_proj" else 1.0],
    ids=["scaled", "one layer missed"],
)
def test_a_merge_that_is_slightly_wrong_is_found_in_every_dtype(factor, run_of, tmp_path, monkeypatch):
    right = Merger._merge
    monkeypatch.setattr(
        Merger, "_merge", lambda self, layer, weight: torch.lerp(weight, right(self, layer, weight), factor(layer))
    )
    for dtype in ("fp32", "bf16"):
        merged = api.merge(run_of("lora"), tmp_path / dtype, dtype=dtype, device="cpu")
        assert merged.is_right is False
        assert "the merged model is not that of the run. Please report it." in merged.text()


def test_what_a_merge_costs_is_said_with_what_to_do() -> None:
    merged = Merged("out", "bfloat16", 1, 9.0, 9.0, 0.013, adapter_effect=0.0145, exact_difference=1e-6, is_right=True)
    assert "It hides much of what this adapter does: --dtype fp32 rounds less." in merged.text()
    assert "to compare in fp32" in replace(merged, adapter_effect=0.1, exact_difference=None).text()
    assert replace(merged, adapter_effect=0.1).text().endswith("That is the rounding of bfloat16.")
    assert Merged("out", "float32", 1).text() == "out"


def test_the_committed_measurement_separates_right_merges_from_wrong_ones() -> None:
    found = json.loads(Path(__file__).parents[2].joinpath("benchmarks/finetune/merge.json").read_text())["adapters"]
    assert len(found) == 5
    for name, row in ((name, row) for one in found.values() for name, rows in one["fp32"].items() for row in rows):
        apart = EXACT / row["relative_difference"] if name == "right" else row["relative_difference"] / EXACT
        assert apart > 5, (name, row)
    for dtype, allowed in (("fp16", ROUNDING["float16"]), ("bf16", ROUNDING["bfloat16"])):
        assert all(row["relative_difference"] < allowed / 2 for one in found.values() for row in one[dtype]["right"])


@pytest.mark.parametrize("kind", ["nf4", slow("nf4-dq")])
def test_a_qlora_run_merges_into_its_base_as_it_was_quantized(kind, instructions, tmp_path):
    adapter = {**LORA, "kind": "qlora", "quantize": kind, "dora": True}
    shape = {**LLAMA, "hidden": 64, "ffn": 128, "positions": 512}
    config = settings(instructions, adapter=adapter, model__shape=shape, train__steps=2)
    run = train_again_on(1, config, tmp_path)
    merged = api.merge(run, tmp_path / "merged", device="cpu")
    assert 0 < merged.largest_logit_difference < 2e-5
    weight = stored(tmp_path / "merged")["model.layers.0.mlp.down_proj.weight"]
    assert len(weight[0, :64].unique()) > 16  # the base has at most 16 values in a block, and an adapter was added

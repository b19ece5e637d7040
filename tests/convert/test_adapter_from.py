"""`adapter.from`: training starts from an adapter that PEFT wrote, on every mesh, and says what does not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shoal import api
from shoal.mistakes import UserMistake
from tests.convert.adapted import config_of, make_base
from tests.harness import lines, slow, train_again_on, train_on, weights

UNCHANGED = {"train__steps": 1, "train__lr": 1e-30, "checkpoint__every": 1}  # too little to change an fp32 weight
FROM_FILE = {"kind": "lora"}
IDS = torch.tensor([list(b"the shoal turns as one")])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base("llama", tmp_path_factory.mktemp("base"))


def write_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """An adapter with random values, saved by PEFT."""
    from peft import LoraConfig, get_peft_model  # here, because importing it takes longer than most test files

    torch.manual_seed(1)
    wanted: dict[str, Any] = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **settings}
    config = LoraConfig(task_type="CAUSAL_LM", **wanted)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter) * ("magnitude" not in name)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    both = {"modules_to_save": ["norm", "embed_tokens", "lm_head"], "ensure_weight_tying": True}
    return {
        "listed": write_adapter(base, root / "listed"),
        "pattern": write_adapter(
            base, root / "pattern", target_modules=r".*\.1\..*(k|o)_proj", use_rslora=True, lora_dropout=0.05
        ),
        "also": write_adapter(base, root / "also", use_dora=True, **both),
    }


def config(data: Path, base: Path, folder: Path, adapter: dict[str, Any] = FROM_FILE, **changes: Any) -> dict[str, Any]:
    return config_of(data, base, {**adapter, "from": str(folder)}, **{**UNCHANGED, **changes})


@pytest.fixture(scope="module")
def started(instructions: Path, base: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """The run that starts from each adapter, on one process."""
    return {
        name: train_again_on(1, config(instructions, base, folder), tmp_path_factory.mktemp(name))
        for name, folder in adapters.items()
    }


@torch.no_grad()
@pytest.mark.parametrize("name", ["listed", "pattern", "also"])
def test_training_starts_with_the_logits_that_peft_has(name, started, adapters, base):
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters[name]).eval()
    loaded = api.load_run(started[name], device="cpu")
    torch.testing.assert_close(loaded.model(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    assert (loaded.model(IDS).logits - AutoModelForCausalLM.from_pretrained(base)(IDS).logits).abs().max() > 0.5


MESHES = {"fsdp": {"strategy": "fsdp"}, "tp": {"tp": 2}, "pp": {"pp": 2}}


@pytest.mark.parametrize(
    ("mesh", "name"),
    [("fsdp", "also"), slow("tp", "listed"), slow("pp", "also"), slow("pp", "listed"), slow("fsdp", "listed")],
)
def test_every_mesh_starts_from_the_same_values(mesh, name, started, adapters, base, instructions, tmp_path):
    changes = {f"parallel__{key}": value for key, value in MESHES[mesh].items()}
    run = train_again_on(2, config(instructions, base, adapters[name], **changes), tmp_path)
    one, other = weights(run), weights(started[name])
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
    assert lines(run)[0]["loss"] == pytest.approx(lines(started[name])[0]["loss"], rel=2e-6)


def test_the_run_records_what_it_took_over(started, adapters):
    taken = api.load_config(started["listed"] / "config.yaml").adapter
    assert (taken.rank, taken.alpha, taken.dropout, taken.targets) == (2, 6.0, 0.0, ("down_proj", "q_proj"))
    taken = api.load_config(started["also"] / "config.yaml").adapter
    assert taken.dora
    assert taken.train_also[0] == "lm_head.weight"
    taken = api.load_config(started["pattern"] / "config.yaml").adapter
    assert (taken.rslora, taken.dropout) == (True, 0.05)
    assert taken.targets == ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.o_proj")


def test_a_resumed_run_does_not_read_the_folder_again(adapters, base, instructions, tmp_path):
    folder = shutil.copytree(adapters["listed"], tmp_path / "folder")
    train_again_on(1, config(instructions, base, folder), tmp_path)
    shutil.rmtree(folder)
    run = train_on(1, config(instructions, base, folder, train__steps=2), tmp_path, resume=True)
    assert [line["step"] for line in lines(run)] == [1, 2]


def test_what_is_exported_can_be_started_from(started, base, instructions, tmp_path):
    folder = api.export(started["also"], tmp_path / "exported", adapter=True)
    run = train_again_on(1, config(instructions, base, folder), tmp_path)
    one, other = weights(run), weights(started["also"])
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_the_plan_follows_the_adapter(adapters, base, instructions):
    def planned(adapter: dict[str, Any]) -> Any:
        settings = config_of(instructions, base, adapter)
        return api.plan(api.config_from_mapping(settings)).as_dict()["memory"]["terms"]

    followed = planned({"kind": "lora", "from": str(adapters["listed"])})
    assert followed == planned({"kind": "lora", "rank": 2, "targets": ["q_proj", "down_proj"]})
    assert followed != planned({"kind": "lora"})


def set_key(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file({name: one.clone() for name, one in tensors.items()}, folder / "adapter_model.safetensors")

    return write


QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
EMBEDDING = "base_model.model.model.embed_tokens.weight"


def rename_to_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("change", "adapter", "says"),
    [
        (set_key("peft_type", "IA3"), {}, "is an adapter of type IA3, and shoal has LORA only."),
        (set_key("rank_pattern", {"q_proj": 4}), {}, "sets rank_pattern, which shoal does not have; merge that"),
        (set_key("alpha_pattern", {"q_proj": 4}), {}, "sets alpha_pattern, which"),
        (set_key("bias", "all"), {}, "has bias all, and shoal has none only"),
        (set_key("init_lora_weights", "pissa"), {}, "init_lora_weights pissa, which changes the base model too"),
        (set_key("r", None), {}, "is not the config of a LoRA adapter."),
        (rename_to_pickle, {}, "holds no adapter_model.safetensors (adapter_model.bin is a pickle"),
        (lambda folder: (folder / "adapter_config.json").unlink(), {}, "so it is not a PEFT adapter folder."),
        (lambda folder: (folder / "base.json").write_text("{}"), {}, "is a run; shoal export"),
        (lambda folder: shutil.rmtree(folder), {}, "The adapter folder"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), {}, "is damaged"),
        (None, {"rank": 4}, "adapter.rank is 4, but r in"),
        (None, {"alpha": 16}, "adapter.alpha is 16, but lora_alpha in"),
        (None, {"dora": True}, "adapter.dora is true, but use_dora in"),
        (None, {"targets": ["q_proj"]}, "is [down_proj, q_proj]; leave adapter.targets out."),
        (None, {"train_also": ["norm"]}, "adapter.train_also is [norm], but modules_to_save in"),
        (
            change_tensors(lambda tensors: tensors.update({QUERY: tensors[QUERY][:, :16].clone()})),
            {},
            "with shape (2, 16), but for model.from it would be (2, 32): it is the adapter of another model.",
        ),
        (
            change_tensors(lambda tensors: tensors.pop(QUERY)),
            {},
            f"holds no {QUERY}, which this model needs.",
        ),
        (
            change_tensors(lambda tensors: tensors.update({QUERY.replace("layers.0", "layers.7"): tensors[QUERY]})),
            {},
            "holds model.layers.7.self_attn.q_proj.lora_A.weight, which LlamaForCausalLM of model.from does not have",
        ),
        (
            change_tensors(lambda tensors: tensors.update({EMBEDDING: torch.zeros(264, 32)})),
            {},
            "holds model.embed_tokens.weight, which modules_to_save in",
        ),
        (
            change_tensors(
                lambda tensors: tensors.update({EMBEDDING.replace("weight", "lora_embedding_A"): tensors[QUERY]})
            ),
            {},
            "LoRA on embeddings, which shoal does not have",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_in_one_sentence(
    change, adapter, says, adapters, base, instructions, tmp_path
):
    folder = shutil.copytree(adapters["listed"], tmp_path / "folder")
    if change is not None:
        change(folder)
    with pytest.raises(UserMistake) as caught:
        api.dry_run(api.config_from_mapping(config(instructions, base, folder, {"kind": "lora", **adapter})))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_embedding_that_peft_trained_apart_from_the_head_is_refused(adapters, base, instructions, tmp_path):
    folder = shutil.copytree(adapters["also"], tmp_path / "folder")
    change_tensors(lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING] + 1}))(folder)
    with pytest.raises(UserMistake, match=r"model.from ties .+lm_head.weight; use a base .+ tie_word_embeddings false"):
        api.dry_run(api.config_from_mapping(config(instructions, base, folder)))


def test_a_quantized_base_is_refused(base, instructions, tmp_path):
    folder = shutil.copytree(base, tmp_path / "quantized")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UserMistake, match=r"holds quantized weights, which cannot be trained; use the original model"):
        api.dry_run(api.config_from_mapping(config_of(instructions, folder, {"kind": "lora"})))

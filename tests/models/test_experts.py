"""Mixture-of-experts models: files hold one tensor per expert, and each rank reads only the experts it needs."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

import shoal.models.stored
from shoal.convert.export import export_hf
from shoal.mistakes import UserMistake
from shoal.models.read_weights import locate_weights
from shoal.models.tensor_slices import TensorSlice, whole
from tests.harness import lines, run_ranks, settings, slow, train_again_on
from tests.models.small import EXPERTS, FFN, HIDDEN, MIXTURES, loaded, mixture_config, on_meta, plain, small_config
from tests.models.test_weights import hold_like_plain, rewrite, shards

GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
PER_EXPERT = [family for family in MIXTURES if family != "gpt_oss"]  # whose experts are one tensor in files too


@pytest.mark.parametrize("family", MIXTURES)
def test_a_saved_mixture_is_loaded_as_transformers_loads_it(family, tmp_path):
    plain(mixture_config(family)).save_pretrained(tmp_path)
    hold_like_plain(tmp_path)


@pytest.mark.parametrize("family", PER_EXPERT)
def test_the_experts_of_these_tests_are_separate_tensors_in_files(family, tmp_path):
    """Otherwise these tests would cover models whose tensors need no assembly."""
    plain(mixture_config(family)).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert len([name for name in names if re.search(r"layers\.1\..*experts\.\d+\.", name)]) == 3 * EXPERTS
    assert not [name for name in names if name.endswith("gate_up_proj")]


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_a_mixture_in_several_files_is_loaded_completely(family, tmp_path):
    plain(mixture_config(family)).save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > EXPERTS
    hold_like_plain(tmp_path)


def test_experts_are_in_the_order_of_their_numbers_and_not_of_their_names(tmp_path):
    plain(mixture_config("qwen3_moe", num_experts=12)).save_pretrained(tmp_path)
    hold_like_plain(tmp_path)


def test_a_mixture_saved_as_it_is_in_memory_is_loaded_too(tmp_path):
    plain(mixture_config("mixtral")).save_pretrained(tmp_path, save_original_format=False)
    assert GATE_UP in load_file(tmp_path / "model.safetensors")
    hold_like_plain(tmp_path)


def test_a_mixture_saved_in_bf16_has_the_same_values_in_fp32(tmp_path):
    saved = plain(mixture_config("mixtral")).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    for name, parameter in loaded(tmp_path).named_parameters():
        assert torch.equal(parameter, saved.get_parameter(name).float()), name
    assert (
        locate_weights(on_meta(saved.config), tmp_path)[GATE_UP].read(TensorSlice((0, 0, 0), (1, 2, 3))).dtype
        == torch.bfloat16
    )


def test_a_fused_tensor_of_a_file_becomes_several(tmp_path):
    """HRM fuses query, key, value and gate of its attention into one tensor."""
    plain(hrm()).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any("gqkv_proj" in name for name in names)
    assert not any("q_proj" in name for name in names)
    hold_like_plain(tmp_path)


def hrm() -> Any:
    return mixture_config("hrm_text", num_key_value_heads=4)


# Slices.


@pytest.mark.parametrize(
    ("family", "world_size"),
    [
        *((family, 2) for family in ("mixtral", "qwen3_moe", "deepseek_v3")),
        *(slow(family, 2) for family in ("qwen2_moe", "olmoe")),
        *(slow(family, 4) for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3")),
    ],
)
def test_each_rank_has_its_own_slice_of_the_experts(family, world_size, tmp_path):
    saved = plain(mixture_config(family))
    saved.save_pretrained(tmp_path)
    answers = run_ranks(world_size, lambda: shards({"from": str(tmp_path)}))
    for rank, answer in enumerate(answers):
        assert GATE_UP in answer
        for name, (local, full) in answer.items():
            expected = saved.get_parameter(name).detach()
            assert torch.equal(torch.from_numpy(full), expected), name
            rows = -(-len(expected) // world_size)
            assert torch.equal(torch.from_numpy(local), expected[rank * rows : (rank + 1) * rows]), name


@pytest.mark.parametrize("family", ["mixtral", "hrm_text"])
def test_any_slice_of_any_parameter_can_be_read(family, tmp_path):
    saved = plain(mixture_config("mixtral") if family == "mixtral" else hrm())
    saved.save_pretrained(tmp_path)
    stored = locate_weights(on_meta(saved.config), tmp_path)
    random = torch.Generator().manual_seed(3)
    for name, parameter in saved.named_parameters():
        assert stored[name].shape == tuple(parameter.shape)
        assert torch.equal(stored[name].read(whole(stored[name].shape)), parameter)
        for _ in range(5):
            offset = [int(torch.randint(0, size, (), generator=random)) for size in parameter.shape]
            room = [size - start for size, start in zip(parameter.shape, offset, strict=True)]
            shape = [int(torch.randint(0, size + 1, (), generator=random)) for size in room]
            tensor_slice = TensorSlice(tuple(offset), tuple(shape))
            assert torch.equal(stored[name].read(tensor_slice), parameter[tensor_slice.slices]), (name, tensor_slice)


class Watched:
    """An opened safetensors file that records which slices are read from it."""

    def __init__(self, file: Any, read: list[tuple[str, Any]]) -> None:
        self.file, self.read = file, read

    def keys(self) -> Any:
        return self.file.keys()

    def get_tensor(self, name: str) -> Any:
        self.read.append((name, None))
        return self.file.get_tensor(name)

    def get_slice(self, name: str) -> Any:
        header, read = self.file.get_slice(name), self.read

        class Slice:
            get_shape, get_dtype = header.get_shape, header.get_dtype

            def __getitem__(self, slices: Any) -> Any:
                read.append((name, slices))
                return header[slices]

        return Slice()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """(name in the file, slices) of every read from safetensors files."""
    seen: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        shoal.models.stored, "safe_open", lambda path, framework: Watched(safe_open(path, framework=framework), seen)
    )
    return seen


def test_locating_the_experts_reads_no_values(reads, tmp_path):
    saved = plain(mixture_config("mixtral"))
    saved.save_pretrained(tmp_path)
    locate_weights(on_meta(saved.config), tmp_path)
    assert reads == []


def test_a_slice_reads_only_the_experts_and_rows_that_it_overlaps(reads, tmp_path):
    saved = plain(mixture_config("mixtral"))
    saved.save_pretrained(tmp_path)
    stored = locate_weights(on_meta(saved.config), tmp_path)
    expert = "model.layers.1.block_sparse_moe.experts.{}.{}.weight".format
    columns = slice(0, HIDDEN)

    stored[GATE_UP].read(TensorSlice((1, 8, 0), (2, 10, HIDDEN)))  # gates only
    assert reads == [(expert(index, "w1"), (slice(8, 18), columns)) for index in (1, 2)]
    reads.clear()
    stored[GATE_UP].read(TensorSlice((4, FFN - 3, 0), (1, 5, HIDDEN)))  # the last gates and the first ups
    assert reads == [
        (expert(4, "w1"), (slice(FFN - 3, FFN), columns)),
        (expert(4, "w3"), (slice(0, 2), columns)),
    ]
    reads.clear()
    stored[DOWN].read(TensorSlice((0, 0, 7), (1, HIDDEN, 2)))
    assert reads == [(expert(0, "w2"), (slice(0, HIDDEN), slice(7, 9)))]
    reads.clear()
    stored[DOWN].read(TensorSlice((0, 0, 0), (0, HIDDEN, FFN)))
    assert reads == []


def test_a_rank_reads_no_expert_of_another_rank(reads, tmp_path):
    plain(mixture_config("qwen3_moe")).save_pretrained(tmp_path)

    def experts_read() -> set[int]:
        shards({"from": str(tmp_path)})
        found = (re.search(r"experts\.(\d+)\.", name) for name, _ in reads)
        return {int(match.group(1)) for match in found if match}

    assert run_ranks(2, experts_read) == [{0, 1, 2}, {3, 4}]


# Training.


def train(world_size: int, start: Path, data: Path, runs: Path, strategy: str = "auto", **changes: Any) -> list[Any]:
    config = settings(
        data,
        name=f"{strategy}-{world_size}",
        model={"from": str(start), "tokenizer": "bytes"},
        parallel__strategy=strategy,
        **{"train__steps": 2, "train__global_batch": 4, "train__micro_batch": 2, **changes},
    )
    return [(line["loss"], line["grad_norm"]) for line in lines(train_again_on(world_size, config, runs))]


def hold_alike(found: list[Any], expected: list[Any]) -> None:
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=2e-6)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-5)


@pytest.mark.parametrize("family", [name if name == "deepseek_v3" else slow(name) for name in MIXTURES])
def test_a_mixture_trains_on_two_ranks_as_on_one(family, instructions, tmp_path):
    plain(mixture_config(family, vocab_size=260, max_position_embeddings=512)).save_pretrained(tmp_path / "start")
    alone = train(1, tmp_path / "start", instructions, tmp_path)
    for strategy in ("ddp", "fsdp"):
        hold_alike(train(2, tmp_path / "start", instructions, tmp_path, strategy), alone)
    assert alone[-1][0] < alone[0][0]


@pytest.mark.parametrize("strategy", [slow("ddp"), "fsdp"])
def test_experts_without_tokens_do_not_block_the_others(strategy, instructions, tmp_path):
    """Two sequences of 16 tokens and one expert per token: most of the 64 experts get no token on a rank."""
    many = {"num_local_experts": 64, "num_experts_per_tok": 1}
    settled = mixture_config("mixtral", vocab_size=260, max_position_embeddings=512, **many)
    plain(settled).save_pretrained(tmp_path / "start")
    short = {"data__max_length": 16, "data__train_on": "all"}
    alone = train(1, tmp_path / "start", instructions, tmp_path, **short)
    hold_alike(train(2, tmp_path / "start", instructions, tmp_path, strategy, **short), alone)


# Folders that cannot be loaded.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plain(mixture_config("olmoe")).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def expert(number: int, matrix: str) -> str:
    return f"model.layers.1.mlp.experts.{number}.{matrix}.weight"


def test_a_missing_expert_is_a_mistake_with_both_shapes(folder):
    rewrite(folder, lambda held: held.pop(expert(2, "down_proj")))
    sentence = r"experts\.0\.down_proj\.weight and 3 others, together with shape \(4, 32, 48\).*makes it \(5, 32, 48\)"
    with pytest.raises(UserMistake, match=sentence):
        loaded(folder)


def test_a_mixture_without_its_experts_is_a_mistake_that_names_one(folder):
    rewrite(folder, lambda held: [held.pop(name) for name in list(held) if "experts" in name])
    with pytest.raises(UserMistake, match=r"holds no tensor model\.layers\.0\.mlp\.experts\.gate_up_proj and 3 more"):
        loaded(folder)


def test_experts_of_different_shapes_are_a_mistake(folder):
    rewrite(folder, lambda held: held.update({expert(3, "down_proj"): torch.ones(HIDDEN, FFN + 1)}))
    with pytest.raises(UserMistake, match=rf"cannot convert {DOWN} of OlmoeForCausalLM .* MergeModulelist:"):
        loaded(folder)


def test_a_quantized_expert_is_refused(folder):
    rewrite(folder, lambda held: held.update({expert(3, "up_proj"): torch.ones(FFN, HIDDEN, dtype=torch.int8)}))
    with pytest.raises(UserMistake, match=r"experts\.3\.up_proj\.weight as I8: quantized weights cannot be trained"):
        loaded(folder)


def test_a_trained_buffer_is_loaded_saved_and_exported(instructions, tmp_path):
    saved = plain(mixture_config("deepseek_v3", vocab_size=260, max_position_embeddings=512))
    bias = saved.model.layers[1].mlp.gate.e_score_correction_bias
    bias.normal_()
    saved.save_pretrained(tmp_path / "start")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(dict(loaded(tmp_path / "start").named_buffers())[name], bias)
    train(2, tmp_path / "start", instructions, tmp_path, "fsdp")
    run = next(path.parent for path in tmp_path.rglob("metrics.jsonl"))
    export_hf(run, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.model.layers[1].mlp.gate.e_score_correction_bias, bias)


# Operations that shoal has no view for.


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> Callable[[ConversionOps], None]:
    """Make transformers convert o_proj of any model with one operation."""

    def by(operation: ConversionOps) -> None:
        converter = WeightConverter("o_proj.weight", "o_proj.weight", [operation])
        monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model, **_: [converter])

    return by


def test_an_unknown_operation_is_run_by_transformers_on_the_complete_tensor(converted, tmp_path):
    saved = plain(small_config("llama"))
    saved.save_pretrained(tmp_path)
    converted(Transpose(0, 1))
    name = "model.layers.0.self_attn.o_proj.weight"
    expected = saved.get_parameter(name).T
    assert torch.equal(loaded(tmp_path).get_parameter(name), expected)
    tensor_slice = TensorSlice((3, 4), (5, 6))
    assert torch.equal(
        locate_weights(on_meta(saved.config), tmp_path)[name].read(tensor_slice), expected[tensor_slice.slices]
    )


def test_an_operation_that_fails_is_a_mistake_that_names_it(converted, tmp_path):
    class Enigma(ConversionOps):
        def convert(self, input_dict: Any, **_: Any) -> Any:
            raise ValueError("no key")

    plain(small_config("llama")).save_pretrained(tmp_path)
    converted(Enigma())
    with pytest.raises(UserMistake, match=r"self_attn\.o_proj\.weight of LlamaForCausalLM .* Enigma: no key"):
        loaded(tmp_path)

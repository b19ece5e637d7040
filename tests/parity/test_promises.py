"""Parity beyond `test_parity`: other families, packed documents, bitwise pipelines, dropout, evaluation."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
)

from shoal import api
from shoal.data.tokenizer import load_tokenizer
from shoal.models.cross_entropy import Chunks, Measure, choose_chunks, measure_full_vocabulary
from tests.harness import lines, reference_run, run_ranks, settings, slow, train_again_on, train_on
from tests.parity.test_parity import EXACT_STEPS, FAMILIES, MICRO_BATCH, PIPELINE_LAYERS, hold_equal

SPLITS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "cp_gather": {"cp": 2},
    "cp_ulysses": {"cp": 2, "cp_method": "ulysses"},
}
OTHERS = ("mistral", "qwen2", "qwen3", "gpt2")


def shape_of(family: str, **changes: Any) -> dict[str, Any]:
    heads = {"kv_heads": 2} if family in ("mistral", "qwen2", "qwen3") else {}
    shape = {"family": family, "hidden": 32, "layers": 2, "heads": 4, "vocab": 260, "positions": 512, **heads}
    return {**shape, **changes}


def small(data: Path, name: str, **changes: Any) -> dict[str, Any]:
    batch = {"train__micro_batch": MICRO_BATCH, "train__global_batch": 2 * MICRO_BATCH, "train__steps": EXACT_STEPS}
    return settings(data, name=name, **{**batch, **changes})


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        *((family, "fsdp") for family in ("qwen3", "gpt2", "bert")),
        ("gpt2", "ddp"),
        *(slow(family, "fsdp") for family in ("mistral", "qwen2")),
        *(slow(family, "ddp") for family in ("mistral", "qwen2", "qwen3", "bert")),
    ],
)
def test_the_other_families_train_the_same_on_two_ranks_and_on_one(family, strategy, instructions, tmp_path):
    model = {"shape": shape_of(family), "tokenizer": "bytes"}
    if family == "bert":  # a decoder, whose head is more than one matrix
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        settled = CONFIG_MAPPING["bert"](**sizes, vocab_size=260, is_decoder=True)
        settled.hidden_dropout_prob = settled.attention_probs_dropout_prob = 0.0
        AutoModelForCausalLM.from_config(settled).save_pretrained(tmp_path / "bert")
        model = {"from": str(tmp_path / "bert"), "tokenizer": "bytes"}
    one = reference_run(small(instructions, "one", model=model))
    two = train_again_on(2, small(instructions, "two", model=model, parallel__strategy=strategy), tmp_path)
    hold_equal(two, one, bitwise=True)


def test_a_sliding_window_is_the_same_for_the_heads_of_each_tensor_parallel_rank(instructions, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    limited = CONFIG_MAPPING["mistral"](**sizes, num_key_value_heads=2, vocab_size=260, sliding_window=16)
    AutoModelForCausalLM.from_config(limited).save_pretrained(tmp_path / "mistral")
    model = {"from": str(tmp_path / "mistral"), "tokenizer": "bytes"}
    one = reference_run(small(instructions, "one", model=model))
    two = train_again_on(2, small(instructions, "two", model=model, parallel={"tp": 2}), tmp_path)
    hold_equal(two, one, bitwise=False)


@pytest.mark.parametrize("family", [slow(family) for family in ("mistral", *OTHERS[1:])])
def test_the_other_families_can_be_split(family, instructions, tmp_path):
    # 259 is odd: one rank has a larger shard of the vocabulary.
    shape = shape_of(family, vocab=259)
    one = reference_run(small(instructions, "one", model__shape=shape))
    for name, split in SPLITS.items():
        two = train_again_on(2, small(instructions, name, model__shape=shape, parallel=split), tmp_path)
        hold_equal(two, one, bitwise=False)


@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "fsdp", "wrap": {"min_params": 2000}},
        slow({"strategy": "zero1"}),
        slow({"strategy": "zero2", "wrap": {"classes": ["JambaMambaDecoderLayer", "JambaAttentionDecoderLayer"]}}),
    ],
    ids=str,
)
def test_a_model_without_identical_blocks_trains_the_same_on_two_ranks_and_on_one(parallel, instructions, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 260}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 1, "use_mamba_kernels": False}
    order = {"attn_layer_period": 2, "attn_layer_offset": 1, "pad_token_id": 258}
    torch.manual_seed(0)
    JambaForCausalLM(JambaConfig(**sizes, **heads, **order)).save_pretrained(tmp_path / "start")
    load_tokenizer("bytes").save(tmp_path / "start")
    changes = {"model": {"from": str(tmp_path / "start")}, "data__max_length": 64, "data__train_on": "all"}
    one = train_again_on(1, small(instructions, "one", **changes), tmp_path)
    two = train_again_on(2, small(instructions, "two", parallel=parallel, **changes), tmp_path)
    hold_equal(two, one, bitwise=True)


@pytest.mark.skipif(
    "inkling_text" not in CONFIG_MAPPING, reason="this transformers has no embedding with a norm inside"
)
@pytest.mark.slow
def test_an_embedding_with_a_norm_trains_the_same_on_two_ranks_and_on_one(instructions, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 4}
    tokens = {"vocab_size": 260, "pad_token_id": 258, "bos_token_id": 256, "eos_token_id": 257}
    settled = {"num_experts_per_tok": 2, "max_position_embeddings": 256, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["inkling_text"](**sizes, **heads, **tokens, **settled))
    assert len(list(model.get_input_embeddings().parameters())) == 2
    model.float().save_pretrained(tmp_path / "start")
    load_tokenizer("bytes").save(tmp_path / "start")
    changes = {"model": {"from": str(tmp_path / "start")}, "data__max_length": 64, "data__train_on": "all"}
    one = train_again_on(1, small(instructions, "one", **changes), tmp_path)
    two = train_again_on(2, small(instructions, "two", parallel__strategy="fsdp", **changes), tmp_path)
    hold_equal(two, one, bitwise=True)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["nvme", "classes"])
def test_nvme_offload_and_wrapping_by_class_train_the_same_as_one_process(way, world_size, instructions, tmp_path):
    """As in `test_parity`, for two options whose values depend on the machine or on the family."""
    parallel: dict[str, Any] = {"strategy": "fsdp", "offload": {"optimizer": "nvme", "path": str(tmp_path)}}
    if way == "classes":
        parallel = {"strategy": "fsdp", "wrap": {"classes": ["LlamaMLP", "LlamaAttention"]}}
    batch = {"train__global_batch": MICRO_BATCH * world_size, "model__shape": {**FAMILIES["llama"], "positions": 512}}
    one = reference_run(small(instructions, "one", **batch))
    several = train_again_on(world_size, small(instructions, "several", parallel=parallel, **batch), tmp_path)
    hold_equal(several, one, bitwise=world_size == 2)


@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "fsdp"},
        slow({"strategy": "ddp"}),
        *(slow(split) if name == "tp" else split for name, split in SPLITS.items()),
    ],
    ids=str,
)
def test_packed_documents_train_the_same_on_two_ranks_and_on_one(parallel, instructions, tmp_path):
    shape = {**FAMILIES["llama"], "positions": 512}
    one = reference_run(small(instructions, "one", model__shape=shape, data__pack=True))
    two = train_again_on(
        2, small(instructions, "two", model__shape=shape, data__pack=True, parallel=parallel), tmp_path
    )
    hold_equal(two, one, bitwise="strategy" in parallel)


@pytest.mark.parametrize("schedule", ["1f1b", slow("interleaved"), slow("zero-bubble")])
def test_a_pipeline_is_bitwise_equal_to_one_process(schedule, text, tmp_path):
    """Sequences of text have one length, so nothing is padded. Untied: a tied embedding is summed in another order."""
    shape = {**FAMILIES["pythia"], "layers": PIPELINE_LAYERS, "positions": 512}
    config = {"model__shape": shape, "data__pack": True, "train__global_batch": 8}
    one = reference_run(small(text, "one", **config))
    two = train_again_on(2, small(text, "two", parallel={"pp": 2, "pp_schedule": schedule}, **config), tmp_path)
    hold_equal(two, one, bitwise=True)


@pytest.mark.slow  # over a padded one: below
@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_both_losses_are_the_same_over_a_sharded_vocabulary(loss, instructions, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.models.cross_entropy.CHUNK_LOGITS", 30 * 260)  # many chunks per micro-batch
    one = train_on(1, small(instructions, "one", train__loss_impl=loss), tmp_path)
    two = train_on(2, small(instructions, "two", train__loss_impl=loss, parallel={"tp": 2}), tmp_path)
    hold_equal(two, one, bitwise=False)


@pytest.mark.parametrize("loss", [slow("plain"), "chunked"])
@pytest.mark.parametrize(
    "parallel", [{"tp": 2}, *(slow(one) for one in ({"strategy": "fsdp"}, {"pp": 2}, {"cp": 2}))], ids=str
)
def test_a_padded_vocabulary_trains_the_same(parallel, loss, instructions, tmp_path, monkeypatch):
    """As on CUDA in low precision. 259 is odd: with tensor parallelism one rank pads more than the other."""
    shape = shape_of("gpt2", vocab=259)
    config = {"model__shape": shape, "train__loss_impl": loss}
    one = reference_run(small(instructions, "one", **config))

    def padded_chunks(weight: torch.Tensor, measure: Measure | None, **more: bool) -> Chunks:
        return choose_chunks(weight, measure, **more)._replace(columns=-(-len(weight) // 64) * 64)

    monkeypatch.setattr("shoal.models.loss.choose_chunks", padded_chunks)
    two = train_on(2, small(instructions, "two", parallel=parallel, **config), tmp_path)
    hold_equal(two, one, bitwise=False)


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}, {"cp": 2}], ids=str)
def test_head_and_loss_skip_the_tokens_of_prompts(parallel, instructions, tmp_path, monkeypatch):
    """Also of micro-batches that a pipeline or context parallelism has split."""
    computed: list[int] = []

    def measure(logits: torch.Tensor, labels: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        computed.append(len(logits))
        return measure_full_vocabulary(logits, labels, width)

    monkeypatch.setattr("shoal.models.cross_entropy.measure_full_vocabulary", measure)
    config = small(instructions, "run", train__loss_impl="chunked", train__steps=2, parallel=parallel)

    def train() -> int:
        api.train(api.config_from_mapping(config), runs=tmp_path)
        return sum(computed)

    total = sum(run_ranks(2 if parallel else 1, train))
    last = lines(tmp_path / "run")[-1]
    loss_tokens, tokens = last["loss_tokens"], last["tokens"]
    assert loss_tokens < 0.75 * tokens
    assert loss_tokens <= total < (loss_tokens + tokens) / 2


@pytest.mark.parametrize(
    "parallel", [slow({"strategy": "zero1"}), slow({"strategy": "fsdp"}), {"tp": 2}, slow({"pp": 2})], ids=str
)
def test_the_loss_scale_of_16_mixed_is_one_for_all_ranks(parallel, instructions, tmp_path):
    """The first scales overflow: all ranks skip the same steps as one process, and continue the same.

    (Not with `cp`: the gradient of a shard of a sequence is smaller, and overflows at a larger scale.)
    """
    shape = {**FAMILIES["llama"], "positions": 512}
    changes = {"model__shape": shape, "train__precision": "16-mixed", "train__lr": 1e-2, "train__steps": 6}
    changes["train__loss_scale"] = {"initial": 2.0**22}
    one = lines(train_again_on(1, small(instructions, "one", **changes), tmp_path))
    two = lines(train_again_on(2, small(instructions, "two", parallel=parallel, **changes), tmp_path))
    skipped = one[-1]["skipped"]
    assert 2 < skipped < 6
    assert [line["skipped"] for line in two] == [line["skipped"] for line in one]
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=2e-3)
    norms = [[line["grad_norm"] for line in some][skipped:] for some in (two, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with dropout of 0.1 everywhere."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 260}
    dropout = {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}
    GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=256, eos_token_id=257)).save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return folder


@pytest.mark.parametrize(
    ("parallel", "recompute"),
    [
        ({"strategy": "fsdp"}, "full"),
        slow({"strategy": "fsdp"}, "selective"),
        *(slow(split, kind) for split in ({"tp": 2}, {"cp": 2}) for kind in ("full", "selective")),
    ],
    ids=str,
)
def test_recomputation_repeats_the_dropout_masks(parallel, recompute, instructions, with_dropout, tmp_path):
    changes = {"model": {"from": str(with_dropout)}, "parallel": parallel}
    saved = reference_run(small(instructions, "saved", **changes), 2)
    recomputed = train_again_on(2, small(instructions, "recomputed", train__recompute=recompute, **changes), tmp_path)
    hold_equal(recomputed, saved, bitwise=True)


@pytest.mark.parametrize("parallel", [{"strategy": "ddp"}, *map(slow, SPLITS.values())], ids=str)
def test_dropout_trains_as_well_when_split(parallel, instructions, with_dropout, tmp_path):
    """Ranks draw different dropout masks, so only the training progress is comparable."""
    changes = {"model": {"from": str(with_dropout)}, "train__steps": 6}
    one = reference_run(small(instructions, "one", **changes))
    two = train_again_on(2, small(instructions, "two", parallel=parallel, **changes), tmp_path)
    found, wanted = ([line["loss"] for line in lines(run)] for run in (two, one))
    assert found != wanted
    assert found == pytest.approx(wanted, rel=0.03)


FROZEN = {
    "first stage frozen": {"model__freeze": ["model.embed_tokens.*", "model.layers.0.*"]},
    "learning rate of one block": {"train__lr_groups": {"model.layers.0.*": 0.5}, "train__clip": None},
    "lion, norms frozen": {"train__optimizer": {"name": "lion"}, "train__lr": 3e-4, "model__freeze": ["*norm*"]},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp": (2, {"pp": 2}),
    "fsdp_pp": (4, {"strategy": "fsdp", "pp": 2, "wrap": {"classes": ["LlamaDecoderLayer", "Embedding"]}}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "zero1": (2, {"strategy": "zero1"}),
    "tp": (2, {"tp": 2}),
}
QUICK = {("first stage frozen", "pp"), ("lion, norms frozen", "tp")}


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        (pytest.param if one in QUICK else slow)(FROZEN[one[0]], one[1], id=", ".join(one))
        for one in product(FROZEN, LAYOUTS)
    ],
)
def test_freezing_and_learning_rate_groups_do_not_depend_on_the_parallel_layout(
    changes, layout, instructions, tmp_path
):
    """A pipeline stage may have nothing to train, and no parameter that matches a pattern."""
    world_size, parallel = LAYOUTS[layout]
    shape = {**FAMILIES["llama"], "tied": False, "positions": 512}
    batch = {"model__shape": shape, "train__global_batch": 8, "train__micro_batch": 2}
    one = reference_run(small(instructions, "one", **batch, **changes))
    several = train_again_on(
        world_size, small(instructions, "several", parallel=parallel, **batch, **changes), tmp_path
    )
    hold_equal(several, one, bitwise=False)


def evaluations(run: Path) -> list[float]:
    found = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval_loss"] for line in found if "eval_loss" in line]


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, {"pp": 2, "pp_schedule": "interleaved"}),
        slow(2, {"tp": 2}),
        slow(2, {"strategy": "zero2"}),
        slow(4, {"pp": 2, "cp": 2}),
        *(slow(2, split) for name, split in SPLITS.items() if name != "tp"),
        slow(4, {"pp": 2, "tp": 2}),
        slow(4, {"strategy": "fsdp", "pp": 2}),
    ],
    ids=str,
)
def test_the_same_sequences_are_evaluated_however_the_model_is_split(world_size, parallel, instructions, tmp_path):
    """Seven sequences: some ranks, and some runs of a pipeline schedule, have nothing left to do."""
    layers = PIPELINE_LAYERS if "pp_schedule" in parallel else 2
    changes = {
        "model__shape": {**FAMILIES["llama"], "layers": layers, "positions": 512},
        "data__validation": 7 / 300,
        "train__global_batch": 8,
        "train__micro_batch": 2,
        "train__steps": 2,
        "eval": {"every": 1, "batches": 3},
    }
    one = reference_run(settings(instructions, name="one", **changes))
    several = train_again_on(world_size, settings(instructions, name="several", parallel=parallel, **changes), tmp_path)
    assert len(evaluations(one)) == 2
    assert evaluations(several) == pytest.approx(evaluations(one), rel=2e-6)


@pytest.mark.parametrize("compress", ["bf16", slow("fp16"), slow("powersgd")])
def test_compressed_gradients_train_nearly_the_same(compress, instructions, tmp_path):
    """Lossy, and so outside the bounds of `test_parity`; the first ten steps of powersgd are uncompressed."""
    steps = 20 if compress == "powersgd" else 8
    changes = {"train__steps": steps, "train__global_batch": 8, "train__micro_batch": 4}
    plain = reference_run(small(instructions, "plain", parallel={"strategy": "ddp"}, **changes), 2)
    parallel = {"strategy": "ddp", "compress": compress}
    lossy = train_again_on(2, small(instructions, "lossy", parallel=parallel, **changes), tmp_path)
    found, wanted = ([line["loss"] for line in lines(run)] for run in (lossy, plain))
    assert found[1:] != wanted[1:]
    assert found == pytest.approx(wanted, rel=1e-3 if compress != "powersgd" else 0.05)
    assert found[-1] < 0.9 * found[0]


def test_the_loss_of_the_reference_decreases(instructions, tmp_path):
    found = [line["loss"] for line in lines(train_again_on(1, small(instructions, "one", train__steps=10), tmp_path))]
    assert found[-1] < 0.9 * found[0]

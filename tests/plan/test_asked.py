"""What somebody asks `shoal plan --like` for when forecasting runs of others: their papers' models and options."""

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from shoal.plan.report import Plan
from shoal.plan.run.layout import Rank
from shoal.plan.systems.traits import SystemTraits

GPT3 = "model.shape={family: gpt2, hidden: 12288, layers: 96, heads: 96, vocab: 51200, positions: 2048}"


def asked(system: str, *overrides: str, traits: tuple[str, ...] = ()) -> Plan:
    config = api.load_config(None, ("data.max_length=2048", *overrides), planned=True)
    return api.plan(config, system=system, traits=traits)


def tokens(plan: Plan) -> float:
    return plan.choice.speed.tokens_per_second_per_gpu


def test_a_block_of_megatron_saves_what_its_paper_says() -> None:
    """34·s·b·h/t bytes with sequence parallelism and without the scores, s·b·h·(10 + 24/t) without it: table 2 of
    arXiv 2205.05198."""
    sharded, whole = (
        asked(
            "megatron@2022-05",
            GPT3,
            *("hardware.gpu=a100-80gb", "hardware.devices=8", "parallel.tp=8", "train.micro_batch=1"),
            *("train.recompute=attention", "model.attention=eager", "model.dropout=0.1", "train.precision=bf16-mixed"),
            f"parallel.sequence_parallel={sequence_parallel}",
        ).choice
        for sequence_parallel in ("true", "false")
    )
    hidden_states = 2048 * 12_288
    for choice, bytes_each in ((sharded, 34 / 8), (whole, 10 + 24 / 8)):
        rank: Rank = choice.memory.worst.rank
        saved = sum(moment.tree.find("activations").amount for moment in choice.memory.worst.moments[:1])
        assert saved / rank.blocks == pytest.approx(bytes_each * hidden_states, rel=0.05)


def test_frozen_weights_in_16_bits_are_not_cast_whatever_the_precision_is_called() -> None:
    shape = ("model.shape=llama2-7b", "adapter=lora", "hardware.gpu=h100-80gb", "hardware.devices=1")
    batch = ("data.max_length=256", "train.micro_batch=1", "train.global_batch=8")  # bound by the host
    mixed, narrow = (
        asked("huggingface", *shape, *batch, f"train.precision={one}") for one in ("bf16-mixed", "bf16-true")
    )
    assert tokens(mixed) == pytest.approx(tokens(narrow), rel=0.02)


def test_torchtitan_is_todays_unless_a_month_says_otherwise() -> None:
    def traits(month: str, gpu: str = "h100-80gb") -> SystemTraits:
        settings = ("model.shape=llama3-8b", f"hardware.gpu={gpu}", "hardware.devices=8")
        return asked(f"torchtitan{month}", *settings).choice.run.traits

    today, earlier = traits(""), traits("@2024-09")
    assert (today.loss_kernel, earlier.loss_kernel) == ("compiled", "never")
    for trait in ("repeats_keys", "flash2", "foreach_step"):
        assert (getattr(today, trait), getattr(earlier, trait)) == (False, True)
    # cuDNN's attention came first on Blackwell.
    assert traits("@2025-07").flash2
    assert not traits("@2025-07", "b200").flash2
    assert not traits("@2026-03").repeats_keys


def test_libraries_before_hopper_are_no_faster_on_it_than_the_first_ones() -> None:
    shape = ("model.shape=llama3-8b", "hardware.gpu=h100-80gb", "hardware.devices=8")
    assert tokens(asked("torchtitan@2022-06", *shape)) == tokens(asked("torchtitan@2023-06", *shape))


def test_only_some_systems_compute_the_logits_of_the_masked_tokens_alone() -> None:
    shape = ("model.shape=bert-large", "train.objective=masked_lm", "data.max_length=512", "hardware.devices=1")
    shares = {
        system: asked(system, *shape, "hardware.gpu=a100-80gb", "train.micro_batch=8").choice.run.head_share
        for system in ("huggingface", "nvidia-bert", "tensorflow", "shoal")
    }
    assert shares.pop("huggingface") == 1
    assert set(shares.values()) == {5 / 32}


def test_lamb_reads_weights_and_updates_for_their_norms() -> None:
    shape = (
        "model.shape=bert-large",
        "train.objective=masked_lm",
        "hardware.gpu=v100-32gb",
        "train.precision=16-mixed",
    )
    batch = ("data.max_length=128", "train.micro_batch=16", "train.global_batch=16")
    steps = {
        name: asked("nvidia-bert", *shape, *batch, f"train.optimizer.name={name}").choice.speed.step.find("optimizer")
        for name in ("lamb", "adamw")
    }
    assert steps["lamb"] is not None
    assert steps["adamw"] is not None
    assert 1.3 < steps["lamb"].amount / steps["adamw"].amount < 2


def test_a_base_of_8_bits_and_weights_of_fp16_can_be_forecast_and_not_trained() -> None:
    adapted = ("model.shape=llama2-7b", "hardware.gpu=a100-40gb", "adapter=qlora", "hardware.devices=1")
    four, eight = (asked("huggingface", *adapted, f"adapter.quantize={one}").choice.memory for one in ("nf4", "int8"))
    # Matrices of twice the size, which return what autocast has in 16 bits.
    assert (eight.allocated - four.allocated) / 2**30 > 1.5
    half = asked("huggingface", "model.shape=llama2-7b", "hardware.gpu=t4", "adapter=lora", "train.precision=fp16-true")
    assert half.choice.run.is_half
    for refused in ("adapter.quantize=int8", "train.precision=16-true", "train.optimizer.name=lamb"):
        with pytest.raises(UserMistake, match="is not built yet"):
            api.load_config(None, ("model.shape=llama2-7b", "adapter=qlora", refused))


def test_options_of_others_are_answered_with_ours() -> None:
    for given, answer in (
        ("train.optimizer.name=paged_adamw_8bit", "write name: adamw8bit and paged: true"),
        ("parallel.ep=8", "expert parallelism is neither built nor forecast"),
    ):
        with pytest.raises(UserMistake, match=answer):
            asked("huggingface", "model.shape=llama2-7b", given)
    with pytest.raises(UserMistake, match="--trait half has no value"):
        asked("huggingface", "model.shape=llama2-7b", traits=("half",))


@pytest.mark.parametrize(("sequence_parallel", "share"), [("true", 0.96), ("false", 0.75)])
def test_tensor_parallel_sums_of_megatron_overlap_with_matmuls(sequence_parallel: str, share: float) -> None:
    shape = (GPT3, "hardware.gpu=a100-80gb", "hardware.devices=8", "parallel.tp=8", "train.micro_batch=1")
    exposed = []
    for traits in ((), ("gathers_inputs_again=false",)):
        step = asked(
            "megatron", *shape, f"parallel.sequence_parallel={sequence_parallel}", traits=traits
        ).choice.speed.step
        found = step.find("tensor parallel")
        assert found is not None
        exposed.append(found.amount)
    assert exposed[0] < share * exposed[1]


@pytest.mark.parametrize(
    ("system", "model", "attention", "path"),
    [
        ("huggingface@2023-09", "llama2-7b", "auto", "scores"),
        ("huggingface@2023-09", "llama2-7b", "sdpa", "fused"),
        ("huggingface@2024-01", "llama2-7b", "auto", "fused"),
        ("deepspeed@2023-09", "gpt2", "auto", "scores"),
        ("axolotl@2023-09", "llama2-7b", "auto", "fused"),  # the flash-attn package
        ("huggingface", "bloom-7b1", "auto", "scores"),  # still
        ("megatron", "bloom-7b1", "auto", "fused"),
        ("nvidia-bert@2020-06", "bert-large", "auto", "scores"),
    ],
)
def test_attention_is_by_matmuls_where_transformers_had_no_other(
    system: str, model: str, attention: str, path: str
) -> None:
    objective = "masked_lm" if model.startswith("bert") else "causal_lm"
    wanted = (f"model.shape={model}", f"model.attention={attention}", f"train.objective={objective}")
    assert asked(system, *wanted, "hardware.gpu=a100-80gb", "data.max_length=512").choice.run.attention == path


def test_a_trait_may_be_empty() -> None:
    held, freed = (
        asked("transformers", "model.shape=gpt2", "hardware.gpu=h200", traits=(f"holds_outputs={one}",)).choice.run
        for one in ("next", "empty")
    )
    assert (held.traits.holds_outputs, freed.traits.holds_outputs) == ("next", "")


def test_an_encoder_with_tensor_parallelism_is_forecast_and_not_trained() -> None:
    run = ("model.shape=bert-large", "train.objective=masked_lm", "parallel.tp=2", "data.max_length=512")
    devices = ("hardware.gpu=a100-40gb", "hardware.devices=8")
    whole, halved = (
        asked(
            "megatron", *run, *devices, f"parallel.tp={degree}", "train.micro_batch=4", "train.global_batch=32"
        ).choice
        for degree in (1, 2)
    )
    assert halved.memory.allocated < whole.memory.allocated
    note = "shoal train does not accept this: parallel.tp 2 is for causal language models"
    assert any(one.startswith(note) for one in asked("shoal", *run, *devices).notes)
    with pytest.raises(UserMistake, match=r"parallel\.tp 2 is for causal language models"):
        api.load_config(None, run)


def test_fsdp_casts_what_autocast_would_and_an_embedding_then_returns_16_bits() -> None:
    run = ("model.shape=llama3-8b", "hardware.gpu=a100-80gb", "hardware.devices=8", "train.precision=bf16-mixed")
    batch = ("train.micro_batch=8", "train.global_batch=64", "train.recompute=full", "train.loss_impl=fused")
    sharded, replicated = (
        asked("huggingface", *run, *batch, f"parallel.strategy={strategy}").choice for strategy in ("fsdp", "ddp")
    )
    # Liger's example with bf16-mixed on eight A100 needs 46.8 GiB with 8 sequences of 8,192 tokens.
    tokens_of_a_rank, hidden, blocks = 8 * 2048, 4096, 32
    for choice, itemsize in ((sharded, 2), (replicated, 4)):
        inputs = choice.memory.worst.moments[0].tree.find("block inputs")
        assert inputs is not None
        assert inputs.amount == tokens_of_a_rank * hidden * blocks * itemsize
    assert not sharded.run.casts_weights
    assert replicated.run.casts_weights


def test_kernels_of_a_recomputed_forward_pass_are_launched_too() -> None:
    short = ("model.shape=gpt2", "hardware.gpu=a100-40gb", "data.max_length=128", "train.micro_batch=1")
    waits = [
        asked("megatron@2021-08", *short, f"train.recompute={recompute}").choice.speed.step_seconds
        for recompute in ("none", "full")
    ]
    assert waits[1] > 1.2 * waits[0]

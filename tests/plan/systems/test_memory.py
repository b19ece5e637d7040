"""Memory of other systems' code: terms that their sources state, checked against arithmetic by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.catalogue.gpus import GPUS
from shoal.catalogue.shapes import parameters
from shoal.config.mesh import Mesh
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.memory.head import head
from shoal.plan.memory.transient import left_by_forward
from shoal.plan.run.blocks import linears
from shoal.plan.run.run import FROZEN, Adapter, Run
from shoal.plan.systems.earlier import as_of, litgpt_of
from shoal.plan.systems.modelled import SYSTEMS
from shoal.plan.systems.traits import SystemTraits
from shoal.plan.terms import GIB, Term
from tests.plan.planning import make_run, plan

ROOT = Path(__file__).parents[3]
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The matrices of Llama 2's 32 blocks, and its head.
BLOCKS, HEAD = 32 * (4 * 4096**2 + 3 * 4096 * 11_008), 32_000 * 4096


def tuned(system: str, quantize: str | None = "nf4", *, targets: tuple[str, ...] = EVERY, **settings: Any) -> Run:
    """An adapter of a 7B model on an A100, as a system trains it."""
    settings = {"precision": "bf16-true", "compiled": False, "loss": "plain", "traits": SYSTEMS[system], **settings}
    adapter = Adapter(8, targets, quantize)
    return make_run("llama2-7b", "a100-80gb", adapter=adapter, trained=FROZEN, **settings)


def at(run: Run, moment: str, term: str) -> float:
    """A term in GiB at a moment; 0 if it has none."""
    trees: list[Term] = [one.tree for one in forecast_memory(run).worst.moments if one.name == moment]
    found = trees[0].find(term)
    return 0.0 if found is None else found.amount / GIB


def test_bitsandbytes_scales_are_on_every_rank_and_not_offloaded() -> None:
    sharded = tuned("huggingface", strategy="fsdp", mesh=Mesh(dp_shard=8))
    scales = BLOCKS * 4 / 64 / GIB
    assert at(sharded, "loss", "quantization scales") == pytest.approx(scales)
    assert at(sharded, "loss", "frozen") == pytest.approx((BLOCKS * 0.5 + 2 * 2 * HEAD) / 8 / GIB, rel=0.01)
    assert at(sharded.with_(offload="cpu"), "loss", "weights") == pytest.approx(scales)
    assert at(tuned("torchtune", strategy="fsdp", mesh=Mesh(dp_shard=8)), "loss", "quantization scales") == 0
    zero3 = tuned("deepspeed", strategy="zero3", mesh=Mesh(dp_shard=8), precision="bf16-mixed")
    assert at(zero3, "loss", "quantization scales") == pytest.approx(scales)


def test_a_head_that_is_upcast_returns_logits_in_fp32_unless_autocast_is_on() -> None:
    # The loss of transformers 5: the log-softmax and two gradients; the logits that the model returned are gone.
    logits = 2048 * 32_000 / GIB
    run = tuned("huggingface")
    upcast = run.with_(adapter=Adapter(8, EVERY, "nf4", upcasts=True))
    loop = upcast.with_(traits=replace(upcast.traits, autocasts=False))
    assert at(run, "loss", "logits and loss") == at(upcast, "loss", "logits and loss") == pytest.approx(12 * logits)
    assert at(loop, "loss", "logits and loss") == pytest.approx(14 * logits)


def test_a_loop_that_holds_the_outputs_has_the_logits_in_the_backward_pass() -> None:
    run = tuned("huggingface", recompute="full")
    loop = run.with_(traits=replace(run.traits, holds_outputs="step", logit_bytes=14.0))
    first, logits = "start of the backward pass", 2 * 2048 * 32_000 / GIB
    assert (at(run, first, "outputs"), at(loop, first, "outputs")) == (0, pytest.approx(logits))
    # With keys and values of all blocks; and until the next forward pass returns, in which there are no gradients yet.
    keys = 2 * 32 * 2048 * 4096 * 2 / GIB
    cached = run.with_(traits=replace(loop.traits, holds_outputs="next", caches_keys=True))
    assert at(cached, first, "outputs") == pytest.approx(logits + keys)
    assert at(cached, "loss", "outputs of the last micro-batch") == pytest.approx(keys)
    assert at(loop, "loss", "outputs of the last micro-batch") == 0


def test_gradients_of_materialized_scores_are_in_fp32_and_their_product_with_the_softmax_too() -> None:
    run = tuned("huggingface", length=4096, attention="scores", recompute="full")
    scores = 32 * 4096**2
    mlp = 4096 * 11_008 * 2 / GIB  # its three factors and a product are saved, and three gradients
    first, name = "start of the backward pass", "attention score gradients"
    saved = at(run, first, "recomputed block") - at(run.with_(attention="fused"), first, "recomputed block")
    assert saved == pytest.approx(6 * scores / GIB)
    # Three fp32 tensors in bf16, and no copy of the softmax in 16 bits any more; a result in fp16 is half as large.
    assert at(run, first, name) == pytest.approx(10 * scores / GIB - 7 * mlp)
    assert at(run.with_(precision="16-mixed"), first, name) == pytest.approx(8 * scores / GIB - 7 * mlp)
    fused = run.with_(traits=replace(run.traits, fused_softmax="always"), length=16_384)
    assert at(fused, first, name) == pytest.approx(2 * 16 * scores / GIB - 4 * 7 * mlp)


def test_trl_keeps_the_weights_under_adapters_in_fp32_and_autocast_copies_them() -> None:
    # A model of 6.74e9 parameters in 4 bytes; each layer saves the copy that it has computed with.
    trl, other = (tuned(name, None, precision="bf16-mixed", recompute="none") for name in ("trl", "huggingface"))
    assert at(trl, "loss", "frozen") == pytest.approx(2 * at(other, "loss", "frozen"))
    copies = "frozen weights in compute dtype"
    assert (at(trl, "loss", copies), at(other, "loss", copies)) == (pytest.approx(2 * BLOCKS / GIB), 0)
    assert (trl.residual_bytes, other.residual_bytes, tuned("trl", None).residual_bytes) == (4, 2, 2)
    checkpointed = trl.with_(recompute="full")
    assert at(checkpointed, "start of the backward pass", "recomputed block") > 2 * BLOCKS / 32 / GIB
    assert at(checkpointed, "loss", copies) == 0
    quantized = tuned("trl", precision="bf16-mixed")
    assert (quantized.frozen_bytes, quantized.casts_weights) == (2, False)


def test_what_a_recomputed_blocks_forward_pass_has_left_stays_reserved_beside_the_loss() -> None:
    # Where steps are not replayed (tests/plan/memory/test_fragmentation.py): DeepSpeed's.
    run = tuned("deepspeed", None, recompute="full", micro_batch=2)
    memory = forecast_memory(run)
    assert memory.worst.peak.name == "loss"
    # Three tensors of the MLP, and five of the residual stream's size.
    left = 4096 * 2 * (3 * 11_008 + 5 * 4096)
    more = memory.reserved - 1.02 * memory.allocated
    assert more == pytest.approx(left, rel=0.01)
    # Scores too, if they are materialized: the softmax, and a tensor in 16 bits.
    eager = run.with_(attention="scores", length=256, micro_batch=16)
    assert left_by_forward(eager) == pytest.approx(left + 4096 * 256 * 32 * 6)
    # Not if the loss's tensors fit these blocks: 32,000 logits in fp32 are less than a row of scores.
    assert left_by_forward(run.with_(attention="scores", length=2048)) == 0


def test_litgpt_quantizes_the_head_and_dequantizes_it_from_fp16() -> None:
    litgpt, other = tuned("litgpt", length=128), tuned("axolotl", length=128)
    saved = HEAD * (2 - 0.5625) / GIB
    assert at(other, "loss", "frozen") - at(litgpt, "loss", "frozen") == pytest.approx(saved, rel=0.01)
    # Two copies of it, when one of the logits' fp32 tensors is gone.
    again = (4 * HEAD - 4 * 128 * 32_000) / GIB
    assert at(litgpt, "loss", "dequantized head weight") == pytest.approx(again)
    assert at(tuned("litgpt", None, length=128), "loss", "dequantized head weight") == 0


def test_torchtunes_compiled_loss_has_no_fp32_logits() -> None:
    eager, compiled = (tuned("torchtune", None, loss="chunked", compiled=one) for one in (False, True))
    logits = 2048 * 32_000
    # Of every chunk the log-softmax, and two gradients of one; the hidden states of tokens with labels are gathered.
    assert at(eager, "loss", "logits chunk") * GIB == pytest.approx(logits * (4 + 8 / 8) + 2048 * 4096 * 2)
    # Before version 0.7 the logits of all tokens existed at once.
    earlier = eager.with_(traits=as_of("torchtune", eager.traits, (2025, 4), gpu=eager.gpu, model_type="llama"))
    assert at(earlier, "loss", "logits chunk") * GIB == pytest.approx(logits * (2 + 4 + 8 / 8))
    assert at(compiled, "loss", "logits chunk") * GIB == pytest.approx(logits * (2 + 2 / 8))


def test_unsloths_mlp_saves_its_factors_and_overwrites_them() -> None:
    fused, attention_only = tuned("unsloth"), tuned("unsloth", targets=("q_proj", "v_proj"))
    width = 2048 * 11_008 * 2 / GIB
    first = "backward of the first block"
    assert at(fused, first, "MLP gradients") == pytest.approx(width)
    assert at(attention_only, first, "MLP gradients") == pytest.approx(3 * width)


def test_autograd_functions_of_adapters_save_each_input_once_but_not_of_8_bit_layers() -> None:
    axolotl, peft = tuned("axolotl", None, length=1024), tuned("llama-factory", None, length=1024)
    each = 2 * 32 * 1024 / GIB
    assert at(axolotl, "loss", "linear inputs") == pytest.approx(2 * 4096 * each)
    assert at(peft, "loss", "linear inputs") == pytest.approx(6 * 4096 * each)
    # The factors alone, where PEFT's MLP also saves SiLU's output and the product.
    assert at(axolotl, "loss", "MLP intermediates") == pytest.approx(2 * 11_008 * each)
    assert at(peft, "loss", "MLP intermediates") == pytest.approx(4 * 11_008 * each)
    assert axolotl.trained_bytes == 4
    eight, peft = (run.with_(adapter=Adapter(8, EVERY, "int8")) for run in (axolotl, peft))
    assert at(eight, "loss", "MLP intermediates") == at(peft, "loss", "MLP intermediates")


def test_fused_adapters_are_pefts_unless_every_layer_of_a_function_has_one() -> None:
    # As allocated by Unsloth 2026.10.9 on an H200 (benchmarks/gpu/drawn_h200/unsloth.jsonl), compiled or not: without
    # adapters on the whole MLP it is transformers' own, and each of queries and values casts its input.
    each = 2 * 32 * 1024 / GIB
    for compiled in (False, True):
        some = tuned("unsloth", None, length=1024, targets=("q_proj", "v_proj"), compiled=compiled)
        assert at(some, "loss", "MLP intermediates") == pytest.approx(3 * 11_008 * each)
        assert at(some, "loss", "linear inputs") == pytest.approx(2 * 4096 * each)
        attention = tuned("unsloth", None, length=1024, targets=EVERY[:4], compiled=compiled)
        assert at(attention, "loss", "MLP intermediates") == pytest.approx(3 * 11_008 * each)
        assert at(attention, "loss", "linear inputs") == pytest.approx(4096 * each)
    # Dropout leaves all of them to PEFT.
    every = tuned("unsloth", None, length=1024)
    dropped = every.with_(adapter=Adapter(8, EVERY, dropout=True))
    factors = [at(run, "loss", "MLP intermediates") / (11_008 * each) for run in (every, dropped)]
    assert factors == pytest.approx([2, 3])
    # Not axolotl's, since August 2026.
    july = as_of("axolotl", SYSTEMS["axolotl"], (2026, 7), gpu=every.gpu, model_type="llama")
    systems = SYSTEMS["unsloth"], SYSTEMS["axolotl"], july
    assert [dropped.with_(traits=one).fuses_adapter("q_proj") for one in systems] == [False, True, False]


def test_adapters_of_dora_and_of_experts_are_pefts() -> None:
    every = tuned("unsloth", None)
    assert every.fuses_adapter("gate_proj")
    assert not every.with_(adapter=Adapter(8, EVERY, dora=True)).fuses_adapter("gate_proj")
    experts = make_run("qwen3-30b-a3b", adapter=Adapter(8, EVERY), trained=FROZEN, traits=every.traits)
    assert experts.fuses_adapter("q_proj")
    assert not experts.fuses_adapter("gate_proj")


def test_megatrons_own_loss_copies_the_logits_to_fp32() -> None:
    def each(system: str, precision: str) -> float:
        run = make_run("llama2-7b", precision=precision, loss="plain", traits=SYSTEMS[system])
        found = head(run).peak.find("logits and loss")
        assert found is not None
        return found.amount / (run.tokens * 32_000)

    assert (each("megatron", "bf16-mixed"), each("megatron", "32-true")) == (6, 8)
    # Its fused loss, as torch.compile makes it, has softmax and gradient in fp32 beside the gradient in bf16.
    assert (each("nemo", "bf16-mixed"), each("nemo", "32-true")) == (10, 10)


def test_attention_may_get_and_return_padded_copies() -> None:
    run = tuned("unsloth", None, length=1024)
    padded = run.with_(traits=replace(run.traits, pads_attention=True))
    # 128 more queries, keys, values and outputs for every 1,024; and the output without them, for the next layer.
    copies = 32 * 1024 * 4096 * 2 * (4 * 128 / 1024 + 1) / GIB
    assert at(padded, "loss", "attention padding") == pytest.approx(copies)
    assert at(run, "loss", "attention padding") == 0


def test_unsloths_loss_holds_logits_of_256_mib_and_before_of_up_to_4_gib_in_fp32() -> None:
    run = tuned("unsloth", length=8192, loss="fused")
    assert at(run, "loss", "logits chunk") == pytest.approx(2048 * 32_000 * 4 / GIB)
    small = run.with_(length=1024)
    assert at(small, "loss", "logits chunk") == pytest.approx(1024 * 32_000 * 4 / GIB)
    one = run.with_(traits=as_of("unsloth", run.traits, (2026, 9), gpu=run.gpu, model_type="llama"))  # 1 GiB
    assert at(one, "loss", "logits chunk") == pytest.approx(8192 * 32_000 * 2 / GIB)
    five = one.with_(micro_batch=5)  # 4.9 GiB: four parts
    assert at(five, "loss", "logits chunk") == pytest.approx(5 * 8192 / 4 * 32_000 * 2 / GIB)


def test_unsloths_qlora_of_llama_3_8b_takes_what_was_measured_on_an_h200() -> None:
    # benchmarks/gpu/adapters_h200/unsloth.json, under the Trainer: with the model's own loss
    traits = replace(SYSTEMS["unsloth"], flash2=False, fused_rows="4 GiB")
    run = tuned("unsloth", length=2048, micro_batch=4, loss="fused", recompute="offload", traits=traits)
    adapter = Adapter(16, EVERY, "nf4", double_quantized=True)
    run = run.with_(shape=make_run("llama3-8b").shape, adapter=adapter, compiled=True)
    assert forecast_memory(run).allocated / GIB == pytest.approx(8.04, rel=0.01)


def test_reentrant_checkpoints_hold_the_output_of_the_block_that_they_recomputed() -> None:
    run = tuned("llama-factory", length=1024, recompute="full")
    first = "backward of the first block"
    assert at(run, first, "block output") == pytest.approx(1024 * 4096 * 2 / GIB)
    other = run.with_(traits=replace(run.traits, reentrant=False))
    assert at(other, first, "block output") == at(run.with_(recompute="none"), first, "block output") == 0


def test_megatrons_block_is_that_of_its_paper_compiled_or_not() -> None:
    # 34 bytes per token and channel without scores (Korthikanti et al. 2022, equation 1), of GPT-2's block.
    run = make_run("gpt2", traits=SYSTEMS["megatron"], dropout=True, compiled=False)
    kept = at(run, "forward pass", "activations") * GIB / (run.tokens * 768 * 12)
    assert kept == pytest.approx(34, rel=0.01)


def test_shorter_sequences_leave_blocks_that_stay_reserved_until_the_device_is_full() -> None:
    settings = [
        *("model.shape=llama3-8b", "adapter.kind=lora", "data.max_length=4096", "train.micro_batch=2"),
        *("train.loss_impl=plain", "train.recompute=full"),
    ]

    def reserved(*more: str, gpu: str = "h200", system: str = "huggingface", traits: Sequence[str] = ()) -> float:
        found = plan(*settings, f"hardware.gpu={gpu}", *more, system=system, traits=traits).as_dict()["memory"]
        return float(found["reserved_gib"])

    packed, padded = reserved("data.pack=true"), reserved("data.pack=false")
    assert padded - packed > 0.65 * 12 * 8192 * 128_256 / GIB
    assert reserved("data.pack=false", gpu="a100-40gb") < 39.5
    # Sequences of one length leave the same blocks.
    assert reserved("data.pack=false", traits=("pads_to_length=true",)) == packed
    # Expandable segments grow instead.
    assert reserved("data.pack=false", system="shoal") == reserved("data.pack=true", system="shoal")


def test_linear_layers_of_experts_are_quantized_too_while_experts_have_them() -> None:
    settings = ("model.shape=mixtral-8x7b", "hardware.gpu=b200", "adapter.kind=qlora", "train.micro_batch=1")
    each = []
    for system in ("axolotl@2025-09", "axolotl"):
        found = plan(*settings, system=system)
        weights = found.as_dict()["memory"]["terms"]["weights"]["frozen"]
        each.append(weights * GIB / parameters(found.choice.run.shape))
    # In transformers 5 all experts of a block are two tensors, which bitsandbytes leaves in 16 bits.
    assert each == [pytest.approx(0.57, abs=0.02), pytest.approx(1.96, abs=0.02)]


def test_memory_that_is_planned_ahead_has_no_gaps() -> None:
    run = make_run("tinyllama-1.1b", strategy="ddp", mesh=Mesh(dp_shard=8), traits=SystemTraits())
    planned = forecast_memory(run.with_(traits=SystemTraits(planned_memory=True)))
    assert planned.reserved == planned.allocated
    assert forecast_memory(run).reserved > forecast_memory(run).allocated


def test_accelerate_accumulates_unsharded_gradients_in_16_bits() -> None:
    run = make_run("llama2-7b", strategy="fsdp", mesh=Mesh(dp_shard=8), grad_accum_steps=4, loss="plain")
    held = at(run.with_(traits=SYSTEMS["huggingface"]), "loss", "unreduced gradients")
    assert held * GIB == pytest.approx(2 * parameters(run.shape))


def test_quantized_layers_return_fp32_if_the_rest_is_upcast() -> None:
    narrow = tuned("llama-factory", length=1024)
    assert narrow.adapter is not None
    wide = narrow.with_(adapter=replace(narrow.adapter, upcasts=True))
    # Both factors of the MLP and SiLU's output; the input of the last adapter, which autocast casts.
    for run, factors in ((narrow, 2), (wide, 4)):
        expected = 32 * 1024 * 11_008 * (3 * factors + 2) / GIB
        assert at(run, "loss", "MLP intermediates") == pytest.approx(expected)
    assert at(wide, "loss", "head weight in compute dtype") == pytest.approx(2 * HEAD / GIB)
    assert at(narrow, "loss", "head weight in compute dtype") == 0
    # Without autocast, attention and the adapters' inputs are in fp32 too, and so is the head.
    bare = wide.with_(traits=replace(wide.traits, autocasts=False))
    each = 32 * 1024 * 4096 / GIB
    assert at(bare, "loss", "queries, keys, values") == pytest.approx(3 * 4 * each)
    assert at(bare, "loss", "linear inputs") == pytest.approx(6 * 4 * each)
    assert at(bare, "loss", "head weight in compute dtype") == 0


def test_early_bitsandbytes_saves_the_inputs_of_quantized_layers() -> None:
    new = tuned("llama-factory", length=1024)
    old = new.with_(traits=replace(new.traits, quantized_keep_inputs=True))
    each = 2 * 32 * 1024 / GIB  # bytes per column and 16-bit element, of all blocks
    # PEFT casts the inputs of its six other layers one by one; the frozen ones share the outputs of both norms.
    assert at(new, "loss", "linear inputs") == pytest.approx(6 * 4096 * each)
    assert at(old, "loss", "linear inputs") == pytest.approx(8 * 4096 * each)
    more = at(old, "loss", "MLP intermediates") - at(new, "loss", "MLP intermediates")
    assert more == pytest.approx(11_008 * each)
    # In 8 bits they are saved to this day, and were in 8 bits too before 0.45.
    new = new.with_(adapter=Adapter(8, EVERY, "int8"))
    old = new.with_(traits=replace(new.traits, int8_layouts=True))
    assert at(new, "loss", "linear inputs") == pytest.approx(8 * 4096 * each)
    assert at(old, "loss", "linear inputs") == pytest.approx(9 * 4096 * each)


def test_adapters_in_the_dtype_of_the_layer_share_its_input() -> None:
    own = tuned("llama-factory", None, length=1024)
    shared = own.with_(traits=replace(own.traits, narrow_adapters=True))
    each = 2 * 32 * 1024 * 4096 / GIB
    assert at(own, "loss", "linear inputs") == pytest.approx(6 * each)
    assert at(shared, "loss", "linear inputs") == pytest.approx(2 * each)


def test_accelerate_casts_the_logits_that_a_model_returns() -> None:
    held, fused = (tuned("unsloth", loss=loss, compiled=True) for loss in ("plain", "fused"))
    assert at(held, "loss", "logits and loss") == pytest.approx(2048 * 32_000 * (2 + 4) / GIB)
    assert at(fused, "loss", "logits and loss") == 0


def test_reentrant_checkpoints_of_frozen_fsdp_units_keep_inputs_and_their_gradients() -> None:
    late = "backward of the first block"
    run = tuned("trl", None, strategy="fsdp", mesh=Mesh(dp_shard=2), recompute="full")
    reentrant = run.with_(traits=replace(run.traits, reentrant=True))
    each = 2048 * 4096 * 2 / GIB
    assert at(reentrant, late, "inputs of frozen blocks and their gradients") == pytest.approx(31 * 2 * each)
    others = (
        run,  # transformers 5
        reentrant.with_(strategy="ddp"),
        reentrant.with_(recompute="none"),
        reentrant.with_(adapter=None),  # trained units have hooks of their own
    )
    assert [at(one, late, "inputs of frozen blocks and their gradients") for one in others] == [0, 0, 0, 0]


def test_a_loss_kernel_may_follow_an_upcast() -> None:
    run = tuned("unsloth", loss="plain")
    wide = run.with_(traits=replace(run.traits, kernel_logit_bytes=8.0))
    assert at(wide, "loss", "logits and loss") == pytest.approx(2048 * 32_000 * 8 / GIB)


def test_deepspeeds_step_flattens_gradients_and_casts_them_to_fp32() -> None:
    run = make_run("llama2-7b", strategy="zero2", mesh=Mesh(dp_shard=8), loss="plain", traits=SYSTEMS["deepspeed"])
    own = parameters(run.shape) / 8
    assert at(run, "optimizer step", "optimizer temporaries") * GIB == pytest.approx(own * (2 + 4))
    # ZeRO-3 does so with a billion elements at a time.
    zero3 = run.with_(strategy="zero3", mesh=Mesh(dp_shard=2))
    assert at(zero3, "optimizer step", "optimizer temporaries") * GIB == pytest.approx(1e9 * (2 + 4))
    assert at(run.with_(offload="optimizer"), "optimizer step", "optimizer temporaries") == 0


def test_matmuls_of_gptq_save_the_dequantized_matrices_of_a_block() -> None:
    nf4, gptq = (tuned("huggingface", quantize, recompute="full") for quantize in ("nf4", "gptq"))
    stored = [at(run, "loss", "frozen") * GIB - 2 * 2 * HEAD for run in (nf4, gptq)]
    assert stored == [pytest.approx(BLOCKS * each, rel=0.01) for each in (0.5625, 0.5195)]
    block, largest = BLOCKS / 32, 4096 * 11_008
    needed = [at(run, "start of the backward pass", "gathered weights") * GIB for run in (nf4, gptq)]
    assert needed == [2 * largest, 2 * block]


def test_a_loop_that_holds_the_logits_holds_what_bitsandbytes_kept() -> None:
    term = "inputs and logits of the last micro-batch"
    earlier = replace(SYSTEMS["litgpt"], **litgpt_of((2024, 6)))
    run, today = tuned("litgpt", length=512, traits=earlier), tuned("litgpt", length=512)
    # The inputs of all quantized layers; old and new logits; and the head, dequantized to fp16 and cast.
    inputs, logits = 32 * 512 * (3 * 4096 + 11_008) * 2, 512 * 32_000 * 4
    assert at(run, "forward pass", term) * GIB == pytest.approx(inputs + 2 * logits + 4 * HEAD)
    # Since January 2025 these inputs are freed, and bitsandbytes 0.50 dequantizes to what the matmul reads.
    assert at(today, "forward pass", term) * GIB == pytest.approx(2 * logits + 2 * HEAD)
    largest = 4096 * 11_008
    for moment, copies in (("forward pass", 1), ("start of the backward pass", 2)):
        assert at(today, moment, "gathered weights") * GIB == pytest.approx(2 * copies * largest)
    lora = tuned("litgpt", None, length=512)
    assert at(lora, "forward pass", term) * GIB == pytest.approx(2 * logits)
    assert at(run.with_(varied_lengths=True), "forward pass", term) == 0
    assert at(tuned("huggingface", length=512), "forward pass", term) == 0


def test_autocasts_copies_of_checkpointed_blocks_are_gone_when_the_loss_has_its_gradients() -> None:
    settings = {"precision": "bf16-mixed", "compiled": False, "loss": "plain", "traits": SYSTEMS["huggingface"]}
    run = make_run("llama3.2-1b", "h200", length=1024, micro_batch=8, **settings)
    checkpointed = run.with_(recompute="full")
    blocks = 16 * sum(one.parameters for one in linears(run.shape)) * 2
    logits = run.tokens * run.shape.vocab
    copies = [at(one, "loss", "compute copies") * GIB for one in (run, checkpointed)]
    assert copies[0] - copies[1] == pytest.approx(blocks, rel=0.01)
    assert at(checkpointed, "loss", "logits and loss") * GIB == 12 * logits
    # With few tokens they are more than the loss's last tensor, so that the peak is in the forward pass.
    few = checkpointed.with_(micro_batch=1, length=256)
    assert at(few, "loss", "compute copies") * GIB == pytest.approx(copies[0])
    assert at(few, "loss", "logits and loss") * GIB == 10 * few.tokens * few.shape.vocab


def test_accelerate_upcasts_the_shards_of_trained_weights() -> None:
    run = make_run("llama3-8b", strategy="fsdp", mesh=Mesh(dp_shard=2), precision="bf16-true", recompute="full")
    axolotl = run.with_(traits=SYSTEMS["axolotl"], compiled=False, loss="plain", reduce_bytes=2)
    own = parameters(run.shape) / 2
    assert at(axolotl, "optimizer step", "weights") * GIB == pytest.approx(4 * own)
    assert at(axolotl, "optimizer step", "optimizer state") * GIB == pytest.approx(8 * own)
    # Not those of one device, nor frozen ones.
    single = axolotl.with_(strategy="single", mesh=Mesh())
    assert at(single, "optimizer step", "weights") * GIB == pytest.approx(2 * 2 * own)
    frozen = tuned("axolotl", None, strategy="fsdp", mesh=Mesh(dp_shard=2))
    assert at(frozen, "loss", "frozen") * GIB == pytest.approx(parameters(frozen.shape), rel=0.001)


def test_the_trainer_upcasts_the_shards_of_a_16_bit_model_which_fsdp_casts_back() -> None:
    run = make_run("llama3-8b", "h100-80gb", strategy="fsdp", mesh=Mesh(dp_shard=8), traits=SYSTEMS["huggingface"])
    loaded = run.with_(precision="bf16-true", compiled=False, loss="plain")
    assert (loaded.weight_bytes, loaded.residual_bytes, loaded.casts_weights) == (4, 2, False)
    assert loaded.with_(strategy="ddp").weight_bytes == 2


def test_ligers_loss_holds_the_logits_of_a_part_and_some_versions_three_gradients_of_the_weight() -> None:
    run = make_run("llama3-8b", "h100-80gb", micro_batch=4, length=1024, loss="fused", traits=SYSTEMS["huggingface"])
    run, matrix = run.with_(precision="bf16-true"), run.shape.vocab * run.shape.hidden
    assert at(run, "loss", "logits chunk") == pytest.approx(128 * run.shape.vocab * 6 / GIB)
    summed = run.with_(traits=replace(run.traits, sums_head_gradient=True))
    gradients = [at(one, "loss", "head weight gradient") for one in (run, summed)]
    assert gradients == [pytest.approx(matrix * 2 / GIB), pytest.approx(matrix * (2 + 2 + 4) / GIB)]


def test_checkpoints_around_a_model_that_caches_keys_hold_them() -> None:
    run = tuned("huggingface", None, recompute="full")
    cached = run.with_(traits=replace(run.traits, caches_keys=True))
    assert at(cached, "loss", "cached keys and values") == pytest.approx(32 * 2048 * 2 * 4096 * 2 / GIB)
    assert at(run, "loss", "cached keys and values") == 0
    assert at(cached.with_(recompute="none"), "loss", "cached keys and values") == 0


def test_copies_that_autocast_makes_are_gone_when_the_optimizer_steps() -> None:
    traits = SYSTEMS["huggingface"]
    run = make_run("llama3.2-1b", precision="bf16-mixed", traits=traits, compiled=False, loss="plain")
    weights = parameters(run.shape) * 2 / GIB
    assert at(run, "loss", "compute copies") == pytest.approx(weights, rel=0.01)
    assert at(run, "start of the backward pass", "compute copies") == at(run, "loss", "compute copies")
    one = at(run, "loss", "compute copies") / run.shape.layers
    assert at(run, "backward of the first block", "compute copies") == pytest.approx(one)
    assert not at(run, "optimizer step", "compute copies")
    # A recomputed block makes its own again, after the context of autocast has ended.
    assert at(run.with_(recompute="full"), "start of the backward pass", "compute copies") == pytest.approx(one)
    # Ours are made once per step, and stay.
    ours = run.with_(traits=SYSTEMS["shoal"])
    assert at(ours, "optimizer step", "compute copies") == pytest.approx(weights, rel=0.01)


def test_a_softmax_that_is_written_out_saves_its_exponentials_too() -> None:
    traits = SYSTEMS["by-hand"]
    run = make_run("llama3.2-1b", attention="scores", compiled=False, traits=traits, precision="32-true")
    written = run.with_(traits=replace(traits, written_out=True))
    inner = run.tokens * run.shape.ffn * 4 * run.shape.layers / GIB
    assert at(written, "loss", "attention scores") == 2 * at(run, "loss", "attention scores")
    assert at(written, "loss", "MLP intermediates") == pytest.approx(at(run, "loss", "MLP intermediates") + inner)
    # Under autocast the exponentials are in fp32, and their quotient is cast, as a softmax is.
    mixed, both = (one.with_(precision="bf16-mixed") for one in (run, written))
    assert at(both, "loss", "attention scores") == at(mixed, "loss", "attention scores")


def test_a_gelu_that_is_written_out_saves_fp32_tensors_under_autocast() -> None:
    run = make_run("gpt2", compiled=False, precision="bf16-mixed", traits=SYSTEMS["huggingface"])
    each = run.tokens * run.shape.ffn * run.shape.layers / GIB
    # Its input and tanh and one more than that in fp32, half of its input and its result in bf16.
    assert at(run, "loss", "MLP intermediates") == pytest.approx((3 * 4 + 2 * 2) * each)
    assert at(run.with_(precision="bf16-true"), "loss", "MLP intermediates") == pytest.approx(5 * 2 * each)
    # DeepSpeed has no autocast.
    assert at(run.with_(traits=SYSTEMS["deepspeed"]), "loss", "MLP intermediates") == pytest.approx(5 * 2 * each)
    assert at(run.with_(compiled=True, traits=SYSTEMS["shoal"]), "loss", "MLP intermediates") == pytest.approx(4 * each)


def test_a_gelu_by_its_definition_saves_two_tensors_more() -> None:
    run = make_run("bert-large", compiled=False, precision="bf16-true", traits=SYSTEMS["deepspeed"])
    each = 2 * run.tokens * run.shape.ffn * run.shape.layers / GIB
    written = run.with_(traits=replace(run.traits, erf_gelu=True))
    assert at(run, "loss", "MLP intermediates") == pytest.approx(2 * each)
    assert at(written, "loss", "MLP intermediates") == pytest.approx(4 * each)


def test_cublas_workspaces_are_allocated_for_both_threads() -> None:
    def workspaces(gpu: str, traits: SystemTraits = SYSTEMS["huggingface"]) -> float:
        return at(make_run("gpt2", gpu, traits=traits), "optimizer step", "matmul workspaces") * 1024

    assert workspaces("h200") == 2 * 32
    assert workspaces("rtx4090") == workspaces("t4") == 2 * 8.125
    # Before PyTorch 2 they were cuBLAS's own; XLA has none; and a CPU neither.
    assert not workspaces("v100-32gb", replace(SYSTEMS["huggingface"], software=2022))
    assert not workspaces("a100-80gb", replace(SYSTEMS["huggingface"], planned_memory=True))
    assert not workspaces("cpu")
    # hipBLAS's, and hipBLASLt's, since 2025.
    assert workspaces("mi300x") == 2 * 128 + 76
    assert workspaces("mi250") == workspaces("mi355x") == 2 * 32 + 76
    assert not workspaces("mi300x", replace(SYSTEMS["huggingface"], software=2024))


def test_transformer_engine_keeps_its_weights_in_fp8_too() -> None:
    run = make_run("llama2-7b", "h100-80gb", traits=SYSTEMS["megatron"], precision="fp8", strategy="zero1")
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) / GIB
    assert at(run, "optimizer step", "weights in fp8") == pytest.approx(2 * matrices)
    # Blackwell multiplies fp8 matrices of any layout.
    assert at(run.with_(gpu=GPUS["b200"]), "optimizer step", "weights in fp8") == pytest.approx(matrices)
    assert not at(run.with_(precision="bf16-mixed"), "optimizer step", "weights in fp8")


LOOP = replace(SYSTEMS["deepspeed"], masters_with_optimizer=False, holds_outputs="next", caches_keys=True)


def test_a_loop_that_holds_the_outputs_has_keys_and_values_of_the_step_before() -> None:
    settings: dict[str, Any] = {"precision": "bf16-true", "compiled": False, "loss": "plain"}
    llama = make_run("llama3.2-1b", traits=replace(LOOP, logit_bytes=14.0), **settings)
    each = 2 * llama.tokens * llama.shape.layers / GIB
    logits = 2 * llama.tokens * llama.shape.vocab / GIB
    keys = 2 * llama.shape.kv_width * each
    assert at(llama, "loss", "outputs of the last micro-batch") == pytest.approx(keys)
    for moment in ("backward of the first block", "embedding gradient", "optimizer step"):
        assert at(llama, moment, "outputs") == pytest.approx(logits + keys)
    # Activation checkpointing by the model returns none.
    checkpointed = llama.with_(recompute="full", traits=replace(llama.traits, caches_keys=False))
    assert not at(checkpointed, "loss", "outputs of the last micro-batch")
    # Views hold all that their layer returned; rotated keys are tensors of their own.
    gpt2, neox = (make_run(name, traits=LOOP, **settings) for name in ("gpt2", "pythia-410m"))
    assert at(gpt2, "loss", "outputs of the last micro-batch") * GIB == 3 * 768 * 2 * gpt2.tokens * 12
    assert at(neox, "loss", "outputs of the last micro-batch") * GIB == 4 * 1024 * 2 * neox.tokens * 24
    wide = neox.with_(traits=replace(LOOP, wide_rotary=True))
    assert at(wide, "loss", "outputs of the last micro-batch") * GIB == (3 * 2 + 4) * 1024 * neox.tokens * 24


def test_queries_and_keys_that_are_rotated_in_fp32_are_saved_so_unless_a_kernel_casts_them() -> None:
    fused = make_run("pythia-410m", traits=LOOP, precision="bf16-true", compiled=False)
    scores = fused.with_(attention="scores")
    each = fused.tokens * 1024 * 24 / GIB
    for run, more in ((fused, 4), (scores, 2 * 2)):
        wide = run.with_(traits=replace(LOOP, wide_rotary=True))
        before, after = (at(one, "loss", "queries, keys, values") for one in (run, wide))
        assert after == pytest.approx(before + more * each)
    llama = make_run("llama3.2-1b", traits=LOOP, precision="bf16-true", compiled=False)
    assert forecast_memory(llama.with_(traits=replace(LOOP, wide_rotary=True))).allocated == (
        forecast_memory(llama).allocated
    )


def test_blocks_of_earlier_versions_keep_a_causal_mask_of_all_positions() -> None:
    run = make_run("gpt2", traits=replace(LOOP, mask_buffers=True), precision="bf16-true", compiled=False)
    assert at(run, "loss", "causal masks") * GIB == 1024**2 * 12
    assert not at(run.with_(traits=LOOP), "loss", "causal masks")
    llama = make_run("llama3.2-1b", traits=run.traits)
    assert not at(llama, "loss", "causal masks")


def test_the_matmuls_of_a_head_need_its_gradient_beside_that_of_the_logits() -> None:
    """If the loss needs little: the sum of the logits."""
    traits = replace(LOOP, holds_outputs="", loss_kernel="always", kernel_logit_bytes=4.0)
    run = make_run("gpt2", traits=traits, precision="bf16-true", compiled=False, loss="plain", length=256)
    vocabulary = 50_257
    assert at(run, "loss", "head weight gradient") * GIB == vocabulary * 768 * 2
    assert at(run, "loss", "logits gradient") * GIB == run.tokens * vocabulary * 2
    # With 12 bytes per logit and more tokens, the loss is the peak.
    plain = run.with_(traits=replace(traits, loss_kernel="never", logit_bytes=12.0), length=1024)
    assert at(plain, "loss", "logits and loss") * GIB == plain.tokens * vocabulary * 12
    assert not at(plain, "loss", "logits gradient")


def test_the_gradient_of_a_tied_embedding_is_added_to_the_head_s() -> None:
    run = make_run("gpt2", traits=LOOP, precision="bf16-true", compiled=False)
    table = "embedding gradient before accumulation"
    assert at(run, "embedding gradient", table) * GIB == pytest.approx((50_257 + 1024) * 768 * 2)
    untied = make_run("llama2-7b", traits=LOOP, precision="bf16-true", compiled=False)
    assert not at(untied, "embedding gradient", table)


def test_a_swiglu_that_multiplies_again_saves_its_factors_alone() -> None:
    traits = replace(LOOP, fused_activation=True)
    run = make_run("tinyllama-1.1b", traits=traits, precision="bf16-true", compiled=False)
    again = run.with_(traits=replace(traits, multiplies_again=True))
    each = run.tokens * run.shape.ffn * 2 * run.shape.layers / GIB
    assert at(run, "loss", "MLP intermediates") == pytest.approx(3 * each)
    assert at(again, "loss", "MLP intermediates") == pytest.approx(2 * each)


COMPILED = replace(SYSTEMS["autocast"], loss_kernel="compiled", pads_vocabulary=True)


def test_a_compiled_model_that_returns_its_logits_has_zeros_for_their_gradient() -> None:
    def logits(**traits: Any) -> float:
        run = make_run("llama3.2-1b", micro_batch=8, compiled=True, loss="plain", traits=replace(COMPILED, **traits))
        held = at(run, "loss", "logits and loss") or at(run, "loss", "logits gradient")
        return held * GIB / (run.tokens * run.shape.vocab)

    assert logits() == pytest.approx(4)
    # Before PyTorch 2.5 the labels were a sparse matrix in fp32.
    assert logits(software=2023) == pytest.approx(8)
    # As one graph with the model, the gradient is written over logits that are not returned, since PyTorch 2.6.
    whole = {"compiles_loss": True}
    assert logits(**whole) == pytest.approx(2)
    assert logits(**whole, software=2024) == pytest.approx(4)
    assert logits(**whole, returns_logits=True) == pytest.approx(6)
    assert logits(**whole, returns_logits=True, software=2023) == pytest.approx(10)
    runs = json.loads((ROOT / "benchmarks" / "gpu" / "compiled_loss_h200" / "compiled_loss.json").read_text())["memory"]
    returned, alone = (
        [one["allocated_gib"] for one in runs if one["compiled"] and one["returns"] is returns and not one["sums"]]
        for returns in (True, False)
    )
    more = (returned[1] - returned[0]) - (alone[1] - alone[0])
    assert more * GIB / (16 * 1024 * 50_304) == pytest.approx(6 - 2, rel=0.01)
    # Kernels by hand have neither, and some write over the logits.
    assert logits(loss_kernel="always", loss_in_place=True) == pytest.approx(2)
    assert logits(software=2023, loss_kernel="always") == pytest.approx(4)


def test_encoders_of_transformers_do_not_upcast_their_logits():
    run = make_run("bert-large", compiled=False, precision="bf16-true", loss="plain", traits=SYSTEMS["huggingface"])
    logits = run.tokens * run.shape.vocab
    found = [head(one).peak.find("logits and loss") for one in (run, run.with_(precision="bf16-mixed"))]
    assert [one.amount / logits for one in found if one] == [6, 12]


def test_ligers_kernels_do_not_fuse_eager_attention() -> None:
    settings = ("model.shape=llama3.2-1b", "hardware.gpu=h200", "data.max_length=4096", "model.attention=eager")

    def asked(fused: str, system: str) -> dict[str, Any]:
        return plan(*settings, "train.micro_batch=1", f"train.compile={fused}", system=system).as_dict()

    eager, liger = asked("false", "huggingface"), asked("true", "huggingface")
    compiled = asked("true", "autocast")
    saved = [one["memory"]["terms"]["activations"]["attention scores"] for one in (eager, liger, compiled)]
    assert saved[0] == saved[1] > 0
    spent = [one["speed"]["terms"]["attention"] for one in (eager, liger, compiled)]
    assert spent[0] == pytest.approx(spent[1], rel=0.02)
    assert spent[2] < 0.7 * spent[1]

"""Forecast activations of a block with PEFT's adapters, compared with what autograd saves in a real one."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.catalogue.gpus import LINKS, find_gpu
from shoal.catalogue.shapes import shape_from_sizes
from shoal.plan.memory.activations import block_kept
from shoal.plan.run.run import FROZEN, Adapter, Run
from shoal.plan.systems.modelled import SYSTEMS
from tests.plan.memory.test_saved_tensors import saved_bytes

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HIDDEN, HEADS, FFN, VOCABULARY, MICRO_BATCH, LENGTH = 128, 4, 384, 64, 2, 256


def forecast(quantize: str | None, *, upcasts: bool) -> float:
    gpu = find_gpu("a100-80gb")
    sizes = {"hidden": HIDDEN, "heads": HEADS, "kv_heads": HEADS, "ffn": FFN, "vocab": VOCABULARY}
    run = Run(
        shape=shape_from_sizes("llama", layers=2, positions=LENGTH, tied=False, **sizes),
        gpu=gpu,
        link=LINKS[gpu.link],
        network=LINKS["infiniband-hdr"],
        length=LENGTH,
        micro_batch=MICRO_BATCH,
        compiled=False,
        precision="bf16-true",
        adapter=Adapter(8, EVERY, quantize, double_quantized=quantize is not None, upcasts=upcasts),
        trained=FROZEN,
        traits=SYSTEMS["llama-factory"],
    )
    return block_kept(run).amount


def saved_by_peft(layers: int, quantize: str | None, *, upcasts: bool) -> int:
    peft = pytest.importorskip("peft")
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    if quantize is not None:
        _quantize(model)
    if upcasts:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=list(EVERY)))
    tokens = torch.zeros(MICRO_BATCH, LENGTH, dtype=torch.long)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
            return found

    return saved_bytes(model, loss)


def _quantize(model: nn.Module) -> None:
    """Every linear layer of the blocks in 4 bits."""
    modules = pytest.importorskip("bitsandbytes").nn
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            parent, _, own = name.rpartition(".")
            new = modules.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            new.weight = modules.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            setattr(model.get_submodule(parent), own, new.to("cpu"))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "upcasts"), [(None, False), ("nf4", False), ("nf4", True)])
def test_a_block_with_adapters_saves_what_is_forecast(quantize: str | None, upcasts: bool) -> None:
    one, two = (saved_by_peft(layers, quantize, upcasts=upcasts) for layers in (1, 2))
    assert two - one == pytest.approx(forecast(quantize, upcasts=upcasts), rel=0.03)

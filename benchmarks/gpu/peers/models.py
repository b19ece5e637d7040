"""The models of the other tools: transformers' classes, with the weights that shoal initializes from the same seed."""

from typing import Any

import torch
from torch import nn

from peers.task import ADAPTER_ALPHA, ADAPTER_RANK, ADAPTER_TARGETS, SEED, WEIGHT_DECAY, Task
from shoal.catalogue.families import ATTENTION_DROPOUT, HIDDEN_DROPOUT, OTHER_DROPOUT
from shoal.catalogue.model_shape import ModelShape
from shoal.catalogue.shapes import find_shape, shape_from_sizes
from shoal.models.anatomy import read_anatomy
from shoal.models.families import transformers_config
from shoal.models.weights import Weights, materialize

# int8 layers multiply outlier channels, beyond a threshold of 6, in 16 bits. Models of 6.7 billion parameters and more
# have a few of these in all layers (Dettmers et al. 2022, LLM.int8()).
OUTLIER_CHANNELS, OUTLIER = 6, 20.0


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def resolve_shape(shape: str | dict[str, Any]) -> ModelShape:
    return find_shape(shape) if isinstance(shape, str) else shape_from_sizes(**shape)


def build(task: Task, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """The causal language model on the device. Without a folder, weights are initialized on it, which takes seconds.

    Option `dropout`: the probability of every dropout the model has, as `model.dropout` of shoal's config.
    """
    from transformers import AutoModelForCausalLM

    if task.weights is not None:
        model = AutoModelForCausalLM.from_pretrained(task.weights, dtype=dtype, attn_implementation=attention)
        return model.to(device()).train()
    settings = transformers_config(resolve_shape(task.shape))
    for name in (*ATTENTION_DROPOUT, *HIDDEN_DROPOUT, *OTHER_DROPOUT):
        if "dropout" in task.options and hasattr(settings, name):
            setattr(settings, name, task.options["dropout"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=attention)
    materialize(model, read_anatomy(model), device=device(), dtype=dtype, source=Weights(None, SEED))
    return model.train()


def add_adapter(model: Any) -> Any:
    """LoRA of rank 8 on queries and values, through peft."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(SEED)
    return get_peft_model(
        model,
        LoraConfig(
            r=ADAPTER_RANK,
            lora_alpha=ADAPTER_ALPHA,
            lora_dropout=0.0,
            target_modules=list(ADAPTER_TARGETS),
            task_type="CAUSAL_LM",
        ),
    )


def quantize(model: Any, kind: str = "nf4") -> None:
    """The blocks' linear layers to bitsandbytes NF4, double quantized, or to int8, as BitsAndBytesConfig would load
    them."""
    for block in model.model.layers:
        for name, layer in [found for found in block.named_modules() if isinstance(found[1], nn.Linear)]:
            small = _in_four_bits(layer) if kind == "nf4" else _in_eight_bits(layer)
            small.bias = layer.bias
            block.set_submodule(name, small.to(device()))
        if kind == "int8":
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight.data[:OUTLIER_CHANNELS] = OUTLIER
    # peft chooses its layer for quantized weights by this attribute.
    setattr(model, "is_loaded_in_4bit" if kind == "nf4" else "is_loaded_in_8bit", True)


def _in_four_bits(layer: nn.Linear) -> Any:
    import bitsandbytes

    small = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=torch.bfloat16,
        quant_type="nf4",
        device="meta",
    )
    small.weight = bitsandbytes.nn.Params4bit(
        layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    return small


def _in_eight_bits(layer: nn.Linear) -> Any:
    import bitsandbytes

    small = bitsandbytes.nn.Linear8bitLt(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        has_fp16_weights=False,
        threshold=6.0,
        device="meta",
    )
    # It is quantized when it comes to the device, which it is on already.
    small.weight = bitsandbytes.nn.Int8Params(layer.weight.data.cpu(), requires_grad=False)
    return small


def decay_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Weight decay for matrices and none for vectors."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [one for one in trained if one.dim() < 2], "weight_decay": 0.0},
    ]

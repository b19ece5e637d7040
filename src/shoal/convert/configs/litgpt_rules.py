"""How single keys of LitGPT are translated; `litgpt.py` has the table."""

import re
from typing import Any

from shoal.catalogue.shapes import find_shape
from shoal.convert.configs.draft import MIN_LR
from shoal.convert.configs.rules import Key, rule
from shoal.convert.configs.values import (
    GATED,
    MLP,
    count,
    number,
    optimizer,
    precision,
    text,
    truth,
)
from shoal.mistakes import UserMistake

COMMAND = "litgpt_command"
# Data modules: the id on the Hub, or what to do. LitGPT downloads most of them by itself.
MODULES = {
    "Alpaca": "yahma/alpaca-cleaned",
    "Alpaca2k": "mhenrichsen/alpaca_2k_test",
    "AlpacaGPT4": "vicgalle/alpaca-gpt4",
    "Deita": "HuggingFaceH4/deita-10k-v0-sft",
    "LIMA": "GAIR/lima",
    "Dolly": "databricks/databricks-dolly-15k",
    "OpenWebText": "Skylion007/openwebtext",
    "TinyStories": "roneneldan/TinyStories",
}
FILES = {"JSON": "json_path", "TextFiles": "train_data_path", "LitData": "data_path", "TinyLlama": "data_path"}
# Models whose attention is one linear layer, as in GPT-NeoX.
FUSED = re.compile(r"pythia|neox|dolly|redpajama-incite|stablelm-base", re.IGNORECASE)
SCHEDULE = "LitGPT's schedule: a cosine after the warmup"


def model_name(value: Any) -> str:
    """A checkpoint folder of LitGPT as the id that it was downloaded from."""
    name = text(value).rstrip("/")
    return name.removeprefix("./").removeprefix("checkpoints/")


@rule("adapter.kind", "model.shape", says="finetune_lora, finetune_full, pretrain")
def command_rule(key: Key) -> None:
    name = str(key.value)
    if name == "finetune_lora":
        quantize = str(key.get("quantize") or "")
        key.become("adapter.kind", "qlora" if quantize.startswith("bnb.nf4") else "lora")
    elif name in ("finetune", "finetune_full", "pretrain"):
        key.become("adapter.kind", "lora" if name == "finetune" else "none")
    else:
        key.not_carried(f"litgpt {name} is not built; finetune_lora, finetune_full and pretrain are")
    if count(key.get("devices", 1) if str(key.get("devices", 1)) != "auto" else 2) * count(key.get("num_nodes", 1)) > 1:
        hybrid = name == "pretrain" and count(key.get("num_nodes", 1)) > 1
        key.become("parallel.strategy", "fsdp", "LitGPT shards over more than one device")
        key.become("parallel.sharding", "hybrid_shard" if hybrid else "full_shard")
        if name == "finetune_full":
            key.become("train.recompute", "full", "LitGPT checkpoints activations here")


@rule("model.from", says="checkpoints/ is removed: the id it was downloaded from")
def checkpoint_rule(key: Key) -> None:
    name = model_name(key.value)
    says = f"import the folder of LitGPT, or download it: shoal download {name}" if name != key.value else ""
    key.become("model.from", name, says)


@rule("model.shape", says="random weights of a named shape")
def shape_rule(key: Key) -> None:
    if key.get("initial_checkpoint_dir") is not None:
        key.no_meaning("initial_checkpoint_dir has the model")
        return
    name = text(key.value)
    plain = name.rpartition("/")[2].lower()
    squeezed = plain.replace("meta-", "").removesuffix("-hf")
    for candidate in (
        plain,
        squeezed,
        re.sub(r"llama-(?=\d)", "llama", squeezed),
        squeezed.replace("tiny-llama", "tinyllama"),
    ):
        try:
            find_shape(candidate)
        except UserMistake:
            continue
        key.become("model.shape", candidate)
        return
    key.not_carried("no shape of this name is known: set model.shape to its sizes, or model.from")


@rule("data.path", "data.source", says="JSON, TextFiles, Alpaca2k and others")
def module_rule(key: Key) -> None:
    name = str(key.value).rpartition(".")[2]
    if name in MODULES:
        key.become("data.path", MODULES[name])
    elif name in FILES:
        if key.get(f"data.init_args.{FILES[name]}") is None:
            key.not_carried(f"--data.{FILES[name]} is missing: set data.path")
        elif name == "TextFiles":
            key.become("data.source", "text")
        elif name == "JSON":
            key.become("data.source", "json")
        else:
            key.not_carried("files that litdata has tokenized are not read: set data.path to the text")
    else:
        key.not_carried("not a dataset that shoal knows: set data.path to its files, or to its id on the Hub")


@rule("data.path")
def path_rule(key: Key) -> None:
    key.become("data.path", text(key.value))


@rule("data.validation")
def split_rule(key: Key) -> None:
    key.become("data.validation", number(key.value))


@rule("data.format", says="alpaca; others follow from the data and the chat template")
def prompt_style_rule(key: Key) -> None:
    name = str(key.value).lower().rpartition(".")[2]
    if name == "alpaca":
        key.become("data.format", "alpaca")
    else:
        key.not_carried("prompts are formatted by data.format and data.chat_template")


@rule("hardware.devices", says="per node")
def devices_rule(key: Key) -> None:
    if str(key.value) in ("auto", "-1"):
        key.become("hardware.devices", "auto")
    else:
        key.become("hardware.devices", count(key.value), "per node")


@rule("adapter.targets")
def targets_rule(key: Key) -> None:
    names = {"query": True, "key": False, "value": True, "projection": False, "mlp": False, "head": False}
    chosen = [name for name, default in names.items() if truth(key.get(f"lora_{name}", default))]
    if FUSED.search(str(key.get("checkpoint_dir", ""))):
        found = ["query_key_value"] if {"query", "key", "value"} & set(chosen) else []
        found += ["dense"] if "projection" in chosen else []
        found += ["dense_h_to_4h", "dense_4h_to_h"] if "mlp" in chosen else []
        key.become("adapter.targets", found, "query, key and value are one layer in this model")
        return
    found = [GATED[name] for name in chosen if name in GATED and name != "head"]
    found += MLP if "mlp" in chosen else ()
    found += ["lm_head"] if "head" in chosen else []
    key.become("adapter.targets", found)


@rule("adapter.quantize")
def quantize_rule(key: Key) -> None:
    name = str(key.value)
    if name in ("bnb.nf4", "bnb.nf4-dq"):
        key.become("adapter.kind", "qlora")
        key.become("adapter.quantize", name)
    else:
        key.not_carried("adapter.quantize has nf4 and nf4-dq, with and without bnb.")


@rule("train.optimizer.name")
def optimizer_rule(key: Key) -> None:
    name, says = optimizer(key.value)
    key.become("train.optimizer.name", name, says)


@rule("train.optimizer.betas")
def betas_rule(key: Key) -> None:
    if key.last in ("beta1", "beta2"):
        both = [number(key.get("train.beta1", 0.9)), number(key.get("train.beta2", 0.95))]
        key.become("train.optimizer.betas", both)
    else:
        key.become("train.optimizer.betas", [number(one) for one in key.value])


@rule("train.schedule.min_ratio", says="divided by the learning rate; in pretrain only")
def min_lr_rule(key: Key) -> None:
    if key.get(COMMAND) == "pretrain":
        key.become(MIN_LR, number(key.value))
    else:
        key.no_meaning("only pretrain uses it: a fine-tuning ends at 0")


@rule("train.clip", says="null: no clipping, which is LitGPT's default in fine-tuning", takes_null=True)
def clip_rule(key: Key) -> None:
    key.become("train.clip", number(key.value) if key.value else None)


@rule("train.compile", says="thunder")
def compiler_rule(key: Key) -> None:
    if str(key.value) == "thunder":
        key.become("train.compile", "thunder")
    else:
        key.become("train.compile", True)


@rule("train.schedule.warmup", says="a share of an epoch there, of the run here")
def warmup_fraction_rule(key: Key) -> None:
    epochs = count(key.get("train.epochs", 1) or 1)
    key.become("train.schedule.warmup", number(key.value) / epochs, f"of all {epochs} epochs" if epochs > 1 else "")


@rule("parallel.strategy")
def strategy_rule(key: Key) -> None:
    name = str(key.value)
    if name == "auto":
        key.no_meaning("auto")
    else:
        key.become("parallel.strategy", name)


@rule("train.precision")
def precision_rule(key: Key) -> None:
    if str(key.get("quantize") or "").startswith("bnb.") and str(key.value).endswith("true"):
        key.become("train.precision", "bf16-mixed", "the frozen weights are quantized, the adapter is in fp32")
    else:
        key.become("train.precision", precision(key.value))


@rule("train.schedule.name", "train.schedule.min_ratio", says=SCHEDULE)
def schedule_rule(key: Key) -> None:
    key.become("train.schedule.name", "cosine", SCHEDULE)
    key.become("train.schedule.min_ratio", 0.0)
    # LitGPT does not pack: an example is a sequence. Its pretraining data is one stream of tokens.
    if key.get(COMMAND) != "pretrain":
        key.become("data.pack", False, "an example per sequence")

"""How single keys of LLaMA-Factory are translated; `llamafactory.py` has the table."""

import json
from pathlib import Path
from typing import Any

from shoal.convert.configs.axolotl_rules import CHAT_TEMPLATES
from shoal.convert.configs.linked import find_file
from shoal.convert.configs.rules import Key, rule
from shoal.convert.configs.values import number, text, texts, truth

STAGES = {"sft": "causal_lm", "pt": "causal_lm", "kto": "kto"}
PAIR_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
# Its names of the columns of a dataset in dataset_info.json, by format, and ours.
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system"}
SHAREGPT = {"messages": "messages", "system": "system"}
PAIRS = {"prompt": "prompt", "messages": "prompt", "chosen": "chosen", "rejected": "rejected"}
UNPAIRED = {"prompt": "prompt", "messages": "prompt", "response": "completion", "kto_tag": "label"}
WHERE = ("file_name", "hf_hub_url")


@rule("train.objective", says="sft and pt: causal_lm; dpo: by pref_loss")
def stage_rule(key: Key) -> None:
    name = str(key.value)
    if name == "dpo":
        loss = str(key.get("pref_loss", "sigmoid"))
        if loss in PAIR_LOSSES:
            key.become("train.objective", PAIR_LOSSES[loss])
        else:
            key.not_carried(f"the loss {loss} is not built; train.objective has dpo, ipo, orpo, simpo")
    elif name in STAGES:
        key.become("train.objective", STAGES[name])
    else:
        key.not_carried(f"{name} is not built; train.objective has causal_lm, dpo, ipo, orpo, simpo")


@rule("train.objective")
def loss_rule(key: Key) -> None:
    key.no_meaning("train.objective says it" if str(key.get("stage")) == "dpo" else "of stage dpo only")


@rule("adapter.kind", says="lora, or qlora with quantization_bit 4; full: none")
def method_rule(key: Key) -> None:
    name = str(key.value)
    if name == "lora":
        key.become("adapter.kind", "qlora" if _is_four(key.get("quantization_bit")) else "lora")
    elif name == "full":
        key.become("adapter.kind", "none")
    else:
        key.not_carried(f"{name} is not built: adapter.kind has lora and qlora, and model.freeze patterns of names")


def _is_four(value: Any) -> bool:
    return value is not None and str(value) == "4"


@rule("adapter.kind", says="4: qlora")
def bits_rule(key: Key) -> None:
    if _is_four(key.value):
        key.become("adapter.kind", "qlora")
    else:
        key.not_carried("frozen weights are in 4 bits (adapter.kind: qlora) or in 16")


@rule("adapter.quantize")
def double_rule(key: Key) -> None:
    if key.get("quantization_bit") is None:
        key.no_meaning("nothing is quantized")
    else:
        key.become("adapter.quantize", "nf4-dq" if truth(key.value) else "nf4")


@rule(says="weights are quantized when they are loaded, as bitsandbytes does")
def quantizer_rule(key: Key) -> None:
    if str(key.value).lower() in ("bnb", "bitsandbytes"):
        key.no_meaning("weights are quantized when they are loaded")
    else:
        key.not_carried(f"{key.value} is not built: adapter.quantize has nf4 and nf4-dq")


@rule("adapter.targets", says="all: all-linear")
def targets_rule(key: Key) -> None:
    names = texts(key.value)
    key.become("adapter.targets", "all-linear" if names == ["all"] else names)


@rule("data.path", "data.format", "data.columns", "data.split", "data.subset", says="looked up in dataset_info.json")
def dataset_rule(key: Key) -> None:
    blocks = _blocks(key)
    if blocks is None:
        return
    if len(blocks) == 1:
        for name, value in blocks[0].items():
            key.become(f"data.{name}", value)
    else:
        key.become("data.source", blocks)
        key.become("data.mixing.when_exhausted", "end", "concatenated: an epoch has every example once")


@rule("data.validation", says="looked up in dataset_info.json")
def eval_dataset_rule(key: Key) -> None:
    blocks = _blocks(key)
    if blocks is None:
        return
    if len(blocks) == 1:
        key.become("data.validation", blocks[0]["path"])
    else:
        key.not_carried("data.validation is one path or split")


def _blocks(key: Key) -> list[dict[str, Any]] | None:
    """The datasets that a key names; None, with a line that says why, if they are not known."""
    folder = str(key.get("dataset_dir", "data"))
    file = find_file(key, f"{folder}/dataset_info.json")
    if file is None:
        key.not_carried(f"names entries of {folder}/dataset_info.json, which is not there: set data.path, data.format")
        return None
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        known = None
    if not isinstance(known, dict):
        key.not_carried(f"{file} is not valid JSON: set data.path, data.format")
        return None
    names = texts(key.value)
    for name in names:
        if not isinstance(known.get(name), dict):
            key.not_carried(f"{name} is not in {file}: set data.path, data.format")
            return None
        if not any(known[name].get(one) for one in WHERE):
            key.not_carried(f"{name} has neither file_name nor hf_hub_url in {file}: set data.path, data.format")
            return None
    return [_block(key, name, known[name], file.parent) for name in names]


def _block(key: Key, name: str, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """An entry of dataset_info.json as a block of ours."""
    file = given.get("file_name")
    found: dict[str, Any] = {"path": str(folder / text(file)) if file else text(given["hf_hub_url"])}
    columns = given.get("columns") or {}
    if str(key.get("stage")) == "pt":
        found["format"], ours = "text", {"prompt": "text"}
    elif given.get("ranking"):
        found["format"], ours = "preference", PAIRS
    elif "kto_tag" in columns:
        found["format"], ours = "unpaired", UNPAIRED
    elif given.get("formatting") == "sharegpt":
        found["format"], ours = "chat", SHAREGPT
    else:
        found["format"], ours = "alpaca", ALPACA
    renamed = {ours[theirs]: str(column) for theirs, column in columns.items() if theirs in ours}
    if renamed := {name: column for name, column in renamed.items() if name != column}:
        found["columns"] = renamed
    for option in ("split", "subset"):
        if given.get(option):
            found[option] = text(given[option])
    for theirs in [*(one for one in columns if one not in ours), *(one for one in given if one in ("folder",))]:
        inner = Key(key.source, f"{key.name}.{name}.{theirs}", given.get(theirs, columns.get(theirs)), key.draft)
        inner.not_carried("not a column that this format has here")
    return found


@rule("data.validation", says="a share of the sequences")
def held_out_rule(key: Key) -> None:
    size = number(key.value)
    if size >= 1:
        key.not_carried("data.validation is a share of the sequences, or a path")
    else:
        key.become("data.validation", size)


@rule("data.chat_template", says="chatml, llama3, mistral, zephyr and gemma; else the tokenizer's own is used")
def template_rule(key: Key) -> None:
    name = str(key.value)
    if name in CHAT_TEMPLATES:
        key.become("data.chat_template", name)
    else:
        key.not_carried("the tokenizer's own chat template is used; data.chat_template takes a Jinja file too")


@rule("data.train_on")
def prompts_rule(key: Key) -> None:
    key.become("data.train_on", "all") if truth(key.value) else key.no_meaning("the answers count in the loss")


@rule("data.train_on")
def history_rule(key: Key) -> None:
    key.become("data.train_on", "last") if truth(key.value) else key.no_meaning("every answer counts in the loss")


@rule("data.mixing.when_exhausted")
def mix_rule(key: Key) -> None:
    name = str(key.value)
    if name == "concat":
        key.no_meaning("an epoch has every example once")
    elif name == "interleave_over":
        key.become("data.mixing.when_exhausted", "repeat")
    else:
        key.not_carried("data.mixing.when_exhausted has repeat and end")


@rule("data.pack")
def neat_rule(key: Key) -> None:
    key.become("data.pack", True) if truth(key.value) else key.no_meaning("off")


@rule("model.attention")
def flash_rule(key: Key) -> None:
    name = str(key.value)
    if name == "sdpa":
        key.become("model.attention", "sdpa")
    elif name in ("disabled", "False"):
        key.become("model.attention", "eager")
    else:
        key.become("model.attention", "auto", "auto uses PyTorch's flash attention")


@rule("train.recompute", says="it is on unless this is true")
def checkpointing_rule(key: Key) -> None:
    key.become("train.recompute", "none" if truth(key.value) else "full")


@rule("train.recompute")
def unsloth_rule(key: Key) -> None:
    key.become("train.recompute", "offload") if truth(key.value) else key.no_meaning("off")


@rule("train.precision")
def pure_rule(key: Key) -> None:
    key.become("train.precision", "bf16-true") if truth(key.value) else key.no_meaning("off")


@rule("train.precision")
def fp8_rule(key: Key) -> None:
    key.become("train.precision", "fp8") if truth(key.value) else key.no_meaning("off")


@rule("train.optimizer.name")
def muon_rule(key: Key) -> None:
    key.become("train.optimizer.name", "muon") if truth(key.value) else key.no_meaning("off")

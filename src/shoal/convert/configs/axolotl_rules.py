"""How single keys of axolotl are translated; `axolotl.py` has the table."""

from typing import Any

from shoal.convert.configs.rules import Key, rule
from shoal.convert.configs.values import (
    number,
    on,
    put_recompute,
    text,
    texts,
    truth,
)

FORMATS = {
    "alpaca": "alpaca",
    "chat_template": "chat",
    "sharegpt": "chat",
    "chatml": "chat",
    "completion": "text",
    "pretrain": "text",
    "input_output": "chat",
}
COLUMNS = {"field": "text", "text_column": "text", "field_messages": "messages", "field_instruction": "instruction"} | {
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_prompt": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_completion": "completion",
    "field_label": "label",
}
PREFERENCES = ("dpo", "ipo", "orpo", "simpo")
CHAT_TEMPLATES = ("chatml", "llama3", "mistral", "zephyr", "gemma")
BF16_WEIGHTS = "for a full fine-tuning axolotl loads the weights in bf16 as well: bf16-true"


def block_rule(key: Key, given: Any) -> dict[str, Any]:
    """A dataset as a block of ours; what it cannot say is a line of its own."""
    if not isinstance(given, dict) or given.get("path") is None:
        raise ValueError("a dataset without a path")
    found: dict[str, Any] = {"path": given.get("data_files") or given["path"]}
    columns: dict[str, str] = {}
    pairs = key.get("rl") in PREFERENCES
    for name, value in given.items():
        inner = Key(key.source, f"{key.name}.{name}", value, key.draft, above=key.above)
        if value is None or name == "path" or (name == "data_files" and value):
            continue
        if name == "type":
            kind = str(value).partition(".")[0] if isinstance(value, str) else ""
            if pairs:
                found["format"] = "preference"
            elif kind in FORMATS:
                found["format"] = FORMATS[kind]
            else:
                inner.not_carried("data.format has alpaca, chat, completion and text, and data.columns renames")
        elif name in COLUMNS:
            if COLUMNS[name] != value and not (pairs and name == "field_messages"):
                columns[COLUMNS[name]] = str(value)
        elif name == "name":
            found["subset"] = str(value)
        elif name == "split":
            found["split"] = str(value)
        elif name == "ds_type":
            inner.no_meaning("the kind of file is told by its name")
        elif name in ("roles", "message_property_mappings", "message_field_role", "message_field_content"):
            inner.no_meaning("roles and contents are recognised by their usual names")
        elif name == "roles_to_train" and value == ["assistant"]:
            inner.no_meaning("the answers count in the loss")
        else:
            inner.not_carried("not an option of a dataset here")
    if columns:
        found["columns"] = columns
    return found


@rule("data.path", "data.format", "data.columns", "data.split", "data.subset", says="several: a list in data.source")
def datasets_rule(key: Key) -> None:
    given = key.value if isinstance(key.value, list) else [key.value]
    blocks = [block_rule(key, one) for one in given]
    if len(blocks) == 1:
        for name, value in blocks[0].items():
            key.become(f"data.{name}", value)
    else:
        key.become("data.source", blocks)
        if not on(key.get("streaming")):
            key.become("data.mixing.when_exhausted", "end", "concatenated: an epoch has every example once")


@rule("data.validation")
def test_datasets_rule(key: Key) -> None:
    if isinstance(key.value, list) and len(key.value) == 1 and isinstance(key.value[0], dict):
        one = key.value[0]
        key.become("data.validation", text(one.get("data_files") or one.get("path")))
    else:
        key.not_carried("data.validation is one path or split")


@rule("train.precision")
def half_rule(key: Key) -> None:
    pure = key.last in ("bfloat16", "float16")
    if not on(key.value):
        key.no_meaning("off")
    elif key.last == "float16":
        key.not_carried("fp16 without master weights is not built: train.precision: 16-mixed")
    elif pure:
        key.become("train.precision", "bf16-true")
    else:
        adapted = key.get("adapter") is not None
        says = BF16_WEIGHTS if key.last == "bf16" and not adapted else ""
        key.become("train.precision", "bf16-mixed" if key.last == "bf16" else "16-mixed", says)


@rule("train.precision")
def fp8_rule(key: Key) -> None:
    key.become("train.precision", "fp8") if on(key.value) else key.no_meaning("off")


@rule("adapter.kind")
def adapter_rule(key: Key) -> None:
    kind = str(key.value)
    if kind in ("lora", "qlora"):
        key.become("adapter.kind", kind)
    else:
        key.not_carried("adapter.kind has lora and qlora")


@rule("adapter.targets")
def all_linear_rule(key: Key) -> None:
    if truth(key.value):
        key.become("adapter.targets", "all-linear")
    else:
        key.no_meaning("off")


@rule("data.pack")
def pack_rule(key: Key) -> None:
    key.become("data.pack", truth(key.value))


@rule("train.objective")
def rl_rule(key: Key) -> None:
    name = str(key.value)
    if name in PREFERENCES:
        loss = str(key.get("dpo_loss_type", "") or "")
        key.become("train.objective", "ipo" if "ipo" in loss else name)
    else:
        key.become("train.objective", name)


@rule("data.train_on")
def inputs_rule(key: Key) -> None:
    key.become("data.train_on", "all" if truth(key.value) else "answers")


@rule("data.chat_template")
def chat_template_rule(key: Key) -> None:
    name = str(key.value)
    if name == "tokenizer_default":
        key.no_meaning("the tokenizer's own")
    elif name in CHAT_TEMPLATES:
        key.become("data.chat_template", name)
    else:
        key.not_carried(
            f"the tokenizer's own is used; data.chat_template has {', '.join(CHAT_TEMPLATES)}, or a Jinja file"
        )


@rule("model.attention")
def switch_rule(key: Key) -> None:
    ours = {"sdp_attention": "sdpa", "flex_attention": "flex", "eager_attention": "eager"}.get(key.last, "auto")
    if not truth(key.value):
        key.no_meaning("off")
    else:
        key.become("model.attention", ours, "auto uses PyTorch's flash attention" if ours == "auto" else "")


@rule("log.to", says="wandb, where a project is named")
def logger_rule(key: Key) -> None:
    name = key.name.removeprefix("use_").partition("_")[0]
    if key.name.startswith("use_") and not truth(key.value):
        key.no_meaning("off")
    elif name in (key.draft.get("log.to") or []):
        key.no_meaning("a name in a logger")
    else:
        key.collect("log.to", name)


@rule("data.path", "data.streaming")
def pretraining_rule(key: Key) -> None:
    one = key.value[0] if isinstance(key.value, list) and key.value else key.value
    block = block_rule(key, one if isinstance(one, dict) else {"path": one})
    for name, value in (block | {"streaming": True, "format": "text"}).items():
        key.become(f"data.{name}", value)


@rule("model.add_tokens")
def tokens_rule(key: Key) -> None:
    special_tokens_rule.translate(key) if isinstance(key.value, dict) else key.become(
        "model.add_tokens", texts(key.value)
    )


@rule(says="the tokenizer's own tokens are used; model.add_tokens adds others")
def special_tokens_rule(key: Key) -> None:
    if not set(dict(key.value)) - {"pad_token"}:
        key.no_meaning("padding never counts in the loss, whatever its token")
    else:
        key.not_carried("the tokenizer's own tokens are used; model.add_tokens adds others")


@rule("train.recompute")
def offloading_rule(key: Key) -> None:
    """True, or the name of a way of offloading."""
    if isinstance(key.value, str) or truth(key.value):
        key.become("train.recompute", "offload")
    else:
        key.no_meaning("off")


@rule("train.precision")
def float32_rule(key: Key) -> None:
    key.become("train.precision", "32-true") if truth(key.value) else key.no_meaning("off")


@rule("data.long_documents", says="drop, truncate")
def too_long_rule(key: Key) -> None:
    if key.value in ("drop", "truncate"):
        key.become("data.long_documents", key.value)
    else:
        key.not_carried("data.long_documents has truncate, split and drop")


def betas_rule(key: Key) -> None:
    both = [number(key.get("adam_beta1", 0.9)), number(key.get("adam_beta2", 0.999))]
    key.become("train.optimizer.betas", both)


def recompute_rule(key: Key) -> None:
    if str(key.value) in ("offload", "unsloth", "offload_disk"):
        key.become("train.recompute", "offload")
    else:
        put_recompute(key)

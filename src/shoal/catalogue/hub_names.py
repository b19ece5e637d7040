"""Ids of the Hugging Face hub as names of the catalogue: `meta-llama/Llama-2-7b-hf` is llama2-7b."""

import re

from shoal.catalogue.named_shapes import NAMED

# What ids have after the name of the architecture. Version 0.3 of Mistral has another vocabulary, hence a name.
_ENDINGS = re.compile(
    r"-(hf|base|instruct|chat|v0\.[124-9]|v2|it|pt|sft|dpo|deduped|uncased|4e1t|2407|2410|2501|2507)$"
    r"|(?<!mistral-7b)(?<!mistral-7b-instruct)-v0\.3$"
)
_WITHIN = re.compile(r"-(instruct|4k|8k|128k|0425|1124|0325)\b")
_SERIES = re.compile(r"^(llama|qwen|gemma|phi|olmo|nemotron)-(\d)")
_ESM = re.compile(r"^esm2_t\d+_(\d+[mb])_ur50d$")
# Ids that name no size, or more than the model.
_OTHERS = {
    "bloom": "bloom-176b",
    "gpt-bigcode-santacoder": "santacoder",
    "mistral-nemo": "mistral-nemo-12b",
    "starcoder": "starcoder-15b",
    "starcoderbase": "starcoder-15b",
}
# Ids without an owner, of the hub's first models.
_WITHOUT_OWNER = ("bert-base", "bert-large", "distilbert-base", "gpt2", "roberta", "xlm-roberta")


def name_of(hub_id: str) -> str | None:
    """The name in the catalogue of a model on the hub."""
    if "/" not in hub_id and not hub_id.lower().startswith(_WITHOUT_OWNER):
        return None
    return {plain(name): name for name in NAMED}.get(plain(hub_id))


def plain(hub_id: str) -> str:
    """A hub id without what does not change sizes, spelled as in the catalogue."""
    last = hub_id.rsplit("/", 1)[-1].lower()
    last = _ESM.sub(r"esm2-\1", last)
    last = re.sub(r"(\d)_(\d)", r"\1.\2", last).replace("_", "-")
    last = re.sub(r"^meta-", "", last)
    shorter = _ENDINGS.sub("", last)
    while shorter != last:
        last, shorter = shorter, _ENDINGS.sub("", shorter)
    last = _WITHIN.sub("", last)
    return _SERIES.sub(r"\1\2", _OTHERS.get(last, last))

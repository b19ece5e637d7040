"""What TRL adds to the Trainer's arguments for its data: several datasets, packing, templates and tokens."""

from typing import Any

from shoal.convert.configs.rules import Key, cannot, nothing, rule
from shoal.convert.configs.trainer_rules import streaming
from shoal.convert.configs.values import number, on, text


@rule("data.path", "data.source", "data.split", "data.subset", says="several: a list in data.source")
def mixture_rule(key: Key) -> None:
    """TRL's `datasets`, which it concatenates; alignment-handbook has other names for the same."""
    blocks = [_block(key, one) for one in key.value]
    if len(blocks) == 1:
        for name, value in blocks[0].items():
            key.become(f"data.{name}", value)
        return
    key.become("data.source", blocks)
    if not on(key.get("streaming")):
        key.become("data.mixing.when_exhausted", "end", "concatenated: an epoch has every example once")


def _block(key: Key, given: Any) -> dict[str, Any]:
    """One dataset; what ours cannot say is a line of its own."""
    path = dict(given).get("data_files") or given.get("path", given.get("id"))
    if path is None:
        raise ValueError("a dataset without a path")
    found = {"path": path if isinstance(path, list) else text(path)}
    for name, value in given.items():
        ours = {"name": "subset", "config": "subset", "split": "split"}.get(name)
        part = Key(key.source, f"{key.name}.{name}", value, key.draft, above=key.above)
        if value is None or name in ("path", "id", "data_files"):
            continue
        if ours is not None:
            found[ours] = text(value)
        elif name == "columns":
            part.no_meaning("columns that a format does not read are ignored")
        elif name in ("fraction", "weight"):
            if value != 1:
                part.not_carried("each dataset is used as a whole; cut it before")
        else:
            part.not_carried("not an option of a dataset here")
    return found


@rule("data.validation", says="a share of the sequences")
def test_size_rule(key: Key) -> None:
    if 0 < number(key.value) < 1:
        key.become("data.validation", number(key.value))
    else:
        key.not_carried("a number of examples: data.validation is a share, a path or a split")


@rule("data.path", says="of alignment-handbook; shares are not carried")
def mixer_rule(key: Key) -> None:
    shares = dict(key.value)
    names = list(shares)
    splits = key.get("dataset_splits") or []
    split = next((one for one in splits if "test" not in str(one)), None)
    mixture_rule.translate(
        Key(
            key.source,
            key.name,
            [{"id": one, "weight": shares[one], "split": split} for one in names],
            key.draft,
            above=key.above,
        )
    )


@rule("data.long_documents", says="bfd: truncate; bfd_split and wrapped: split")
def packing_strategy_rule(key: Key) -> None:
    """How TRL packs, and what it does with what is too long."""
    if str(key.value) in ("bfd_split", "bfd-requeue", "wrapped") and on(key.get("packing", False)):
        key.become("data.long_documents", "split")
    elif key.value == "bfd" or not on(key.get("packing", False)):
        key.become("data.long_documents", "truncate")
    else:
        key.not_carried("data.long_documents has truncate, split and drop")


@rule("data.chat_template")
def chat_template_rule(key: Key) -> None:
    """A file, or the template itself, which our config has in a file."""
    if str(key.value).endswith((".jinja", ".j2")):
        key.become("data.chat_template", text(key.value))
    elif key.last == "chat_template_path":
        key.not_carried("a tokenizer with another template: save it as a Jinja file, and set data.chat_template")
    else:
        key.not_carried("save the template as a Jinja file, and set data.chat_template to its path")


# Of TRL, and of alignment-handbook, whose recipes have `dataset_mixture` and once had `dataset_mixer`.
OF_TRL = {
    "packing_strategy": packing_strategy_rule,
    "datasets": mixture_rule,
    "test_split_size": test_size_rule,
    "dataset_mixture.datasets": mixture_rule,
    "dataset_mixture.test_split_size": test_size_rule,
    "dataset_mixture.streaming": streaming,
    **nothing("one seed for all randomness", "dataset_mixture.seed"),
    "dataset_mixer": mixer_rule,
    **nothing("of dataset_mixer", "dataset_splits"),
    "chat_template": chat_template_rule,
    "chat_template_path": chat_template_rule,
    **cannot("the tokenizer's own tokens are used; model.add_tokens adds others", "eos_token"),
    **nothing("padding never counts in the loss, whatever its token", "pad_token"),
    **nothing("what is longer than data.max_length is cut at its end", "truncation_mode"),
    **nothing("each format has its own special tokens", "dataset_kwargs"),
    **cannot("the model's own config is used", "model_init_kwargs", unless=({},)),
    **cannot("the auxiliary loss of experts is the model's own", "router_aux_loss_coef"),
}

"""Map tensor names between the model and Hugging Face files, by transformers' conversion tables.

GPT-NeoX's head, for example, is `lm_head` in memory and `embed_out` in files; the experts of a layer are one tensor in
memory, and two or three tensors per expert in files.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# Buffers that every model computes itself; files of older versions contain them.
RECOMPUTED = (
    r"rotary_emb\.inv_freq$",
    r"(^|\.)position_ids$",
    r"\.masked_bias$",
    r"\.attn\.(bias|causal_mask)$",  # GPT-J and CodeGen
)


@dataclass
class Sources:
    """The sources of a tensor of the model: names in the files, by the converter's pattern that they match."""

    converter: Any | None  # transformers' WeightConverter; None: the only source is the tensor itself
    names: dict[str, list[str]]
    duplicates: list[str] = field(default_factory=list)  # the same tensor again, in another format

    @property
    def all_names(self) -> list[str]:
        return [name for names in self.names.values() for name in names]


def sources_in_files(model: Any, stored: Iterable[str]) -> dict[str, Sources]:
    """The sources among `stored` of each tensor of `model`.

    Follows transformers' own loading step by step. A converter with several outputs is listed under the first.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    owners = {pattern: one for one in converters for pattern in one.source_patterns}
    # Checkpoints saved from the bare backbone (gpt2 on the hub) lack its prefix.
    prefix = model.base_model_prefix
    known = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found: dict[str, Sources] = {}
    # Expert 10 comes after expert 9, and a renaming may depend on a name that sorts before those it renames.
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = name, None
        if renamed not in known:
            continue
        converter = None if pattern is None else owners[pattern]
        sources = found.setdefault(renamed, Sources(converter, {}))
        if sources.converter is not converter or (converter is None and sources.names):
            sources.duplicates.append(name)
            continue
        sources.names.setdefault(pattern or name, []).append(name)
    return found


def unused_in_files(model: Any, stored: Iterable[str], sources: Mapping[str, Sources]) -> list[str]:
    """The names in `stored` that are sources of no tensor of `model`, without those that transformers ignores too."""
    used = {name for one in sources.values() for name in (*one.all_names, *one.duplicates)}
    ignored = [*RECOMPUTED, *(model._keys_to_ignore_on_load_unexpected or [])]
    return [name for name in stored if name not in used and not any(re.search(one, name) for one in ignored)]


def counted(names: list[str]) -> str:
    """`names` in a sentence: the first, and the number of others."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def groups_in_files(model: Any, names: Iterable[str]) -> list[list[str]]:
    """Names of the model's tensors, grouped where files fuse them into one tensor, such as query, key and value."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    transforms = get_model_conversion_mapping(model, add_legacy=False)
    converters = [one.reverse_transform() for one in transforms[::-1] if isinstance(one, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        renamed, pattern = rename_source_key(name, [], converters, reverse=True)
        groups.setdefault(name if pattern is None else renamed, []).append(name)
    return list(groups.values())


def tensors_for_files(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors with the names and in the format of Hugging Face files.

    The tensors of one group of `groups_in_files` must be passed together.
    """
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return reverted

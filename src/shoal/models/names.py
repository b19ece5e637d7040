"""Names of tensors in the model and in Hugging Face files; transformers knows where they differ.

GPT-NeoX's head, for one, is `lm_head` in memory and `embed_out` in every file; the experts of a mixture are one tensor
in memory, and in files two or three tensors each.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Sources:
    """What a tensor of the model is made of: names in the files, by the converter's pattern that they fit."""

    converter: Any | None  # transformers' WeightConverter; None: the one name there is holds the tensor itself
    names: dict[str, list[str]]

    @property
    def all_names(self) -> list[str]:
        return [name for names in self.names.values() for name in names]


def sources_in_files(model: Any, stored: Iterable[str]) -> dict[str, Sources]:
    """For each tensor of `model` that the `stored` ones make, what it is made of.

    Follows transformers' own loading step by step. A converter that makes several tensors stands under the first.
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
    # Expert 10 comes after expert 9, and a renaming may wait for a name that sorts before those it renames.
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = name, None
        if renamed not in known:
            continue
        converter = None if pattern is None else owners[pattern]
        sources = found.setdefault(renamed, Sources(converter, {}))
        if sources.converter is not converter or (converter is None and sources.names):
            continue  # the same tensor in a second form
        sources.names.setdefault(pattern or name, []).append(name)
    return found


def groups_in_files(model: Any, names: Iterable[str]) -> list[list[str]]:
    """Names of the model's tensors, together where a file has them as one tensor, as a fused query, key and value."""
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
    """The same tensors under the names, and in the form, that a Hugging Face file has them in.

    Those that `groups_in_files` puts together must come together.
    """
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return reverted

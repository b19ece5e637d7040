"""Names of tensors in the model and in Hugging Face files; transformers knows where they differ.

GPT-NeoX's head, for one, is `lm_head` in memory and `embed_out` in every file.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def names_in_model(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """For each name in the model, the name in the files; for `stored` names that are, or become, names of `model`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    # Checkpoints saved from the bare backbone (gpt2 on the hub) lack its prefix.
    prefix = f"{model.base_model_prefix}."
    wanted = {name for name, _ in model.named_parameters()}
    found: dict[str, str] = {}
    for name in stored:
        renamed = name
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        for candidate in (name, renamed, prefix + name, prefix + renamed):
            if candidate in wanted:
                found.setdefault(candidate, name)
                break
    return found


def tensors_for_files(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names, and in the form, that a Hugging Face file has them in."""
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return reverted

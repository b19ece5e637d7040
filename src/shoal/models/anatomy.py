"""Find the parts of a transformers model: blocks, embedding, final norm, head.

Sharding, activation checkpointing, tensor and pipeline parallelism get a model's structure from this file only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shoal.mistakes import UserMistake

# Settings that transform the logits after head(hidden): the model's own forward pass must compute them.
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "lm_head_multiplier",
    "logit_scale",
    "logits_mup_width_multiplier",
    "logits_scaling",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "output_multiplier",
    "output_multiplier_scale",
)


@dataclass(frozen=True)
class Anatomy:
    """Module names, relative to the model."""

    backbone: str
    blocks: tuple[str, ...]  # empty: the model has no list of identical layers
    embedding: str
    final_norm: str | None
    head: str
    tied: bool
    linear_head: bool  # logits are exactly head(backbone's last hidden state), without bias
    classifies: bool = False  # the head computes one class for each sequence, not tokens
    of_encoder: bool = False  # built for masked tokens or for classes

    def block_modules(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(name) for name in self.blocks]

    @property
    def inside_blocks(self) -> str | None:
        """The prefix of the name of every parameter in a block."""
        return f"{self.blocks[0].rsplit('.', 1)[0]}." if self.blocks else None


def is_classifier(model: Any) -> bool:
    """Whether the model has a class for each sequence. FSDP puts its name before that of the class."""
    return type(model).__name__.endswith("ForSequenceClassification")


def read_anatomy(model: Any) -> Anatomy:
    """Find the parts of `model`. Raises a UserMistake that names a missing one."""
    kind = type(model).__name__
    names = {id(module): name for name, module in model.named_modules()}
    try:
        embedding = names.get(id(model.get_input_embeddings()))
    except NotImplementedError:  # transformers raises this if there is none
        embedding = None
    classifies = is_classifier(model)
    output = getattr(model, "classifier", None) if classifies else model.get_output_embeddings()
    head = names.get(id(output)) if output is not None else None
    backbone = names.get(id(model.base_model))
    if not backbone and embedding is not None:  # Llama 4 misnames its backbone: it is where the embedding is
        backbone = embedding.rpartition(".")[0]
    blocks = find_blocks(model)
    missing = [
        part for part, found in {"input embedding": embedding, "head": head, "backbone": backbone}.items() if not found
    ]
    if missing or embedding is None or head is None or not backbone:
        raise UserMistake(
            f"shoal cannot find the {' and the '.join(missing)} of {kind}; "
            "it needs a causal language model such as Llama, GPT-NeoX or GPT-2, or an encoder such as BERT."
        )
    settings = model.config.get_text_config()
    plain = not any(getattr(settings, name, None) not in (None, 1, 1.0) for name in LOGIT_TRANSFORMS)
    return Anatomy(
        backbone=backbone,
        blocks=blocks,
        embedding=embedding,
        final_norm=_find_final_norm(model, backbone, blocks),
        head=head,
        tied=getattr(output, "weight", None) is model.get_input_embeddings().weight,
        # A head that is not a direct child (BERT's) has other layers between it and the backbone.
        linear_head=plain
        and not classifies
        and isinstance(output, nn.Linear)
        and output.bias is None
        and "." not in head,
        classifies=classifies,
        of_encoder=classifies or kind.endswith("ForMaskedLM"),
    )


def head_parameters(model: Any, anatomy: Anatomy) -> list[str]:
    """The parameters of the head of a classifier and of the backbone's pooler: those without a counterpart in a
    language model."""
    backbone = f"{anatomy.backbone}."
    return [name for name, _ in model.named_parameters() if not name.startswith(backbone) or ".pooler." in name]


def require_blocks(anatomy: Anatomy, model: Any, key: str, instead: str) -> None:
    """Raise a UserMistake if shoal finds no blocks in the model; `key` needs them."""
    if not anatomy.blocks:
        raise UserMistake(
            f"{key} needs a model whose blocks are one nn.ModuleList of identical layers, and shoal cannot find such "
            f"blocks in {type(model).__name__}; {instead}."
        )


def matmul_parameters(parameters: Mapping[str, Tensor], anatomy: Anatomy) -> int:
    """The number of parameters in matmuls, as the MFU formula counts them: the blocks' matrices and the head.

    An embedding lookup is not a matmul, but a tied embedding is also the head and counts once.
    """
    inside, embedding_and_head = anatomy.inside_blocks, (f"{anatomy.embedding}.weight", f"{anatomy.head}.weight")
    matrices = (
        tensor
        for name, tensor in parameters.items()
        if tensor.dim() >= 2 and (name not in embedding_and_head if inside is None else name.startswith(inside))
    )
    head = parameters.get(f"{anatomy.embedding if anatomy.tied else anatomy.head}.weight")
    return sum(tensor.numel() for tensor in matrices) + (0 if head is None else head.numel())


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """The nn.ModuleList of identical layers with the most parameters."""
    best: tuple[int, str, int] = (0, "", 0)
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if len({type(layer) for layer in module}) != 1:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        best = max(best, (size, name, len(module)))
    size, name, count = best
    return tuple(f"{name}.{index}" for index in range(count)) if size else ()


def _find_final_norm(model: nn.Module, backbone: str, blocks: tuple[str, ...]) -> str | None:
    """The normalization that follows the blocks among their siblings, if the model has one (BERT has none)."""
    if not blocks:
        return None
    parent = blocks[0].rsplit(".", 2)[0]
    after = False
    for name, module in model.get_submodule(parent).named_children():
        if f"{parent}.{name}.0" == blocks[0]:
            after = True
        elif after and "norm" in type(module).__name__.lower():
            return f"{parent}.{name}"
    return None

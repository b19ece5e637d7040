"""Prepare a model: build it on the meta device, find its parts, freeze parameters, add adapters.

Training, preflight, benchmarks, loading and conversion all begin here; `models.weights` then gives it memory.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.catalogue.causal_models import why_no_encoder, why_not_causal
from shoal.catalogue.families import ATTENTION_DROPOUT, HIDDEN_DROPOUT, OTHER_DROPOUT
from shoal.catalogue.objectives import objective_facts
from shoal.catalogue.shapes import find_shape, grown_vocabulary
from shoal.config.schema import AdapterConfig, ModelConfig
from shoal.imports import importing
from shoal.mistakes import UserMistake
from shoal.models.adapters import AddedAdapters, add_adapters
from shoal.models.anatomy import Anatomy, head_parameters, matmul_parameters, read_anatomy
from shoal.models.attention import choose_attention
from shoal.models.families import transformers_config
from shoal.models.hub import local_folder
from shoal.models.new_rows import NewRows
from shoal.models.read_config import count_positions, read_settings, unbuildable

CAUSAL, MASKED, CLASSES = "causal_lm", "masked_lm", "classify"
# The ends of the names of transformers' classes, by what the model computes.
TASKS = {CAUSAL: "ForCausalLM", MASKED: "ForMaskedLM", CLASSES: "ForSequenceClassification"}


@dataclass(frozen=True)
class Blueprint:
    """A transformers config, and the folder of the weights if there is one."""

    settings: Any  # transformers.PretrainedConfig
    folder: Path | None
    new_rows: NewRows | None = None  # of added tokens
    task: str = CAUSAL  # which of transformers' classes it is built with: a key of TASKS

    @property
    def vocabulary(self) -> int:
        return int(self.settings.get_text_config().vocab_size)

    @property
    def model_type(self) -> str:
        return str(self.settings.get_text_config().model_type)

    @property
    def positions(self) -> int | None:
        """The longest sequence the model supports, if its config states it."""
        return count_positions(self.settings)

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes that the model in the folder tells apart; None: it has no head for classes."""
        if self.folder is None or not _is_saved_as(self.settings, CLASSES):
            return None
        return [str(self.settings.id2label[number]) for number in range(len(self.settings.id2label))]

    def with_classes(self, names: Sequence[str]) -> "Blueprint":
        """The model with a head for these classes."""
        settings = copy.deepcopy(self.settings)
        settings.id2label = dict(enumerate(names))  # and with it the number of labels
        settings.label2id = {name: number for number, name in enumerate(names)}
        settings.problem_type = "single_label_classification"
        return replace(self, settings=settings)

    def with_tokens(self, added: Sequence[int], known: int) -> "Blueprint":
        """The model with a row for each of the `added` token ids, all other ids being below `known`. Its vocabulary
        grows only if it has no spare rows for them."""
        vocabulary = self.vocabulary
        size = grown_vocabulary(vocabulary, max(added) + 1)
        settings = copy.deepcopy(self.settings)
        settings.get_text_config().vocab_size = size
        indices = sorted({*added, *range(vocabulary, size)})
        return replace(
            self, settings=settings, new_rows=NewRows(tuple(indices), min(known, vocabulary), size - vocabulary)
        )


def blueprint(model: ModelConfig, objective: str = CAUSAL) -> Blueprint:
    """Read the model's config, for `train.objective`. Does not read weights."""
    _import_transformers()
    encoder = objective_facts(objective).encoder
    if model.shape is not None:
        shape = find_shape(model.shape) if isinstance(model.shape, str) else model.shape.named()
        plan = Blueprint(transformers_config(shape, encoder=encoder), None, task=objective if encoder else CAUSAL)
    else:
        assert model.from_ is not None, "the config demands one of model.from and model.shape"
        plan = replace(read_blueprint(local_folder(model.from_)), task=objective if encoder else CAUSAL)
        reason = why_not_causal(plan.settings.model_type, plan.settings)
        wrong = why_no_encoder(plan.settings.model_type, plan.settings)
        if reason is not None and not encoder:
            instead = ", or train.objective masked_lm or classify" if wrong is None else ""
            raise UserMistake(f"model.from {model.from_}: {reason}; use a causal language model{instead}.")
        if encoder and wrong is not None:
            raise UserMistake(
                f"model.from {model.from_}: {wrong}, and train.objective {objective} needs an encoder, such as BERT."
            )
    if model.dropout is not None:
        _set_dropout(plan.settings.get_text_config(), model.dropout)
    return plan


def _set_dropout(settings: Any, probability: float) -> None:
    names = [name for name in (*ATTENTION_DROPOUT, *HIDDEN_DROPOUT, *OTHER_DROPOUT) if hasattr(settings, name)]
    if not names:
        raise UserMistake(f"model.dropout: {settings.model_type} has no dropout; leave it out.")
    for name in names:
        setattr(settings, name, probability)


def read_blueprint(folder: Path) -> Blueprint:
    """The model that a Hugging Face folder describes."""
    _import_transformers()
    settings = read_settings(folder)
    task = next((task for task in (MASKED, CLASSES) if _is_saved_as(settings, task)), CAUSAL)
    return Blueprint(settings, folder, task=task)


def _is_saved_as(settings: Any, task: str) -> bool:
    named = getattr(settings, "architectures", None) or ()
    return isinstance(named, list) and any(str(name).endswith(TASKS[task]) for name in named)


def _import_transformers() -> None:
    with importing("transformers.modeling_utils"):
        import transformers.modeling_utils  # noqa: F401  # what the code of every model imports


@dataclass(frozen=True)
class PreparedModel:
    """A transformers model without memory for its weights, ready to be parallelized or loaded."""

    model: Any  # on the meta device, in training mode
    anatomy: Anatomy
    folder: Path | None  # of the weights; None: they are initialized from the seed
    parameters: int  # without adapters
    trained_parameters: int
    matmul_parameters: int  # as the MFU formula counts them, without adapters
    adapters: AddedAdapters | None = None
    new_rows: Mapping[str, NewRows] = field(default_factory=dict)  # by the parameter's name

    @property
    def architecture(self) -> str:
        """The name of the transformers class."""
        return type(self.model).__name__


def prepare_model(
    plan: Blueprint,
    *,
    attention: str = "auto",
    longest: int = 1,
    freeze: Sequence[str] = (),
    adapter: AdapterConfig | None = None,
) -> PreparedModel:
    """The model of `plan`. `longest` is the length of the longest sequence, on which the attention
    implementation depends. Parameters whose names match a pattern of `freeze` are not trained; with an `adapter` only
    the adapter is."""
    model = _build_on_meta(plan, attention=attention, longest=longest)
    anatomy = read_anatomy(model)
    if plan.task == CLASSES and adapter is not None:
        # In full, as PEFT does: a fresh head has nothing to adapt.
        adapter = adapter.model_copy(update={"train_also": (*adapter.train_also, *head_parameters(model, anatomy))})
    parameters = dict(model.named_parameters())
    # Counted now: quantization replaces matrices by smaller ones.
    count, in_matmuls = sum(one.numel() for one in parameters.values()), matmul_parameters(parameters, anatomy)
    adapters = None
    if adapter is not None and adapter.kind != "none":
        adapters = add_adapters(model, anatomy, adapter)
    else:
        _freeze(model, freeze)
    return PreparedModel(
        model=model,
        anatomy=anatomy,
        folder=plan.folder,
        parameters=count,
        trained_parameters=sum(one.numel() for one in model.parameters() if one.requires_grad),
        matmul_parameters=in_matmuls,
        adapters=adapters,
        new_rows={} if plan.new_rows is None else dict.fromkeys(_with_a_row_per_token(model, anatomy), plan.new_rows),
    )


def _with_a_row_per_token(model: Any, anatomy: Anatomy) -> list[str]:
    """The parameters of embedding and head, by the names under which `named_parameters` lists them."""
    names = (anatomy.embedding, *(() if anatomy.classifies else (anatomy.head,)))
    modules = [model.get_submodule(name) for name in names]
    held = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    return [name for name, parameter in model.named_parameters() if id(parameter) in held]


def _build_on_meta(plan: Blueprint, *, attention: str, longest: int) -> Any:
    import transformers

    settings = plan.settings
    kind = getattr(transformers, f"AutoModel{TASKS[plan.task]}")
    try:
        with torch.device("meta"):
            # Ignores the attention implementation in config.json: it could name code on the hub, which transformers
            # would download and run.
            model = kind.from_config(settings, dtype=torch.float32, trust_remote_code=False, attn_implementation=None)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        called = {CAUSAL: "causal", MASKED: "masked"}.get(plan.task)
        what = "has no class for classification" if called is None else f"is not a {called} language model"
        raise UserMistake(f"{type(settings).__name__} {what} in transformers: {reason}") from None
    except Exception as error:  # of many types: an unknown activation is a KeyError
        if plan.folder is None:
            raise
        raise unbuildable(settings, plan.folder, error) from None
    model.set_attn_implementation(choose_attention(model, attention, longest))
    return model.train()


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of `patterns`."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise UserMistake(f"model.freeze: {pattern!r} matches no parameter; one is named {names[0]}.")
    for name, parameter in model.named_parameters():
        if any(fnmatch(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserMistake("model.freeze leaves no parameter to train.")

"""Every causal language model type of transformers against its own code: shoal trains the same model.

Earlier losses do not depend on later tokens, packed documents do not influence each other (or the type is listed as one
where they do), every stored tensor is used, and five steps are those of a plain loop.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version

from shoal.catalogue.attention import EAGER, is_maskless
from shoal.catalogue.causal_models import CAUSAL_IF, NEVER_CAUSAL, PACKED, UNPACKED, why_not_packed
from shoal.config.mesh import Mesh
from shoal.config.schema import ModelConfig
from shoal.data.loader import IGNORED, MicroBatch
from shoal.mistakes import UserMistake
from shoal.models.attention import MASKLESS, skips_tiles, window_within
from shoal.models.loss import LanguageModel
from shoal.models.prepare import blueprint, prepare_model
from shoal.models.read_weights import check_stored
from shoal.models.weights import Weights, materialize
from shoal.train.flops import count_flops
from tests.models.every_type import LISTED_UP_TO, TYPES, UNBUILDABLE, UNEVEN, small_settings
from tests.models.small import CPU, plain

LENGTH, SECOND = 24, 11  # tokens, and where the second document begins
STEPS = 5
RECURRENT = {"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"}  # without attention
# The quick ones: a plain model, windows per layer, chunks, a mask of its own, recurrent state, buffers in files and
# from the backbone, tied weights stored by another name.
QUICK = ("apertus", "camembert", "doge", "falcon_h1", "gemma3_text", "gpt_oss", "llama", "llama4_text", "qwen3_next")


def types(names: Any) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def module_of(folder: Path) -> LanguageModel:
    """The model of a folder, as training builds it."""
    plan = blueprint(ModelConfig.model_validate({"from": str(folder)}))
    prepared = prepare_model(plan, longest=LENGTH)
    check_stored(prepared.model, folder)
    skips_tiles(prepared.model, "auto", compiled=True)
    count_flops(prepared, Mesh())
    materialize(prepared.model, prepared.anatomy, device=CPU, dtype=torch.float32, source=Weights(folder, 0))
    return LanguageModel(prepared.model, prepared.anatomy, "plain")


def sequences(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, without special tokens."""
    tokens = torch.randint(3, 96, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def others(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens - 3 + 17) % 93 + 3


@torch.no_grad()
def loss_of(module: LanguageModel, inputs: torch.Tensor, labels: torch.Tensor, **packed: torch.Tensor) -> float:
    return module(MicroBatch(inputs.contiguous(), labels.contiguous(), **packed)).trained.item()


@pytest.mark.parametrize("model_type", types(name for name in TYPES if name not in NEVER_CAUSAL))
def test_a_model_is_trained_as_transformers_defines_it(model_type, tmp_path):
    settings = small_settings(model_type)
    model = perturb(plain(settings)).train()
    model.save_pretrained(tmp_path)
    module = module_of(tmp_path).train()
    if settings.get_text_config() is settings:  # a model around another may implement less than that does
        hold_attention(module.model.config)
    hold_causal(module)
    hold_documents_apart(module, settings.get_text_config().model_type)
    hold_equal_to_a_plain_loop(module, model)


def hold_attention(settings: Any) -> None:
    """As the forecast says: eager, or without masks of transformers."""
    found, windowed = getattr(settings, "_attn_implementation", None), window_within(settings, LENGTH) is not None
    assert (found == "eager") == (settings.model_type in EAGER | RECURRENT)
    assert (found == MASKLESS) == is_maskless(settings.model_type, windowed=windowed)


def perturb(model: Any) -> Any:
    """As if it were trained: some weights, such as the positions of BigBird-Pegasus, begin with equal values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


def hold_causal(module: LanguageModel) -> None:
    inputs, labels = sequences()
    labels[:, SECOND:] = IGNORED
    changed = inputs.clone()
    changed[:, SECOND:] = others(inputs[:, SECOND:])
    assert loss_of(module, changed, labels) == pytest.approx(loss_of(module, inputs, labels), rel=1e-6)


def hold_documents_apart(module: LanguageModel, model_type: str) -> None:
    """Packed documents have the losses that they have alone, whatever precedes them."""
    inputs, labels = sequences()
    documents = torch.zeros(inputs.shape, dtype=torch.int32)
    documents[:, SECOND:] = 1
    positions = torch.arange(LENGTH).repeat(2, 1)
    positions[:, SECOND:] -= SECOND
    alone = loss_of(module, inputs[:, SECOND:], labels[:, SECOND:])
    labels[:, :SECOND] = IGNORED
    changed = inputs.clone()
    changed[:, :SECOND] = others(inputs[:, :SECOND])
    packed = {"positions": positions, "documents": documents}
    try:
        found = [loss_of(module, each, labels, **packed) for each in (inputs, changed)]
        apart = found == pytest.approx([alone, alone], rel=1e-5)
    except (AssertionError, KeyError, RuntimeError, ValueError):  # its code does not accept the mask
        apart = False
    assert apart == (why_not_packed(model_type) is None)


def hold_equal_to_a_plain_loop(module: LanguageModel, model: Any) -> None:
    inputs, labels = sequences()
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (module.model, model))
    losses: list[tuple[float, float]] = []
    for _ in range(STEPS):
        found = module(MicroBatch(inputs, labels)).trained / labels.numel()
        logits = model(input_ids=inputs, use_cache=False).logits
        expected = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        for loss, optimizer in ((found, ours), (expected, theirs)):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append((found.item(), expected.item()))
    assert [one for one, _ in losses] == pytest.approx([other for _, other in losses], rel=1e-6)


@pytest.mark.parametrize("model_type", [*CAUSAL_IF, *NEVER_CAUSAL])
def test_a_model_that_is_not_causal_is_refused(model_type, tmp_path):
    settings = small_settings(model_type)
    if model_type in CAUSAL_IF:
        key, value = CAUSAL_IF[model_type]
        setattr(settings, key, not value if isinstance(value, bool) else "bi")
    settings.save_pretrained(tmp_path)
    with pytest.raises(UserMistake, match="use a causal language model"):
        blueprint(ModelConfig.model_validate({"from": str(tmp_path)}))


@pytest.mark.parametrize("model_type", UNEVEN)
def test_a_model_whose_layers_differ_in_size_is_refused(model_type, tmp_path):
    small_settings(model_type).save_pretrained(tmp_path)
    with pytest.raises(UserMistake, match="its layers differ in size"):
        blueprint(ModelConfig.model_validate({"from": str(tmp_path)}))


def test_every_type_is_listed_once():
    listed = [*PACKED, *NEVER_CAUSAL, *(name for names in UNPACKED.values() for name in names)]
    assert len(listed) == len(set(listed))
    found = {small_settings(name).get_text_config().model_type for name in TYPES}
    if Version(transformers.__version__) == LISTED_UP_TO:
        assert found == set(listed)
    assert not set(TYPES) & set(UNBUILDABLE)
    assert "is not tested" in str(why_not_packed("a-type-of-next-year"))

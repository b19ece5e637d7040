"""Rows of added tokens, in every type of model: what transformers' resized model computes with the same rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.catalogue.causal_models import NEVER_CAUSAL, why_no_new_tokens
from shoal.models.prepare import prepare_model, read_blueprint
from shoal.models.read_weights import check_stored
from shoal.models.weights import Weights, materialize
from tests.models.every_type import TYPES, VOCAB, small_settings
from tests.models.small import CPU, plain
from tests.models.test_every_type import perturb

# A tied and an untied head, one with a bias, and one that is stored by another name than the embedding's.
QUICK = ("camembert", "gpt2", "gptj", "llama")
ADDED = (VOCAB, VOCAB + 1, VOCAB + 2)
GROWN = 128  # VOCAB is a multiple of 32
RESIZED_BY_TRANSFORMERS = [name for name in TYPES if name not in NEVER_CAUSAL and name != "xlstm"]


def extended(folder: Path, tokens: tuple[int, ...] = ADDED, known: int = VOCAB) -> Any:
    prepared = prepare_model(read_blueprint(folder).with_tokens(tokens, known), attention="eager")
    check_stored(prepared.model, folder, prepared.new_rows)
    source = Weights(folder, 0, prepared.new_rows)
    materialize(prepared.model, prepared.anatomy, device=CPU, dtype=torch.float32, source=source)
    return prepared.model.eval()


def set_to_mean(rows: Tensor, tokens: tuple[int, ...], known: int) -> None:
    rows[list(tokens)] = rows[:known].double().mean(0).float()


@torch.no_grad()
@pytest.mark.parametrize(
    "model_type",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RESIZED_BY_TRANSFORMERS],
)
def test_added_tokens_are_the_mean_of_the_others_in_embedding_head_and_bias(model_type, tmp_path):
    settings = small_settings(model_type)
    text = settings.get_text_config()
    if why_no_new_tokens(text.model_type, text) is not None:
        pytest.skip("refused")
    model = perturb(plain(settings)).eval()
    model.save_pretrained(tmp_path)
    ours = extended(tmp_path)
    model.resize_token_embeddings(GROWN, mean_resizing=False)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for parameter in {embedding.weight, *head.parameters(recurse=False)}:
        set_to_mean(parameter, tuple(range(VOCAB, GROWN)), VOCAB)
    model.set_attn_implementation("eager")
    tokens = torch.tensor([[1, VOCAB, 5, VOCAB + 2, 7, VOCAB + 1, 9, 3]])
    expected, found = (one(input_ids=tokens, use_cache=False).logits for one in (model, ours))
    assert found.shape[-1] == GROWN
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_tokens_in_spare_rows_are_the_mean_of_the_known_ones_and_nothing_is_resized(tmp_path):
    known, tokens = VOCAB - 6, (VOCAB - 6, VOCAB - 5)
    saved = perturb(plain(small_settings("llama"))).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    model = extended(tmp_path, tokens, known)
    for found, before in (
        (model.model.embed_tokens.weight, saved.model.embed_tokens.weight.float()),
        (model.lm_head.weight, saved.lm_head.weight.float()),
    ):
        set_to_mean(before, tokens, known)  # in fp32, although the files are in bf16
        torch.testing.assert_close(found.detach(), before, rtol=1e-6, atol=0)

"""How attention is computed where, and when the user is told that its memory grows with the square of the sequence."""

from typing import Any

import pytest

from shoal.catalogue.attention import Heads, choose_attention_path

H200, A10, T4 = (9, 0), (8, 6), (7, 5)


def heads(width: int = 128, itemsize: int = 2, capability: tuple[int, int] | None = H200, **others: Any) -> Heads:
    return Heads(itemsize, width, others.pop("value_width", width), capability=capability, **others)


@pytest.mark.parametrize(
    ("given", "settings", "path"),
    [
        (heads(64), {}, "fused"),
        (heads(256), {}, "fused"),
        (heads(64, itemsize=4), {"grouped": True}, "fused"),
        (heads(64, capability=T4), {"grouped": True}, "fused"),
        (heads(64, dropout=True), {}, "fused"),
        (heads(128), {"windowed": True}, "tiles"),
        (heads(256), {"windowed": True}, "window"),
        (heads(128, dropout=True), {"windowed": True}, "window"),
        (heads(128), {"windowed": True, "compiled": False}, "window"),
        (heads(128, itemsize=4), {"windowed": True}, "bands"),
        (heads(208, capability=A10), {"windowed": True}, "bands"),
        (heads(64, capability=None), {"windowed": True, "cpu": True}, "bands"),
        (heads(64), {"documents": True}, "tiles"),
        (heads(64), {"documents": True, "windowed": True}, "tiles"),
        (heads(64, capability=None), {"documents": True, "cpu": True}, "dense mask"),
    ],
)
def test_no_scores_are_stored_where_a_kernel_avoids_it(given, settings, path):
    found = choose_attention_path(given, "mistral", **settings)
    assert found.path == path
    assert found.warning(8192) is None


@pytest.mark.parametrize(
    ("given", "settings", "path", "says"),
    [
        (heads(64), {"eager": True}, "scores", "leave model.attention at auto"),
        (heads(256), {"model_type": "gemma2"}, "scores", "transformers has only eager attention for gemma2"),
        (heads(64, dropout=True), {"documents": True}, "dense mask", "set model.dropout to 0"),
        (heads(64), {"documents": True, "compiled": False}, "dense mask", "set train.compile to true"),
        (heads(64), {"documents": True, "sharded": True}, "dense mask", "parallel.cp has no flex attention"),
        (heads(8), {"documents": True}, "dense mask", "heads of 8 are too small"),
        (heads(64), {"windowed": True, "model_type": "phimoe"}, "dense mask", "a data.max_length within the window"),
        (heads(64, itemsize=4), {"grouped": True, "model_type": "lfm2"}, "scores", "use train.precision bf16-mixed"),
        (heads(6), {}, "fused", None),
        (heads(6, itemsize=4), {}, "scores", "no kernel supports heads of 6 in fp32"),
        (
            heads(64, capability=None, dropout=True),
            {"cpu": True},
            "scores",
            "a CPU has no fused attention with dropout",
        ),
    ],
)
def test_a_warning_says_why_and_what_to_do_instead(given, settings, path, says):
    found = choose_attention_path(given, settings.pop("model_type", "llama"), **settings)
    assert found.path == path
    assert (found.warning(8192) is None) if says is None else (says in str(found.warning(8192)))
    assert found.warning(512) is None  # scores of short sequences are small

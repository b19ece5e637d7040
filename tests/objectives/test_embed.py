"""`shoal embed` and `shoal predict`: one row per example, equal to what transformers computes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from shoal import api
from shoal.mistakes import UserMistake
from shoal.use.embed import encode_data
from tests.encoders import classifying, masked, write_labelled
from tests.harness import reference_run
from tests.launch.command import forked_shoal


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def classifier(rows: Path) -> Path:
    return reference_run(classifying(rows, train__steps=2))


def texts(rows: Path) -> list[str]:
    return [json.loads(line)["text"] for line in rows.read_text().splitlines()]


def test_embeddings_are_those_of_transformers(classifier, rows, tmp_path):
    from transformers import AutoModel

    unlabelled = tmp_path / "unlabelled.jsonl"
    unlabelled.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts(rows)[:5], ""]))
    seen = forked_shoal(
        tmp_path, "embed", str(classifier), str(unlabelled), "-o", str(tmp_path / "found.safetensors"), "--json"
    )
    assert json.loads(seen.out) == {
        "run": str(classifier), "step": 2, "examples": 6, "size": 32, "output": str(tmp_path / "found.safetensors")
    }  # fmt: skip
    found = load_file(tmp_path / "found.safetensors")
    api.export(classifier, output=tmp_path / "hf")
    model = AutoModel.from_pretrained(tmp_path / "hf").eval()
    for row, text in enumerate([*texts(rows)[:5], ""]):
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([[256, *text.encode(), 257]])).last_hidden_state[0]
        assert found["embeddings"][row] == pytest.approx(hidden.mean(0).numpy(), abs=2e-6)
    first = api.embed(classifier, [f"data.path={unlabelled}"], pool="cls").embeddings[5]
    assert first == pytest.approx(hidden[0].numpy(), abs=2e-6)


def test_predictions_are_the_most_probable_classes(classifier, rows, tmp_path):
    seen = forked_shoal(tmp_path, "predict", str(classifier), str(rows), "-o", str(tmp_path / "found.jsonl"))
    assert seen.status == 0, seen.err
    found = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [one["index"] for one in found] == list(range(96))
    for one in found:
        assert sum(one["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert one["label"] == max(one["probabilities"], key=one["probabilities"].get)
    kinds = [json.loads(line)["kind"] for line in rows.read_text().splitlines()]
    accuracy = np.mean([one["label"] == kind for one, kind in zip(found, kinds, strict=True)])
    evaluated = api.evaluate(classifier, [f"data.path={rows}"])
    assert evaluated.metrics["accuracy"] == pytest.approx(accuracy)


def test_the_batch_of_an_example_does_not_change_what_is_computed_of_it(classifier, rows):
    """Texts of 7 to 95 tokens: alone there is no padding, together there is."""
    alone, together = (encode_data(classifier, [f"data.path={rows}"], batch=batch) for batch in (1, 40))
    assert alone.embeddings == pytest.approx(together.embeddings, abs=2e-6)
    assert alone.probabilities == pytest.approx(together.probabilities, abs=2e-6)


def test_tokens_are_no_examples(classifier, tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(UserMistake, match=r"data.source tokens is one stream, not examples; give records with a text"):
        api.embed(classifier, [f"data.path={tmp_path / 'a.bin'}", "data.source=tokens"], output=tmp_path / "a.npy")


def test_mistakes_are_one_sentence_before_anything_is_computed(classifier, rows, tmp_path):
    pretrained = reference_run(masked(rows, train__steps=2))
    for run, output, sentence in (
        (classifier, "found.txt", "--output .*found.txt must end in .npy, .safetensors, .h5ad"),
        (classifier, "taken.npy", "taken.npy already exists"),
        (classifier, "found.h5ad", ".h5ad is for cells, and this run has text"),
        (tmp_path, "found.npy", "is neither a run"),
    ):
        (tmp_path / "taken.npy").write_bytes(b"")
        with pytest.raises(UserMistake, match=sentence):
            api.embed(run, output=tmp_path / output)
    with pytest.raises(UserMistake, match=r"has no classes: it was not trained with train.objective classify"):
        api.predict(pretrained, output=tmp_path / "found.jsonl")
    with pytest.raises(UserMistake, match=r"\.h5ad is for cells, and this run has text; use \.jsonl\."):
        api.predict(classifier, output=tmp_path / "found.h5ad")
    with pytest.raises(UserMistake, match="is an encoder, which writes no text; use shoal embed or shoal predict"):
        api.generate(pretrained, "a cat", write=lambda _: None)

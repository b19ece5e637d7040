"""Classification: a fresh or a pretrained encoder, full or LoRA, with accuracy and macro-F1 over all ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal import api
from shoal.mistakes import UserMistake
from shoal.objectives.classify import macro_f1
from tests.encoders import classifying, masked, write_labelled
from tests.harness import lines, reference_run, train_again_on, train_on, weights


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def pretrained(rows: Path) -> Path:
    return reference_run(masked(rows, train__steps=2))


def evaluations(run: Path) -> list[dict]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "eval_loss" in line]


def predictions(folder: Path, rows: Path) -> torch.Tensor:
    """The logits of transformers for each row, by its own tokenizer."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return logits_of(model, rows)


def logits_of(model, rows: Path) -> torch.Tensor:
    found = []
    for line in rows.read_text().splitlines():
        tokens = [256, *json.loads(line)["text"].encode()[:142], 257]
        with torch.no_grad():
            found.append(model(input_ids=torch.tensor([tokens])).logits[0])
    return torch.stack(found)


def test_macro_f1_is_the_mean_over_classes_that_occur():
    labels, found = np.array([0, 0, 1, 1, 1, 3]), np.array([0, 1, 1, 1, 4, 4])
    counts = [np.bincount(one, minlength=6) for one in (labels, found, labels[labels == found])]
    # By hand: class 0 has 2/3, class 1 2/3, class 3 and 4 none, and 2 and 5 do not occur.
    assert macro_f1(*counts) == pytest.approx((2 / 3 + 2 / 3 + 0 + 0) / 4)


def test_metrics_count_every_held_out_example_of_all_ranks_once(rows, tmp_path):
    """22 examples on two ranks, in micro-batches of four."""
    changes = {"data__validation": 0.22, "train__steps": 1, "eval__every": 1, "train__lr": 1e-2}
    runs = [train_again_on(size, classifying(rows, **changes, name=f"on-{size}"), tmp_path) for size in (1, 2)]
    one, two = (evaluations(run)[-1] for run in runs)
    assert two == pytest.approx({**one, "step": 1}, rel=1e-6)
    assert two["eval_accuracy"] * 22 == pytest.approx(round(two["eval_accuracy"] * 22))
    seen = api.evaluate(runs[0])
    assert (seen.tokens, seen.counted) == (22, "examples")
    assert seen.metrics["accuracy"] == pytest.approx(one["eval_accuracy"])
    assert seen.metrics["macro_f1"] == pytest.approx(one["eval_macro_f1"])


def test_an_exported_classifier_is_what_transformers_loads(rows, tmp_path):
    run = train_again_on(1, classifying(rows, train__steps=2, data__validation=str(rows), eval__every=2), tmp_path)
    api.export(run, output=tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert settings["architectures"] == ["BertForSequenceClassification"]
    assert settings["id2label"] == {"0": "animal", "1": "food", "2": "tool"}
    logits = predictions(tmp_path / "hf", rows)
    labels = torch.tensor([settings["label2id"][json.loads(line)["kind"]] for line in rows.read_text().splitlines()])
    loss = torch.nn.functional.cross_entropy(logits, labels)
    (evaluated,) = evaluations(run)
    assert evaluated["eval_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert evaluated["eval_accuracy"] == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))


def test_a_classifier_starts_from_a_masked_lm_run_with_a_fresh_head(pretrained, rows, tmp_path, capfd):
    run = train_on(1, classifying(rows, model__from=str(pretrained), train__steps=1, train__lr=1e-12), tmp_path)
    said = capfd.readouterr()
    assert "bert.pooler.dense, classifier start from random values" in said.out + said.err
    before, after = weights(pretrained), weights(run)
    shared = [name for name in after if name in before]
    assert len(shared) == len(after) - 4
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in shared)
    assert float(after["classifier.weight"].std()) == pytest.approx(0.02, rel=0.5)


@pytest.mark.slow
def test_lora_trains_the_head_in_full_and_peft_loads_it(pretrained, rows, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    config = classifying(rows, model__from=str(pretrained), adapter={"kind": "lora", "rank": 4}, train__steps=2)
    run = train_again_on(2, {**config, "parallel": {"strategy": "fsdp"}}, tmp_path)
    expected = train_again_on(1, {**config, "name": "alone"}, tmp_path)
    assert [line["loss"] for line in lines(run)] == pytest.approx([line["loss"] for line in lines(expected)], rel=2e-6)
    trained = weights(run)
    assert {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight"} < set(trained)
    assert all("lora" in name or "classifier" in name or "pooler" in name for name in trained)
    api.merge(run, output=tmp_path / "merged")
    api.export(run, output=tmp_path / "adapter", adapter=True)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["task_type"] == "SEQ_CLS"
    (base,) = (pretrained / "exported").glob("step-*[0-9]")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert torch.allclose(logits_of(adapted, rows), predictions(tmp_path / "merged", rows), atol=1e-5)


@pytest.mark.slow
def test_a_classifier_of_the_same_classes_goes_on_with_its_head_and_of_others_with_a_fresh_one(rows, tmp_path):
    first = train_again_on(1, classifying(rows, train__steps=2), tmp_path)
    same = train_again_on(1, classifying(rows, model__from=str(first), name="same", train__lr=1e-12), tmp_path)
    assert torch.allclose(weights(first)["classifier.weight"], weights(same)["classifier.weight"], atol=1e-6)
    renamed = write_labelled(tmp_path / "renamed.jsonl", animal="beast")
    other = train_again_on(1, classifying(renamed, model__from=str(first), name="other", train__lr=1e-12), tmp_path)
    assert not torch.allclose(weights(first)["classifier.weight"], weights(other)["classifier.weight"], atol=1e-3)
    assert torch.allclose(
        weights(first)["bert.pooler.dense.weight"], weights(other)["bert.pooler.dense.weight"], atol=1e-6
    )
    with pytest.raises(UserMistake, match=r"have a label that no training example has, such as beast; the classes"):
        api.evaluate(first, [f"data.path={renamed}"])

"""`shoal eval --tasks` runs tasks of lm-evaluation-harness that are on this machine."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.use import tasks
from shoal.use.load import load_run
from tests.use.conftest import Ended

Shoal = Callable[..., Ended]


def test_without_the_package_it_says_what_to_install(
    text_run: Path, shoal: Shoal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    shoal("eval", text_run, "--tasks", "hellaswag").hold_mistake("needs the package lm-eval", "'shoal[eval]'")


def write_task(folder: Path) -> list[tuple[str, list[str], int]]:
    """A task of the user's: two continuations of each text, of which one is right."""
    items = [("def ", ["main", "1234"], 0), ("import ", ["%%%%", "os"], 1), ("for ", ["x in", "####"], 0)]
    folder.mkdir()
    rows = [{"text": text, "endings": endings, "label": label} for text, endings, label in items]
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "endings.yaml").write_text(
        "task: endings\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: '{folder}/items.jsonl'}}}}\n"
        "test_split: test\n"
        "output_type: multiple_choice\n"
        "doc_to_text: '{{text}}'\n"
        "doc_to_choice: '{{endings}}'\n"
        "doc_to_target: label\n"
        "target_delimiter: ''\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return items


@pytest.mark.slow
def test_a_task_in_a_folder_is_scored_by_the_likelihoods_of_the_runs_model(
    text_run: Path, tmp_path: Path, shoal: Shoal
) -> None:
    pytest.importorskip("lm_eval")
    folder = tmp_path / "tasks"
    items = write_task(folder)
    asked = ("eval", text_run, "--tasks", "endings", "--task-path", folder)
    shoal(*asked).hold_mistake("which are code", "add --allow-code")
    found = shoal(*asked, "--allow-code", "--json").json

    loaded = load_run(text_run, device="cpu")

    def likelihood(text: str, ending: str) -> float:
        ids = torch.tensor([[*loaded.tokenizer.encode(text), *loaded.tokenizer.encode(ending)]])
        with torch.no_grad():
            log_probs = loaded.model(ids).logits.float().log_softmax(-1)
        return sum(log_probs[0, at - 1, ids[0, at]].item() for at in range(len(text), ids.shape[1]))

    right = [max((0, 1), key=lambda index: likelihood(text, endings[index])) == label for text, endings, label in items]
    assert found["tasks"]["endings"]["acc"] == pytest.approx(sum(right) / len(right))
    assert (found["run"], found["step"], found["examples"]) == (str(text_run), 4, {"endings": 3})
    assert math.isfinite(found["tasks"]["endings"]["acc_stderr"])
    assert "endings  acc 0." in shoal(*asked, "--allow-code", "-n", 2).out or found["tasks"]["endings"]["acc"] in (0, 1)
    unknown = shoal("eval", text_run, "--tasks", "hellaswg")
    assert (unknown.status, unknown.out) == (2, "")
    assert "has no task hellaswg" in unknown.err
    assert "hellaswag" in unknown.err
    shoal(*asked, "--allow-code", "data.path=x").hold_mistake("has no effect with --tasks")

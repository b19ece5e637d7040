"""The task that submitit runs, without a cluster: tests/slurm runs it on one."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal.launch import submitit_task
from shoal.mistakes import UserMistake

submitit = pytest.importorskip("submitit")

CONFIG = {"name": "task", "model": {"shape": "gpt2"}, "data": {"path": "text.txt"}, "train": {"lr": 3e-4, "steps": 5}}


def test_what_is_requeued_is_the_same_task() -> None:
    task = submitit_task(CONFIG, runs="elsewhere")
    again = task.checkpoint()
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    sent = pickle.loads(pickle.dumps(again.function))  # as submitit does with the user's own job
    assert (sent.values, sent.runs) == (task.values, str(Path("elsewhere").absolute()))
    assert sent.values["train"]["lr"] == 3e-4


def test_a_file_with_overrides_and_a_config_of_hydra_are_taken(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    by_file = submitit_task(tmp_path / "run.yaml", ["train.lr=1e-3"])
    composed = OmegaConf.create({"trainer": {"lr": 1e-3, "steps": 5}, "run": {**CONFIG, "train": "${trainer}"}})
    assert submitit_task(composed.run).values == by_file.values


@pytest.mark.parametrize(
    ("config", "overrides", "sentence"),
    [
        ({**CONFIG, "trane": {}}, (), "trane"),
        (CONFIG, ("train.lr=1",), "overrides are for a file"),
        (3, (), "must be a Config, a mapping or a path"),
    ],
)
def test_mistakes_are_found_before_anything_is_submitted(
    config: object, overrides: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UserMistake, match=sentence):
        submitit_task(config, overrides)  # type: ignore[arg-type]


def test_neither_torch_nor_submitit_is_imported_to_make_a_task() -> None:
    program = (
        "import sys; from shoal.launch import submitit_task; "
        f"submitit_task({CONFIG!r}); print([name for name in ('torch', 'submitit') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"

"""Checkpoint folders: complete or nonexistent, only JSON and safetensors, and kept according to the config."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shoal.checkpoint import state, store
from shoal.checkpoint.retention import tidy, to_keep
from shoal.checkpoint.snapshot import write_snapshot
from shoal.parallel.ranks import Ranks
from tests.checkpoint.cut import attempts, everything, hold_bitwise
from tests.harness import lines, settings, slow, train_again_on, train_on, written_slices

STEPS = 4


def config_of(data: Path, **changes: Any) -> dict[str, Any]:
    short = {"train__steps": STEPS, "data__max_length": 48, "data__train_on": "all"}
    return settings(data, **{**short, "checkpoint__every": 2, "checkpoint__keep": 9, **changes})


@pytest.fixture(scope="module")
def trained(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with the checkpoints step-2 and step-4."""
    return train_again_on(2, config_of(instructions, parallel__strategy="fsdp"), tmp_path_factory.mktemp("trained"))


@pytest.fixture
def checkpoints(trained: Path, tmp_path: Path) -> Path:
    """A copy of its checkpoints, to damage."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run" / "checkpoints"


def newest_of(checkpoints: Path) -> str | None:
    found = state.newest([checkpoints], Ranks(0, 1, 0, torch.device("cpu")))
    return None if found is None else found.name


def description(path: Path) -> dict[str, Any]:
    contents = path.read_bytes()
    return {"size": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped byte": flip,
    "truncated": truncate,
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}
FILES = [
    "rank-00000.safetensors",
    "rank-00001.safetensors",
    "progress.json",
    "config.json",
]


def test_without_damage_the_newest_is_taken(checkpoints):
    assert newest_of(checkpoints) == "step-00000004"
    assert [one.step for one in store.list_complete(checkpoints)] == [2, 4]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_makes_resume_take_the_checkpoint_before(damage, file, checkpoints):
    DAMAGES[damage](checkpoints / "step-00000004" / file)
    assert newest_of(checkpoints) == "step-00000002"


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"format": 1, "step": 4, "metrics": {}, "files": []}'])
def test_a_folder_without_a_valid_manifest_does_not_exist(text, checkpoints):
    manifest = checkpoints / "step-00000004" / store.MANIFEST
    manifest.unlink() if text is None else manifest.write_text(text)
    assert store.read_manifest(manifest.parent) is None
    assert [one.step for one in store.list_complete(checkpoints)] == [2]
    assert newest_of(checkpoints) == "step-00000002"


def test_a_checkpoint_of_another_format_is_not_read_as_ours(checkpoints):
    path = checkpoints / "step-00000004" / store.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": store.FORMAT + 1}))
    assert newest_of(checkpoints) == "step-00000002"


def test_when_all_are_damaged_there_is_none(checkpoints):
    for folder in checkpoints.glob("step-*"):
        flip(folder / "rank-00000.safetensors")
    assert newest_of(checkpoints) is None


@pytest.mark.parametrize("damage", ["flipped byte", slow("truncated"), slow("deleted")])
def test_a_run_whose_newest_checkpoint_is_damaged_resumes_from_the_previous_one(
    damage, trained, checkpoints, instructions, tmp_path, capfd
):
    file = checkpoints / "step-00000004" / "rank-00001.safetensors"
    DAMAGES[damage](file)
    train_on(2, config_of(instructions, parallel__strategy="fsdp"), tmp_path, resume=True)
    said = " ".join(capfd.readouterr().err.split())
    assert f"{file} is damaged" in said
    assert f"Resuming after step 2 from {checkpoints / 'step-00000002'}" in said
    assert attempts(checkpoints.parent) == [0, 0, 1, 1]
    hold_bitwise(checkpoints.parent, trained)
    assert newest_of(checkpoints) == "step-00000004", "the damaged one was written again"


def test_a_damaged_record_of_the_data_does_not_pass_for_other_data(checkpoints, instructions, tmp_path, capfd):
    file = checkpoints / "step-00000004" / "progress.json"
    content = json.loads(file.read_text())["data"]["training"]["content"]
    file.write_text(file.read_text().replace(content, content[::-1]))
    train_on(2, config_of(instructions, parallel__strategy="fsdp"), tmp_path, resume=True)
    assert f"Resuming after step 2 from {checkpoints / 'step-00000002'}" in " ".join(capfd.readouterr().err.split())


def test_a_run_whose_checkpoints_are_all_damaged_starts_over_and_keeps_them(checkpoints, instructions, tmp_path, capfd):
    flip(checkpoints / "step-00000002" / "rank-00000.safetensors")
    (checkpoints / "step-00000004" / "progress.json").unlink()
    before = {folder.name: sorted(path.name for path in folder.iterdir()) for folder in checkpoints.glob("step-*")}
    train_on(2, config_of(instructions, parallel__strategy="fsdp"), tmp_path, resume=True)
    assert "warning: there is no complete checkpoint to resume from: starting at step 0." in capfd.readouterr().err
    kept = {folder.name: sorted(path.name for path in folder.iterdir()) for folder in checkpoints.glob("abandoned-*")}
    assert kept == {name.replace("step", "abandoned"): names for name, names in before.items()}
    assert newest_of(checkpoints) == "step-00000004"


@pytest.mark.parametrize("name", ["../outside", "sub/inside", "..", "ABSOLUTE"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name, checkpoints):
    folder = checkpoints / "step-00000004"
    outside = checkpoints / "outside"
    (folder / "sub").mkdir()
    for path in (outside, folder / "sub" / "inside"):
        path.write_text("secret")
    name = str(outside) if name == "ABSOLUTE" else name
    path = folder / store.MANIFEST
    manifest = json.loads(path.read_text())
    described = description(folder / name) if (folder / name).is_file() else {"sha256": "0" * 64}
    manifest["files"][name] = {**described, "size": (folder / name).stat().st_size}
    path.write_text(json.dumps(manifest))
    assert newest_of(checkpoints) == "step-00000002"


def test_the_manifest_lists_every_other_file_with_its_size_and_hash(checkpoints):
    for one in store.list_complete(checkpoints):
        there = {path.name for path in one.path.iterdir()} - {store.MANIFEST}
        assert set(one.files) == there
        assert {name: description(one.path / name) for name in there} == one.files
        assert one.size == sum((one.path / name).stat().st_size for name in there)


def test_the_manifest_is_written_last(tmp_path, monkeypatch):
    """All files are on disk when the manifest appears."""
    seen: list[bool] = []
    write = store.write_atomically

    def watched(path: Path, text: str) -> None:
        if path.name == store.MANIFEST:
            assert not path.exists()
            seen.append(all((path.parent / name).is_file() for name in json.loads(text)["files"]))
            assert store.read_manifest(path.parent) is None
        write(path, text)

    monkeypatch.setattr(store, "write_atomically", watched)
    folder = store.begin(tmp_path, 1)
    store.write_hashes(folder, 0, {"progress.json": write_snapshot(folder / "progress.json", [memoryview(b"{}")])})
    store.finish(folder, 1, {})
    assert seen == [True]
    assert (tmp_path / "latest").read_text() == "step-00000001\n"


def test_files_of_an_interrupted_save_are_removed(tmp_path):
    folder = store.begin(tmp_path, 3)
    (folder / "rank-00007.safetensors").write_text("{}")
    assert store.list_complete(tmp_path) == []
    assert list(store.begin(tmp_path, 3).iterdir()) == []


def test_latest_names_the_newest(checkpoints):
    assert (checkpoints / "latest").read_text() == "step-00000004\n"
    assert not list(checkpoints.rglob("*.tmp"))


def test_every_file_of_a_checkpoint_is_json_or_safetensors_and_opens_as_such(checkpoints):
    files = [path for path in checkpoints.glob("step-*/*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert {path.name for path in files} == {
        "rank-00000.safetensors",
        "rank-00001.safetensors",
        "progress.json",
        "config.json",
        "MANIFEST.json",
    }
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            with safe_open(path, framework="pt") as opened:
                assert list(opened.keys())


def test_no_rank_writes_what_another_has_written(checkpoints):
    """The slices of every tensor cover it exactly once."""
    held: dict[str, list[int]] = {}
    for table in written_slices(checkpoints / "step-00000004"):
        for name, (here, whole) in table.items():
            held.setdefault(name, [whole]).append(here)
    assert {name for name in held if name.startswith("model.")} == {
        name for name in everything(checkpoints.parent) if name.startswith("model.")
    }
    assert [name for name, (whole, *parts) in held.items() if sum(parts) != whole] == []


def test_ddp_ranks_share_the_writing_of_replicated_tensors(instructions, tmp_path):
    run = train_again_on(2, config_of(instructions, parallel__strategy="ddp", train__steps=1), tmp_path)
    folder = run / "checkpoints" / "step-00000001"
    tables = written_slices(folder)
    assert len(tables) == 2
    assert not set(tables[0]) & set(tables[1])
    sizes = [path.stat().st_size for path in folder.glob("rank-*.safetensors")]
    assert max(sizes) < 1.2 * min(sizes)


# Retention.


def fake(checkpoints: Path, step: int, **metrics: float) -> None:
    folder = store.begin(checkpoints, step)
    store.write_hashes(folder, 0, {"progress.json": write_snapshot(folder / "progress.json", [memoryview(b"{}")])})
    store.finish(folder, step, metrics)


def kept(checkpoints: Path) -> list[int]:
    return [one.step for one in store.list_complete(checkpoints)]


@pytest.mark.parametrize(
    ("newest", "best", "expected"),
    [(2, 0, [5, 6]), (1, 1, [2, 6]), (1, 2, [2, 4, 6]), (2, 3, [1, 2, 4, 5, 6]), (9, 0, [1, 2, 3, 4, 5, 6])],
)
def test_the_newest_and_the_best_are_kept(newest, best, expected, tmp_path):
    for step, loss in enumerate([2.5, 1.0, 4.0, 2.0, 3.0, 5.0], start=1):
        fake(tmp_path, step, eval_loss=loss)
    gone = tidy(tmp_path, newest=newest, best=best, metric="eval_loss")
    assert kept(tmp_path) == expected
    assert sorted(gone + expected) == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in tmp_path.glob("step-*")} == {f"step-{step:08d}" for step in expected}


def test_checkpoints_at_keep_every_are_never_removed(tmp_path):
    for step in range(10, 110, 10):
        fake(tmp_path, step)
    tidy(tmp_path, newest=1, best=0, metric="eval_loss", every=30)
    assert kept(tmp_path) == [30, 60, 90, 100]


def test_the_newest_is_always_kept(tmp_path):
    for step in (1, 2):
        fake(tmp_path, step, eval_loss=float(step))
    tidy(tmp_path, newest=0, best=0, metric="eval_loss")
    assert kept(tmp_path) == [2]


def test_a_checkpoint_that_was_not_measured_is_not_among_the_best(tmp_path):
    fake(tmp_path, 1, loss=0.1)
    fake(tmp_path, 2, eval_loss=3.0)
    fake(tmp_path, 3)
    tidy(tmp_path, newest=1, best=1, metric="eval_loss")
    assert kept(tmp_path) == [2, 3]


def test_a_nan_loss_is_never_the_best(tmp_path):
    for step, loss in enumerate([math.nan, 2.0, math.nan, 1.0, 3.0, math.nan], start=1):
        fake(tmp_path, step, eval_loss=loss)
    assert to_keep(store.list_complete(tmp_path), newest=1, best=2, metric="eval_loss") == {2, 4, 6}


def test_a_half_written_folder_is_neither_counted_nor_removed_by_retention(tmp_path):
    for step in (1, 2, 3):
        fake(tmp_path, step)
    store.begin(tmp_path, 4)
    tidy(tmp_path, newest=2, best=0, metric="eval_loss")
    assert kept(tmp_path) == [2, 3]
    assert (tmp_path / "step-00000004").is_dir()


def test_an_interrupted_removal_is_completed_after_the_next_save(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        fake(tmp_path, step)

    def interrupted(folder: Path, **_: Any) -> None:
        next(iter(sorted(folder.iterdir()))).unlink()
        raise OSError("killed, or a disk that is busy")

    with monkeypatch.context() as changed:
        changed.setattr(shutil, "rmtree", interrupted)
        tidy(tmp_path, newest=1, best=0, metric="eval_loss")
    assert kept(tmp_path) == [3]
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-00000003"}
    fake(tmp_path, 4)
    tidy(tmp_path, newest=1, best=0, metric="eval_loss")
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-00000004"}


def test_steps_are_sorted_as_integers(tmp_path):
    for step in (99_999_999, 100_000_000):
        fake(tmp_path, step)
    assert kept(tmp_path) == [99_999_999, 100_000_000]


def test_a_run_keeps_its_newest_and_its_best(instructions, tmp_path):
    # With a tiny learning rate, the step with the lowest loss depends on its examples only.
    keep = {"every": 1, "keep": 1, "keep_best": 1, "metric": "loss"}
    run = train_again_on(1, config_of(instructions, checkpoint=keep, train__lr=1e-9, seed=3), tmp_path)
    losses = {line["step"]: line["loss"] for line in lines(run)}
    best = min(losses, key=lambda step: losses[step])
    assert best != STEPS, "or this shows nothing: choose another seed"
    assert kept(run / "checkpoints") == [best, STEPS]
    assert store.list_complete(run / "checkpoints")[0].metrics == {"loss": losses[best]}

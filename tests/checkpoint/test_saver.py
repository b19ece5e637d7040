"""Asynchronous saves: a checkpoint holds the state at the time of the call, and one save runs at a time."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint import snapshot, store
from shoal.checkpoint.layout import Part, SliceReader
from shoal.checkpoint.saver import Destination, Saver
from shoal.checkpoint.snapshot import HostCopy, lay_out, write_snapshot
from shoal.models.tensor_slices import slice_mappings
from shoal.parallel.ranks import Ranks
from tests.checkpoint.cut import everything, hold_bitwise
from tests.harness import PATIENCE, settings, slow, train_again_on, train_on, written_slices

ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def parts_of(**tensors: torch.Tensor) -> dict[str, Part]:
    return {name: Part(tensor, slice_mappings(tensor, None), tuple(tensor.shape)) for name, tensor in tensors.items()}


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that blocks writes until the event is set."""
    ready = threading.Event()
    fdatasync = snapshot.os.fsync

    def wait(descriptor: int) -> None:
        if threading.current_thread().name == "shoal-save":
            ready.wait(PATIENCE)
        fdatasync(descriptor)

    monkeypatch.setattr(snapshot.os, "fsync", wait)
    return ready


def test_changes_during_an_asynchronous_save_are_not_in_the_checkpoint(slow_disk, tmp_path):
    saver = Saver([Destination(tmp_path)], ALONE)
    weight = torch.arange(6.0)
    saver.save(1, parts_of(weight=weight), {"progress.json": "{}"}, {})
    assert saver.poll() is None, "it waited for the disk"
    weight.fill_(-1)
    slow_disk.set()
    ended = saver.settle()
    assert ended is not None
    assert ended.folder == tmp_path / "step-00000001"
    assert SliceReader(ended.folder).read_whole("weight").tolist() == [0, 1, 2, 3, 4, 5]


def test_a_second_save_waits_for_the_first_and_both_are_complete(slow_disk, tmp_path):
    saver = Saver([Destination(tmp_path)], ALONE)
    weight = torch.zeros(4)
    saver.save(1, parts_of(weight=weight), {}, {})
    weight.fill_(2)
    threading.Timer(0.3, slow_disk.set).start()
    first = saver.save(2, parts_of(weight=weight), {}, {})
    assert slow_disk.is_set(), "it did not wait"
    second = saver.settle()
    assert [first.step, second.step] == [1, 2]  # type: ignore[union-attr]
    for step, value in ((1, 0.0), (2, 2.0)):
        reader = SliceReader(store.folder_for(tmp_path, step))
        assert reader.read_whole("weight").tolist() == [value] * 4
    assert [one.step for one in store.list_complete(tmp_path)] == [1, 2]


def test_a_snapshot_is_a_safetensors_file_for_every_dtype_and_shape(tmp_path):
    torch.manual_seed(1)
    types = [dtype for dtype in snapshot.NAMES if dtype not in (torch.bool,)]
    tensors = {str(dtype): (torch.rand(3, 5) * 9).to(dtype) for dtype in types}
    tensors |= {"yes": torch.tensor([True, False]), "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    tensors["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    made = lay_out(tensors, {"note": "here"})
    listed = write_snapshot(tmp_path / "file", made.chunks())
    assert listed["size"] == (tmp_path / "file").stat().st_size
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].double(), tensor.double()), name


@pytest.mark.parametrize("slab", [64, 1024])
def test_a_host_copy_gives_the_same_file_and_its_memory_is_reused(slab, tmp_path, monkeypatch):
    """Also if tensors cross the boundaries of memory slabs."""
    monkeypatch.setattr(snapshot, "SLAB", slab)
    monkeypatch.setattr(snapshot, "CHUNK", 32)
    copy = HostCopy(torch.device("cpu"))
    for count in (40, 7, 90, 90):
        tensors = {"a": torch.randn(count), "b": torch.randn(3, count), "c": torch.arange(count)}
        made = lay_out(tensors, {})
        expected = write_snapshot(tmp_path / "plain", made.chunks())
        copy.take(made)
        assert write_snapshot(tmp_path / "copied", copy.chunks()) == expected
    held = sum(map(len, copy._slabs))
    copy.take(made)
    assert sum(map(len, copy._slabs)) == held


def config_of(data: Path, **changes: Any) -> dict[str, Any]:
    short = {"train__steps": 2, "data__max_length": 48, "data__train_on": "all", "checkpoint__every": 1}
    return settings(data, **{**short, "checkpoint__keep": 9, **changes})


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        slow(1, {"strategy": "single"}),
        (2, {"strategy": "fsdp"}),
        slow(4, {"strategy": "fsdp", "tp": 2}),
        slow(4, {"strategy": "ddp", "pp": 2}),
    ],
    ids=str,
)
def test_a_full_checkpoint_is_one_file_with_every_tensor_whole_and_resumes_to_the_bit(
    world_size, parallel, instructions, tmp_path
):
    config = config_of(instructions, parallel=parallel, checkpoint__format="full")
    run = train_again_on(world_size, config, tmp_path / "full")
    newest = run / "checkpoints" / "step-00000002"
    assert {path.name for path in newest.glob("*.safetensors")} == {"rank-00000.safetensors"}
    assert all(here == whole for here, whole in written_slices(newest)[0].values())
    config["train"]["steps"] = 3
    train_on(world_size, config, tmp_path / "full", resume=True)
    sharded_config = {**config, "checkpoint": {"every": 1, "keep": 9}}
    hold_bitwise(run, train_again_on(world_size, sharded_config, tmp_path / "sharded"))


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_saves_in_the_background_hold_what_saves_in_the_foreground_hold(world_size, instructions, tmp_path):
    parallel = {"strategy": "fsdp" if world_size > 1 else "single"}
    runs = [
        train_again_on(
            world_size,
            config_of(instructions, parallel=parallel, checkpoint__async=background),
            tmp_path / str(background),
        )
        for background in (True, False)
    ]
    hold_bitwise(*runs)
    for step in range(1, 3):
        found = []
        for run in runs:
            (run / "checkpoints" / "latest").write_text(f"step-{step:08d}\n")
            found.append(everything(run))
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[1]), step


def test_a_checkpoint_holds_the_config_it_was_made_with(instructions, tmp_path):
    run = train_again_on(1, config_of(instructions, train__lr=2e-3), tmp_path)
    held = json.loads((run / "checkpoints" / "step-00000002" / "config.json").read_text())
    assert held["train"]["lr"] == 2e-3
    assert held["name"] == "run"

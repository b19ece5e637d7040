"""Checkpoints of several ranks: DeepSpeed's ZeRO 3 and DCP become a Hugging Face folder, and nothing in them is run."""

import os
import pickle
import pickletools
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shoal import api
from shoal.convert.imports import import_hf
from shoal.convert.pickle_records import read_records
from shoal.mistakes import UserMistake
from tests.convert.imported import holds, model_of, save_config
from tests.harness import run_ranks

RAN = Path("ran")


class Touch:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (RAN,)


def write_zero3(
    folder: Path, model: Any, ranks: int, *, groups: int = 2, frozen: tuple[str, ...] = (), **more: Any
) -> Path:
    """The files of DeepSpeed's ZeRO 3: each rank has a share of each parameter, padded to be equal."""
    place = folder / "global_step3"
    place.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    weights = {f"module.{name}": one.detach() for name, one in model.named_parameters()}
    trained = [name for name in weights if name not in frozen]
    split = [trained[: len(trained) // groups], trained[len(trained) // groups :]] if groups == 2 else [trained]
    for rank in range(ranks):

        def share(name: str, rank: int = rank) -> torch.Tensor:
            flat = weights[name].flatten()
            length = -(-flat.numel() // ranks)
            padded = torch.cat([flat, torch.zeros(length * ranks - flat.numel())])
            return padded[rank * length : (rank + 1) * length].clone()

        state = {
            "module": {name: torch.empty(0) for name in weights},
            "buffer_names": [],
            "param_shapes": [OrderedDict((name, weights[name].shape) for name in names) for names in split],
            "frozen_param_shapes": {name: weights[name].shape for name in frozen},
            "frozen_param_fragments": {name: share(name) for name in frozen},
            "shared_params": {},
            "ds_version": "0.19.8",
        }
        torch.save(state, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flat = [torch.cat([share(name) for name in names]) for names in split]
        inner = {"fp32_flat_groups": flat, "partition_count": ranks, "optimizer_state_dict": {}, **more}
        torch.save({"optimizer_state_dict": inner}, place / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


@pytest.mark.parametrize("ranks", [1, 3])
def test_zero_3_is_gathered_from_the_files_of_its_ranks(ranks, tmp_path):
    model = model_of("llama")
    first = "module." + next(iter(dict(model.named_parameters())))
    source = write_zero3(
        tmp_path / "ds", model, ranks, groups=2 if ranks == 3 else 1, frozen=(first,) if ranks == 3 else ()
    )
    imported = api.import_checkpoint(source, tmp_path / "out", model=save_config(model, tmp_path / "config"))
    assert (imported.format, imported.dtype) == ("DeepSpeed ZeRO 3", "float32")
    holds(tmp_path / "out", model)


def test_a_zero_3_checkpoint_with_a_rank_missing_is_refused(tmp_path):
    model = model_of("llama")
    source = write_zero3(tmp_path / "ds", model, 3)
    config = str(save_config(model, tmp_path / "config"))
    (source / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(UserMistake, match=r"weights of the ranks 0, 2 and the shapes of the ranks 0, 1, 2"):
        import_hf(source, tmp_path / "out", model=config)
    for file in (source / "global_step3").glob("*rank_[12]_*"):
        file.unlink()
    with pytest.raises(UserMistake, match="is one of 3 ranks, and the folder has 1"):
        import_hf(source, tmp_path / "out", model=config)
    one = source / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    with pytest.raises(UserMistake, match="import the folder with the files of all ranks"):
        import_hf(one, tmp_path / "out", model=config)


def test_classes_of_deepspeed_in_zero_3_are_not_needed_and_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = model_of("llama")
    config = str(save_config(model, tmp_path / "config"))
    # As DeepSpeed writes it: an object of a class that is not installed here.
    named = type("LossScaler", (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})
    stage = type("ZeroStageEnum", (), {"__module__": "deepspeed.runtime.zero.config"})
    with monkeypatch.context() as installed:
        for kind in (named, stage):
            parts = kind.__module__.split(".")
            for length in range(1, len(parts) + 1):
                name = ".".join(parts[:length])
                installed.setitem(sys.modules, name, sys.modules.get(name) or types.ModuleType(name))
            setattr(sys.modules[kind.__module__], kind.__name__, kind)
        scaler = named()
        scaler.cur_scale = 1.0
        source = write_zero3(tmp_path / "ds", model, 2, loss_scaler=scaler, zero_stage=stage())
    import_hf(source, tmp_path / "out", model=config)
    holds(tmp_path / "out", model)
    source = write_zero3(tmp_path / "evil", model, 2, extra=Touch())
    with pytest.raises(UserMistake, match="shoal never runs code from a file"):
        import_hf(source, tmp_path / "other", model=config)
    assert not RAN.exists()


def _save_sharded(folder: str, weights: dict[str, torch.Tensor]) -> None:
    """On each rank: the weights as DTensors, saved by DCP beside the state of an optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    store = dist.FileStore(f"{folder}.store", 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    sharded = {name: distribute_tensor(one.clone(), mesh, [Shard(0)]) for name, one in weights.items()}
    state = {"model": sharded, "optimizer": {"state": {"step": torch.tensor(3)}, "name": "adamw"}, "epoch": 2}
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


def test_dcp_of_two_ranks_is_read_without_unpickling(tmp_path):
    model = model_of("llama")
    run_ranks(2, lambda: _save_sharded(str(tmp_path / "dcp"), dict(model.state_dict())))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    imported = api.import_checkpoint(tmp_path / "dcp", tmp_path / "out", model=save_config(model, tmp_path / "config"))
    assert imported.format == "DCP"
    holds(tmp_path / "out", model)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, str]:
    """A checkpoint of one process, and the config of its model."""
    model = model_of("llama")
    dcp.save(dict(model.state_dict()), checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp", str(save_config(model, tmp_path / "config"))


def test_damaged_and_incomplete_dcp_folders_are_sentences(saved, tmp_path):
    folder, config = saved
    import_hf(folder, tmp_path / "good", model=config)
    shards = next(folder.glob("*.distcp"))
    data, index = shards.read_bytes(), (folder / ".metadata").read_bytes()
    shards.write_bytes(data[:100])
    with pytest.raises(UserMistake, match="is damaged"):
        import_hf(folder, tmp_path / "out", model=config)
    shards.rename(folder / "elsewhere")
    with pytest.raises(UserMistake, match="which is not a file of that folder"):
        import_hf(folder, tmp_path / "out", model=config)
    (folder / "elsewhere").rename(shards)
    for broken in (index[:200], b"", b"not a pickle", pickle.dumps({"a": 1})):
        (folder / ".metadata").write_bytes(broken)
        with pytest.raises(UserMistake, match=r"\.metadata is"):
            import_hf(folder, tmp_path / "out", model=config)
    (folder / ".metadata").unlink()
    with pytest.raises(UserMistake, match=r"no \.metadata, their index"):
        import_hf(folder, tmp_path / "out", model=config)


def test_a_pickle_is_read_as_records_and_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read = read_records(
        pickle.dumps({"size": torch.Size([2, 3]), "evil": Touch(), "list": [1, "a", None, True, 2.5]}), "x"
    )
    assert not RAN.exists()
    assert (read["size"].name, read["size"].arguments) == ("torch.Size", ((2, 3),))
    assert read["evil"].name.endswith("touch") or "getattr" in read["evil"].name
    assert read["list"] == [1, "a", None, True, 2.5]
    for protocol in range(6):
        assert read_records(pickle.dumps(OrderedDict(a=(1, 2)), protocol), "x").state == {"a": (1, 2)}
    assert list(pickletools.genops(pickle.dumps(1)))

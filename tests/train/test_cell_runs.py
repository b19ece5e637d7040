"""Runs on single cells: masked genes and cell types, streamed and resumed, and the config of scModelForge."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import api
from tests.data.cell_files import draw_counts, write_cells
from tests.harness import lines, settings, train_again_on, train_on
from tests.launch.command import environment, forked_shoal, write_config

BERT = {"family": "bert", "hidden": 32, "layers": 1, "heads": 2, "ffn": 32, "vocab": 32, "positions": 32}
STEPS = 4


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of two kinds of cells, which express other genes."""
    folder = tmp_path_factory.mktemp("cells")
    for name in ("a", "b"):
        counts = draw_counts(24, 20, seed=ord(name))
        kinds = ["B" if number % 2 else "T" for number in range(24)]
        counts[::2, 2:10] *= 5
        counts[1::2, 10:] *= 5
        write_cells(folder / f"{name}.h5ad", counts, labels={"kind": kinds})
    return folder


def config(cells: Path, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    made = settings(
        Path("unused.jsonl"),
        **{"train__objective": "masked_lm", "train__schedule": {"name": "constant", "warmup": 2}, **changes},
        train__steps=steps,
        model={"shape": BERT},
    )
    own = {key.removeprefix("data__"): value for key, value in changes.items() if key.startswith("data__")}
    made["data"] = {"source": "cells", "path": str(cells / "*.h5ad"), "max_length": 24, "validation": 0, **own}
    return made


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


@pytest.mark.slow
def test_streamed_cells_resume_on_another_number_of_ranks(cells: Path, tmp_path: Path) -> None:
    streamed = {"data__streaming": {"chunk": 10, "shuffle_buffer": 20}}
    whole = losses(train_again_on(1, config(cells, **streamed), tmp_path / "whole"))
    train_again_on(2, config(cells, steps=2, **streamed), tmp_path / "parts")
    run = train_on(1, config(cells, **streamed), tmp_path / "parts", resume=True)
    assert losses(run) == pytest.approx(whole, rel=2e-6)


def test_binned_cells_have_an_embedding_for_each_bin(cells: Path, tmp_path: Path) -> None:
    binned = {"data__cells": {"tokens": "binned", "bins": 9}}
    one, two = (losses(train_again_on(ranks, config(cells, **binned), tmp_path / str(ranks))) for ranks in (1, 2))
    assert one == pytest.approx(two, rel=2e-6)
    saved = json.loads((tmp_path / "1/run/model/config.json").read_text())
    assert saved["type_vocab_size"] == 9


def test_a_pretrained_encoder_is_fine_tuned_with_its_own_genes(cells: Path, tmp_path: Path) -> None:
    pretrained = train_again_on(1, config(cells, data__cells={"medians": "data"}), tmp_path / "before")
    folder = api.export(pretrained, tmp_path / "hf")
    changes = {"train__objective": "classify", "data__label": "kind", "data__validation": 0.25}
    made = config(cells, steps=20, **changes)
    made["model"] = {"from": str(folder)}
    run = train_again_on(1, made, tmp_path / "after")
    saved = json.loads((run / "model/config.json").read_text())
    assert saved["id2label"] == {"0": "B", "1": "T"}
    genes = [json.loads((path / "genes.json").read_text())["medians"] for path in (folder, run / "model")]
    assert genes[0] == genes[1]
    assert len(genes[0]) == 20
    assert np.isfinite(losses(run)).all()
    assert losses(run)[-1] < losses(run)[0]


def test_mistakes_in_cells_end_with_status_2_and_a_sentence(cells: Path, tmp_path: Path) -> None:
    file = cells / "a.h5ad"
    made = config(cells, train__objective="classify", data__label="celltype", data__path=str(file))
    ended = forked_shoal(tmp_path, "train", str(write_config(tmp_path, made)))
    ended.hold_mistake(f"data.label celltype is not a column of obs in {file}; it has kind.")
    (tmp_path / "b.h5ad").write_text("no HDF5")
    ended = forked_shoal(tmp_path, "data", "stats", "b.h5ad")
    assert (ended.status, "b.h5ad is not an .h5ad file" in ended.err) == (2, True)


def test_stats_and_preview_speak_of_genes_and_cells(cells: Path, tmp_path: Path) -> None:
    where = str(cells / "*.h5ad")
    ended = forked_shoal(tmp_path, "data", "stats", where, "train.objective=classify", "data.label=kind")
    assert ended.status == 0, ended.err
    for line in ("cells        48 in 2 files", "genes        20 in the vocabulary", "classes      2 of data.label"):
        assert line in ended.out
    ended = forked_shoal(tmp_path, "data", "stats", str(cells), "--json")  # a folder, whose files tell what it is
    found = json.loads(ended.out)["sources"][0]["cells"]
    assert (found["vocabulary"], [one["cells"] for one in found["files"]], found["classes"]) == (20, [24, 24], None)
    ended = forked_shoal(tmp_path, "data", "preview", where, "train.objective=masked_lm", "-n", "1", "--from", "30")
    assert f"example 30  {cells / 'b.h5ad'} b-6  " in ended.out
    assert "12 tokens, 2 masked\n<cls> ⟦" in ended.out


SEED = Path("config.yaml")
SCMODELFORGE = """
data:
  source: local
  paths: [./data/preprocessed.h5ad]
  gene_vocab: human_protein_coding
  max_genes: 4096
  num_workers: 8
  streaming: true
  streaming_chunk_size: 10000
  streaming_shuffle_buffer: 50000
tokenizer: {strategy: rank_value, max_genes: 4096, prepend_cls: true, masking: {mask_ratio: 0.15}}
model:
  {architecture: transformer_encoder, hidden_dim: 1024, num_layers: 12, num_heads: 16, dropout: 0.1, max_seq_len: 4096}
training:
  num_gpus: 8
  batch_size: 16
  gradient_accumulation: 2
  max_epochs: 100
  precision: bf16-mixed
  gradient_clip: 1.0
  optimizer: {name: adamw, lr: 1.0e-4, weight_decay: 0.01}
  scheduler: {name: cosine_warmup, warmup_steps: 5000, total_steps: 500000}
  fsdp: {sharding_strategy: FULL_SHARD, cpu_offload: false, activation_checkpointing: true, min_num_params: 1000000}
  logger: tensorboard
  log_every_n_steps: 50
  checkpoint_dir: ./checkpoints/large-model
  save_top_k: 3
"""


def test_the_config_of_scmodelforge_trains(tmp_path: Path) -> None:
    """As it is translated, but for sizes that a test has no time for."""
    (tmp_path / "data").mkdir()
    write_cells(tmp_path / "data/preprocessed.h5ad", draw_counts(24, 20))
    (tmp_path / SEED).write_text(SCMODELFORGE)
    ended = forked_shoal(tmp_path, "import", str(SEED), "-o", "run.yaml", "--json")
    assert ended.status == 0, ended.err
    smaller = ["hidden=32", "layers=1", "heads=2", "vocab=64", "positions=64"]
    overrides = [f"model.shape.{size}" for size in smaller]
    overrides += ["data.max_length=64", "train.steps=2", "train.global_batch=8", "train.micro_batch=8"]
    overrides += ["hardware.devices=1", "train.precision=32-true", "data.streaming={chunk: 10, shuffle_buffer: 20}"]
    ended = forked_shoal(tmp_path, "train", "run.yaml", *overrides)
    assert (ended.status, "genes/human_protein_coding.txt" in ended.err) == (2, True), ended.err
    genes = Path(environment(tmp_path)["SHOAL_CACHE"]) / "genes/human_protein_coding.txt"
    genes.parent.mkdir(parents=True)
    genes.write_text("".join(f"G{number}\n" for number in range(20)))
    ended = forked_shoal(tmp_path, "train", "run.yaml", *overrides)
    assert ended.status == 0, ended.err
    assert len(lines(tmp_path / "checkpoints/large-model")) >= 1

"""Single cells: `.h5ad` files to sequences of genes, the same however a file is stored and read."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from shoal.config.schema import DataConfig
from shoal.data import Sequences, Sets, load_tokenizer, prepare_sets
from shoal.data.cells import write as cell_writer
from shoal.data.cells.gene_tokenizer import GeneTokenizer
from shoal.data.cells.make_tokenizer import make_tokenizer
from shoal.data.first_look import check_first_record
from shoal.mistakes import UserMistake
from tests.data.cell_files import draw_counts, write_cells

SPECIAL = len(GeneTokenizer.SPECIAL)


def quiet(sentence: str) -> None:
    return


def opened(
    path: object, *, objective: str = "masked_lm", tokenizer: Any = None, said: list[str] | None = None, **given: Any
) -> tuple[Sets, GeneTokenizer]:
    """The sets of a run on cells, as training makes them."""
    given = {"max_length": 16, "validation": 0, **given}
    data = DataConfig(source="cells", path=path if isinstance(path, list) else str(path), **given)
    check_first_record(data, objective)
    genes = tokenizer or make_tokenizer(data, quiet)
    report = quiet if said is None else said.append
    return prepare_sets(data, genes, seed=3, report=report, objective=objective), genes


def names(sequences: Sequences, tokenizer: GeneTokenizer, *, encoder: bool = True) -> list[list[str]]:
    """The tokens of every cell."""
    found = []
    for index in range(len(sequences)):
        tokens = sequences[index][0]
        found.append([tokenizer.tokens[one] for one in (tokens[:-1] if encoder else tokens).tolist()])
    return found


def refused(path: object, **given: Any) -> str:
    with pytest.raises(UserMistake) as caught:
        opened(path, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_genes_come_by_falling_expression_between_cls_and_eos(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", [[0, 5, 1, 3], [2, 0, 2, 9]], ["A", "B", "C", "D"])
    sets, tokenizer = opened(file)
    # A tie is in the order of the vocabulary.
    assert names(sets.training, tokenizer) == [["<cls>", "B", "D", "C", "<eos>"], ["<cls>", "D", "A", "C", "<eos>"]]
    assert sets.training.summary.encoder
    assert sets.training.loss_tokens(np.arange(2)).tolist() == [3, 3]
    sets, _ = opened(file, objective="causal_lm", cells={"cls": False})
    assert names(sets.training, tokenizer, encoder=False)[0] == ["B", "D", "C", "<eos>"]


@pytest.mark.parametrize("layout", ["csr", "csc", "dense"])
@pytest.mark.parametrize("backed", [True, False])
def test_every_layout_gives_the_same_cells_in_memory_or_backed(tmp_path: Path, layout: str, backed: bool) -> None:
    counts = draw_counts(40, 12)
    file = write_cells(tmp_path / "a.h5ad", counts, layout=layout)
    sets, tokenizer = opened(file, cells={"backed": backed})
    expected = []
    for cell in counts:
        order = sorted(np.flatnonzero(cell).tolist(), key=lambda gene: (-cell[gene], f"G{gene}"))
        expected.append(["<cls>", *(f"G{gene}" for gene in order), "<eos>"])
    assert names(sets.training, tokenizer) == expected


def test_files_with_other_genes_share_one_vocabulary(tmp_path: Path) -> None:
    write_cells(tmp_path / "a.h5ad", [[4, 2]], ["B", "A"])
    write_cells(tmp_path / "b.h5ad", [[1, 7, 3]], ["C", "B", "D"])
    sets, tokenizer = opened(tmp_path / "*.h5ad")
    assert tokenizer.genes == ("A", "B", "C", "D")
    assert names(sets.training, tokenizer) == [["<cls>", "B", "A", "<eos>"], ["<cls>", "B", "D", "C", "<eos>"]]


def test_the_highest_genes_stay_where_they_do_not_all_fit(tmp_path: Path) -> None:
    said: list[str] = []
    file = write_cells(tmp_path / "a.h5ad", [[1, 5, 4, 3, 2]])
    sets, tokenizer = opened(file, max_length=5, said=said)
    assert names(sets.training, tokenizer) == [["<cls>", "G1", "G2", "G3", "<eos>"]]
    assert sets.training.summary.longest == 5
    assert any("1 cells express more genes than fit" in one for one in said)
    sets, _ = opened(file, cells={"max_genes": 2})
    assert names(sets.training, tokenizer) == [["<cls>", "G1", "G2", "<eos>"]]


def test_medians_of_the_data_change_the_ranks_as_geneformer_does(tmp_path: Path) -> None:
    counts = np.array([[100, 10, 1], [100, 10, 1], [50, 40, 1]], dtype=np.float32)
    file = write_cells(tmp_path / "a.h5ad", counts)
    sets, tokenizer = opened(file, cells={"medians": "data"})
    normalized = counts / counts.sum(axis=1, keepdims=True) * 10_000
    assert tokenizer.medians is not None
    medians = [tokenizer.medians[f"G{gene}"] for gene in range(3)]
    assert medians == pytest.approx(np.median(normalized, axis=0).tolist(), rel=2e-3)
    assert names(sets.training, tokenizer)[2] == ["<cls>", "G1", "G2", "G0", "<eos>"]
    (tmp_path / "medians.json").write_text(json.dumps({"G0": 1000.0, "G1": 1.0, "G2": 1.0}))
    sets, tokenizer = opened(file, cells={"medians": str(tmp_path / "medians.json")})
    assert names(sets.training, tokenizer)[0] == ["<cls>", "G1", "G2", "G0", "<eos>"]


def test_binned_genes_are_in_vocabulary_order_with_the_quantile_of_each(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", [[1, 8, 2, 4], [5, 5, 5, 0]])
    sets, tokenizer = opened(file, cells={"tokens": "binned", "bins": 5})
    assert names(sets.training, tokenizer)[0] == ["<cls>", "G0", "G1", "G2", "G3", "<eos>"]
    values = [sets.training.values(index) for index in range(2)]
    assert [one[:-1].tolist() for one in values if one is not None] == [[0, 1, 4, 2, 3, 0], [0, 4, 4, 4, 0]]
    sets, _ = opened(file, cells={"tokens": "binned", "bins": 5, "binning": "uniform", "log1p": False})
    uniform = sets.training.values(0)
    assert uniform is not None
    assert uniform[:-1].tolist() == [0, 1, 4, 1, 2, 0]


def test_normalized_values_give_the_ranks_of_their_counts(tmp_path: Path) -> None:
    counts = draw_counts(20, 9)
    logs = np.log1p(counts / counts.sum(axis=1, keepdims=True) * 10_000)
    of_counts, tokenizer = opened(write_cells(tmp_path / "a.h5ad", counts))
    of_logs, _ = opened(write_cells(tmp_path / "b.h5ad", logs), cells={"normalized": True})
    assert names(of_counts.training, tokenizer) == names(of_logs.training, tokenizer)


def test_auto_finds_the_raw_counts_beside_a_scaled_matrix(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", [[-1.5, 2.5]], layers={"scaled": [[0.5, -1]], "counts": [[1, 2]]})
    sets, tokenizer = opened(file)
    assert names(sets.training, tokenizer) == [["<cls>", "G1", "G0", "<eos>"]]


def test_columns_with_the_same_gene_are_added(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", [[2, 3, 2]], ["x1", "x2", "x3"], var={"symbol": ["A", "B", "A"]})
    sets, tokenizer = opened(file, cells={"gene_names": "symbol"})
    assert names(sets.training, tokenizer) == [["<cls>", "A", "B", "<eos>"]]


def test_cells_with_few_genes_are_left_out_and_counted(tmp_path: Path) -> None:
    said: list[str] = []
    file = write_cells(tmp_path / "a.h5ad", [[1, 1, 1], [0, 0, 0], [1, 0, 0]])
    sets, _ = opened(file, cells={"min_genes": 2}, said=said)
    assert (len(sets.training), sets.training.summary.empty, sets.training.summary.dropped) == (1, 1, 1)
    assert "1 cells express no gene of the vocabulary and were left out." in said
    sets, _ = opened(file, on_error="skip")
    assert len(sets.training) == 2


def test_a_vocabulary_may_be_a_file_or_a_name_in_the_cache(tmp_path: Path, cache: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", [[4, 2, 1]], ["A", "B", "C"])
    (tmp_path / "genes.txt").write_text("# symbols\nC\nA\nZ\n")
    sets, tokenizer = opened(file, cells={"gene_vocab": str(tmp_path / "genes.txt")})
    assert tokenizer.genes == ("C", "A", "Z")
    assert names(sets.training, tokenizer) == [["<cls>", "A", "C", "<eos>"]]
    says = refused(file, cells={"gene_vocab": "human_protein_coding"})
    assert str(cache / "genes" / "human_protein_coding.txt") in says
    (cache / "genes").mkdir(parents=True)
    (cache / "genes" / "human_protein_coding.txt").write_text("A\nB\n")
    assert opened(file, cells={"gene_vocab": "human_protein_coding"})[1].genes == ("A", "B")
    (tmp_path / "scgpt.json").write_text(json.dumps({"B": 1, "<pad>": 2, "A": 0}))
    assert opened(file, cells={"gene_vocab": str(tmp_path / "scgpt.json")})[1].genes == ("A", "B")


def test_a_saved_tokenizer_gives_the_same_cells_and_loads_in_transformers(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", draw_counts(10, 6))
    sets, tokenizer = opened(file, cells={"medians": "data", "highly_variable": 4})
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert isinstance(loaded, GeneTokenizer)
    assert loaded.fingerprint == tokenizer.fingerprint
    again, _ = opened(file, tokenizer=loaded)
    assert names(again.training, loaded) == names(sets.training, tokenizer)
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = f"{tokenizer.genes[1]} {tokenizer.genes[0]}"
    assert theirs(text)["input_ids"] == [tokenizer.cls, SPECIAL + 1, SPECIAL, tokenizer.end]
    assert (theirs.mask_token_id, theirs.pad_token_id) == (tokenizer.mask, tokenizer.pad)
    assert (tmp_path / "vocab.txt").read_text().split()[SPECIAL:] == list(tokenizer.genes)


def test_workers_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_cells(tmp_path / "a.h5ad", draw_counts(60, 8))
    alone, tokenizer = opened(file)
    monkeypatch.setattr(cell_writer, "WORTH_WORKERS", 2)
    monkeypatch.setattr(
        "shoal.data.cells.source.Cells.ranges", lambda cells: ((0, at, at + 6) for at in range(0, 60, 6))
    )
    together, _ = opened(file, cells={"same_names": True})  # another entry of the cache
    assert names(alone.training, tokenizer) == names(together.training, tokenizer)


def test_labels_are_classes_by_name(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", draw_counts(4, 5), labels={"kind": ["T", "B", "T", "NK"]})
    sets, _ = opened(file, objective="classify", label="kind")
    assert sets.training.summary.classes == ["B", "NK", "T"]
    assert sets.training.labels(np.arange(4)).tolist() == [2, 0, 2, 1]


# Bad input


def test_a_matrix_without_counts_is_refused_with_what_it_has(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", [[-0.3, 1.2]], layers={"log": [[0.5, 1.5]]})
    says = refused(file)
    assert "has no raw counts: X has negative values (it is scaled); log has fractions (it is normalized)" in says
    assert "data.cells.normalized: true" in says
    assert "it has X, log" in refused(file, cells={"matrix": "counts"})


def test_a_label_that_does_not_exist_lists_those_there_are(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", [[1, 2]], labels={"cell_type": ["B"], "donor": ["x"]})
    says = refused(file, objective="classify", label="celltype")
    assert "data.label celltype is not a column of obs" in says
    assert "it has cell_type, donor. Did you mean cell_type?" in says


def test_cells_without_a_label_are_refused_or_skipped(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", draw_counts(3, 5), labels={"kind": ["T", "", "B"]})
    says = refused(file, objective="dpo")
    assert "data.source cells has none; use masked_lm, classify or causal_lm." in says
    assert "has cells without a value" in refused(file, objective="classify", label="kind")
    sets, _ = opened(file, objective="classify", label="kind", on_error="skip")
    assert (len(sets.training), sets.training.summary.dropped) == (2, 1)


def test_a_number_that_is_missing_is_no_label(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", draw_counts(4, 5))
    with h5py.File(file, "a") as opened_file:
        opened_file["obs/cluster"] = np.array([1.0, np.nan, 10.0, 1.0])
    assert "has cells without a value" in refused(file, objective="classify", label="cluster")
    sets, _ = opened(file, objective="classify", label="cluster", on_error="skip")
    assert sets.training.summary.classes == ["1", "10"]


def test_files_without_cells_genes_or_numbers_are_refused(tmp_path: Path) -> None:
    says = refused(write_cells(tmp_path / "a.h5ad", np.zeros((0, 5))))
    assert says.endswith("a.h5ad has no cells: X has no rows. Leave it out.")
    says = refused(write_cells(tmp_path / "b.h5ad", np.zeros((3, 0)), genes=[]))
    assert says.endswith("b.h5ad has no genes: its matrix has no columns. Leave it out.")
    says = refused(write_cells(tmp_path / "c.h5ad", [[1, np.nan, 2]]))
    assert "X has NaN or infinite values" in says
    (tmp_path / "d.h5ad.gz").write_bytes(b"")
    assert "d.h5ad.gz is compressed as a whole" in refused(tmp_path / "d.h5ad.gz")


def test_genes_that_are_not_in_the_vocabulary_are_counted_and_refused_above_half(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", [[1, 2, 3, 4, 5]], ["A", "B", "C", "D", "E"])
    assert "4 of the 5 genes in" in refused(file, tokenizer=GeneTokenizer(["A", "X"]))
    assert "3 of the 5 genes" in refused(file, tokenizer=GeneTokenizer(["A", "B"]))
    sets, tokenizer = opened(file, tokenizer=GeneTokenizer(["A", "B", "C"]))
    assert names(sets.training, tokenizer) == [["<cls>", "C", "B", "A", "<eos>"]]
    # Genes that were left out on purpose are known.
    opened(file, tokenizer=GeneTokenizer(["A"], left_out=["B", "C"]))


def test_an_empty_cell_is_refused_by_name(tmp_path: Path) -> None:
    file = write_cells(tmp_path / "a.h5ad", [[1, 2], [0, 0]], cells=["one", "two"])
    says = refused(file)
    assert "cell two expresses no gene. Set data.cells.min_genes: 1" in says


def test_a_file_that_is_not_h5ad_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.h5ad").write_text("not HDF5")
    assert "a.h5ad is not an .h5ad file" in refused(tmp_path / "a.h5ad")
    import h5py

    h5py.File(tmp_path / "b.h5ad", "w").close()
    assert "is an HDF5 file without X and obs and var" in refused(tmp_path / "b.h5ad")


def test_two_files_with_the_same_cell_names_are_refused(tmp_path: Path) -> None:
    files = [write_cells(tmp_path / f"{name}.h5ad", [[1, 2]], cells=["AAAC-1"]) for name in "ab"]
    paths = [str(file) for file in files]
    says = refused(paths)
    assert f"1 cells of {files[1]} have the name of one in {files[0]}, such as AAAC-1" in says
    sets, _ = opened(paths, cells={"same_names": True})
    assert len(sets.training) == 2


def test_settings_that_the_model_already_has_are_refused(tmp_path: Path) -> None:
    from shoal.config.schema import ModelConfig
    from shoal.train.tokenizer import load_model_tokenizer

    file = write_cells(tmp_path / "a.h5ad", [[1, 2]])
    GeneTokenizer(["G0", "G1"]).save(tmp_path)
    model = ModelConfig(tokenizer=str(tmp_path))
    data = DataConfig(source="cells", path=str(file), cells={"highly_variable": 1})
    with pytest.raises(UserMistake, match=r"data\.cells\.highly_variable is set, but the model has a vocabulary of 2"):
        load_model_tokenizer(model, None, data)


def test_a_missing_anndata_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.data.cells.h5ad.find_spec", lambda name: None)
    file = write_cells(tmp_path / "a.h5ad", [[1, 2]])
    assert refused(file) == "data.source cells needs the package anndata: pip install 'shoal[cells]'."


def test_other_sources_never_import_h5py() -> None:
    code = "import sys, shoal.data.prepare, shoal.data.first_look, shoal.data.stream.stream; "
    code += "assert not {'h5py', 'anndata', 'scipy', 'torch'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Streams


def stream(path: Path, **given: Any) -> tuple[Sets, GeneTokenizer]:
    return opened(path, streaming={"chunk": 7, "shuffle_buffer": 14}, **given)


def cells_at(sets: Sets, tokenizer: GeneTokenizer, first: int, count: int) -> list[Sequence[str]]:
    found = sets.order.training_sequences(first, count)
    return [tokenizer.decode(sets.training[int(one)][0][:-1]) for one in found]


def test_a_stream_reads_every_cell_once_per_epoch_and_resumes_exactly(tmp_path: Path) -> None:
    for number in range(2):
        counts = np.eye(10, 20, k=10 * number) + np.eye(10, 20, k=10 * number) * number
        write_cells(tmp_path / f"{number}.h5ad", counts)
    sets, tokenizer = stream(tmp_path / "*.h5ad")
    first = cells_at(sets, tokenizer, 0, 20)
    assert sorted(first) == sorted(f"<cls> G{gene} <eos>" for gene in range(20))
    assert first != sorted(first)
    state = sets.order.state(9)
    later = cells_at(sets, tokenizer, 9, 25)
    sets.close()
    again, _ = stream(tmp_path / "*.h5ad")
    again.order.restore(state, 9)
    assert cells_at(again, tokenizer, 9, 25) == later
    again.close()


@pytest.mark.slow
def test_files_that_anndata_writes_are_read(tmp_path: Path) -> None:
    import anndata
    import pandas
    import scipy.sparse

    counts = draw_counts(30, 11)
    obs = pandas.DataFrame(
        {"kind": pandas.Categorical(["T", "B", "T"] * 10), "note": ["x"] * 30}, index=[f"c{n}" for n in range(30)]
    )
    var = pandas.DataFrame(index=[f"G{n}" for n in range(11)])
    expected = None
    for number, make in enumerate((scipy.sparse.csr_matrix, scipy.sparse.csc_matrix, np.asarray)):
        file = tmp_path / f"{number}.h5ad"
        anndata.AnnData(make(counts), obs=obs, var=var).write_h5ad(file, compression="gzip")
        sets, tokenizer = opened(file, objective="classify", label="kind")
        found = names(sets.training, tokenizer)
        assert sets.training.labels(np.arange(3)).tolist() == [1, 0, 1]
        assert expected is None or found == expected
        expected = found


@pytest.mark.slow
def test_the_most_variable_genes_are_those_of_scanpy(tmp_path: Path) -> None:
    import anndata
    import scanpy

    generator = np.random.default_rng(1)
    rates = generator.gamma(0.5, 4, 200) * generator.gamma(2, 0.5, (300, 200)) ** generator.integers(0, 3, 200)
    counts = generator.poisson(rates).astype(np.float32)
    counts[:, 0] += 1
    table = anndata.AnnData(counts.copy())
    scanpy.pp.normalize_total(table, target_sum=1e4)
    scanpy.pp.log1p(table)
    scanpy.pp.highly_variable_genes(table, n_top_genes=40, flavor="seurat")
    theirs = {f"G{number}" for number in np.flatnonzero(table.var["highly_variable"])}
    file = write_cells(tmp_path / "a.h5ad", counts)
    _, tokenizer = opened(file, max_length=256, cells={"highly_variable": 40})
    assert set(tokenizer.genes) == theirs

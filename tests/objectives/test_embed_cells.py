"""Embeddings of cells as .h5ad, which anndata and scanpy read."""

from pathlib import Path

import numpy as np
import pytest

from shoal import api
from tests.data.cell_files import draw_counts
from tests.encoders import classifying
from tests.harness import train_again_on


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["rank_value", "binned"])
def test_embeddings_of_cells_are_written_beside_their_matrix(tokens: str, tmp_path: Path) -> None:
    import anndata
    import pandas
    import scipy.sparse

    counts = draw_counts(40, 20)
    counts[7] = 0  # a cell without genes is left out
    kinds = [("B", "T")[row % 2] for row in range(40)]
    obs = pandas.DataFrame({"kind": kinds}, index=[f"blood-{row}" for row in range(40)])
    var = pandas.DataFrame(index=[f"G{column}" for column in range(20)])
    anndata.AnnData(scipy.sparse.csr_matrix(counts), obs=obs, var=var).write_h5ad(tmp_path / "blood.h5ad")
    config = classifying(
        tmp_path / "blood.h5ad", data__source="cells", data__cells={"tokens": tokens, "min_genes": 1}, train__steps=2,
        data__max_length=24, model={"shape": {"family": "bert", "hidden": 32, "layers": 2, "heads": 4, "vocab": 64,
        "positions": 32}},
    )  # fmt: skip
    run = train_again_on(1, config, tmp_path)
    found = api.embed(run, output=tmp_path / "embedded.h5ad")
    written = anndata.read_h5ad(tmp_path / "embedded.h5ad")
    assert written.n_obs == 39
    assert "blood-7" not in written.obs_names
    assert list(written.obs["kind"]) == [kind for row, kind in enumerate(kinds) if row != 7]
    assert np.array_equal(written.obsm["X_shoal"], found.embeddings)
    assert np.array_equal(written.X.toarray(), np.delete(counts, 7, axis=0))
    assert set(written.obs["shoal_label"]) <= {"B", "T"}
    assert not (tmp_path / ".embedded.h5ad.part").exists()
    # A cell's embedding does not depend on the others of its batch.
    alone = api.embed(run, batch=1)
    assert alone.embeddings == pytest.approx(found.embeddings, abs=2e-6)

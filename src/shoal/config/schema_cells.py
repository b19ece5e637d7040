"""The block `data.cells`."""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from shoal.config.schema_base import Block, Size, spelled

Scheme = Annotated[
    Literal["rank_value", "binned"],
    spelled(("rank_value", "binned"), {"rank": "rank_value", "geneformer": "rank_value", "scgpt": "binned"}),
]


class CellsConfig(Block):
    """How the cells of `.h5ad` files become tokens, for data.source cells."""

    tokens: Scheme = Field(
        "rank_value",
        description="rank_value: the genes of a cell by falling expression (Geneformer). binned: its genes in the "
        "order of the vocabulary, each with the bin of its expression as token type (scGPT).",
    )
    gene_vocab: str = Field(
        "auto",
        description="Genes that are tokens: data (all that the files have), a file with a gene per line, or a name "
        "such as human_protein_coding, whose file is genes/NAME.txt in the cache. auto: those of the model's "
        "tokenizer, else data.",
    )
    gene_names: str | None = Field(None, description="Column of var with the names of genes; default: its index.")
    max_genes: Size | None = Field(
        None, description="Most genes of a cell; those with the highest expression stay. Default: as fit max_length."
    )
    cls: bool = Field(True, description="Whether a cell begins with the token <cls>.")
    matrix: str = Field(
        "auto", description="Where the expression is: X, raw, or the name of a layer; auto: the first with raw counts."
    )
    normalized: bool = Field(
        False,
        description="The matrix holds no raw counts, but log1p of normalized ones, and is used as it is.",
    )
    target_sum: Annotated[float, Ge(0)] = Field(
        10_000.0, description="Sum to which the counts of each cell are normalized; 0: not normalized."
    )
    log1p: bool = Field(
        True, description="Whether log(1 + x) is taken of normalized counts. It changes bins of uniform width only."
    )
    medians: str = Field(
        "auto",
        description="What the expression of each gene is divided by before genes are ranked: none, data (its median "
        "over the cells that express it), or a file. auto: those that the model's tokenizer has, else none.",
    )
    bins: Annotated[int, Ge(3), Le(1 << 15)] = Field(
        51, description="Number of bins of tokens binned, the one of special tokens included."
    )
    binning: Literal["quantile", "uniform"] = Field(
        "quantile", description="Whether the bins of a cell hold equally many genes, or are equally wide."
    )
    min_genes: Annotated[int, Ge(0)] = Field(
        0, description="Cells that express fewer genes are left out; 0: a cell without any is a mistake."
    )
    highly_variable: Size | None = Field(
        None, description="Keep this many of the most variable genes of the data only (scanpy's flavor seurat)."
    )
    backed: bool = Field(True, description="Read files in slabs; false: load each file into memory at once.")
    same_names: bool = Field(False, description="Whether cells of several files may have the same name.")

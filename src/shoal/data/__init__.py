"""The data pipeline: tokenize and pack once, shuffle in one global order, load each rank's share.

Importing this package imports numpy only. The loader needs torch and is imported by name: `shoal.data.loader`.
"""

from shoal.data.order import Order, ShuffledOrder, permute
from shoal.data.prepare import prepare
from shoal.data.sequences import Sequences, StoredSequences, Summary
from shoal.data.sets import Sets, prepare_sets
from shoal.data.tokenizer import load_tokenizer
from shoal.data.tokenizer_base import Tokenizer

__all__ = [
    "Order",
    "Sequences",
    "Sets",
    "ShuffledOrder",
    "StoredSequences",
    "Summary",
    "Tokenizer",
    "load_tokenizer",
    "permute",
    "prepare",
    "prepare_sets",
]

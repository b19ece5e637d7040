"""Text becomes rows of tokens, once; rows stand in one global order; every rank takes its share of it.

Importing this costs numpy and no more. The loader needs torch and is imported by name: `shoal.data.loader`.
"""

from shoal.data.order import Order, permute
from shoal.data.prepare import Sets, prepare, prepare_sets
from shoal.data.sequences import Sequences, Summary
from shoal.data.tokenizer import load_tokenizer
from shoal.data.tokenizer_base import Tokenizer

__all__ = ["Order", "Sequences", "Sets", "Summary", "Tokenizer", "load_tokenizer", "permute", "prepare", "prepare_sets"]

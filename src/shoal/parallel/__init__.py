"""Parallelize a model over ranks."""

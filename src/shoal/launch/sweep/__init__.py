"""Sweeps: the same file with several values of some keys. Nothing here imports torch."""

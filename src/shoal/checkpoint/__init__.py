"""Checkpoints on disk. A checkpoint is whole or it does not exist."""

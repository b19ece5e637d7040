"""Data that is tokenized while training, by a process of its own."""

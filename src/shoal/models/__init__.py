"""Models: built, read, filled with weights, and given a loss."""

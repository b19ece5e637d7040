"""What a run shows and writes while it goes."""

"""State on disk: whole, or not there."""

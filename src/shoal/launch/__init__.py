"""Start processes and initialize process groups."""

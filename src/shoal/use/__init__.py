"""What one does with a run: write with it, talk to it, measure it."""

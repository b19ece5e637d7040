"""What watches a run: hangs, stragglers, stop requests, losses that are not finite."""

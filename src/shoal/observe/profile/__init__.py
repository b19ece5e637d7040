"""Where the time of a step goes, from a trace of torch.profiler. Everything but `ranges.py` works without torch."""

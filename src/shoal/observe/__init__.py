"""Progress output and metrics."""

"""A training run as the forecast sees it: its settings, and which rank holds which part of the model."""

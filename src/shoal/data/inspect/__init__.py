"""To look at data without training on it: examples as the model sees them, and statistics."""

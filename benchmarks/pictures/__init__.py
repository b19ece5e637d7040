"""Scripts that draw the pictures of docs/pictures: `python -m benchmarks.pictures`."""

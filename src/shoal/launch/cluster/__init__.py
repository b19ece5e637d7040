"""Runs as jobs of a cluster: what is submitted, and one module per scheduler."""

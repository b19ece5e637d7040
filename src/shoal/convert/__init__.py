"""Conversion to and from other checkpoint formats."""

"""Seconds of a step, kernel by kernel, collective by collective."""

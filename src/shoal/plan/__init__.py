"""Forecasts memory and speed of a run before it starts. Imports no torch."""

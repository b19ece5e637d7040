"""Arithmetic about a run before it starts. Imports no torch."""

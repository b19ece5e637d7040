"""Measuring this machine: a table, JSON and a plot of each thing that a run's speed depends on."""

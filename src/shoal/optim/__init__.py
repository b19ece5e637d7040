"""Optimizers: what turns gradients into updates, and where their state lives."""

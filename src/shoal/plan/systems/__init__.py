"""Training systems whose code a run can be forecast with, and how they differ."""

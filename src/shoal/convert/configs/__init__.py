"""Configs and commands of other training systems, translated to ours. No torch."""

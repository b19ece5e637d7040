"""The terminal: parse, call, print. One file for each group of commands."""

from shoal.cli.app import main

__all__ = ["main"]

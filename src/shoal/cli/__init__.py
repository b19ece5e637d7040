"""The command line: one file per group of commands."""

from shoal.cli.app import main

__all__ = ["main"]

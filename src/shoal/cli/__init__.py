"""The command line: one file per group of commands."""

import sys

try:
    from shoal.cli.app import main
except KeyboardInterrupt:  # Ctrl-C while the command starts is no crash
    sys.exit(130)

__all__ = ["main"]

"""Import this first in the program of a rank: until the rank handles Ctrl-C itself, it ends it without a word.

Ctrl-C reaches every process of a terminal, and the launcher, which reports it, sends it on. Python's own handler would
raise KeyboardInterrupt in the middle of an import of torch, and each rank would print a traceback.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)

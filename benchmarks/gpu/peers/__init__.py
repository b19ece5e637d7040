"""What `speed.py` measures: shoal and other tools, each case in a separate process.

`cases` lists them, `process` runs one, and `sequences` prepares the tokens that all of them train on. The modules named
after a tool train with that tool, as its users would.
"""

"""What `speed.py` measures: shoal and its peers, each case in a process of its own.

`cases` lists them, `process` runs one, `rows` makes the tokens that all of them see; the modules named after a tool
train with that tool, as its own users would.
"""

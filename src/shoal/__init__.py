"""shoal trains and fine-tunes transformers, on one device or many, from one YAML file."""

__version__ = "0.1.0"

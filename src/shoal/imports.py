"""Import torch and transformers in two thirds of the time."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Pause the garbage collector while `module` is imported in here for the first time.

    An import of torch and transformers leaves half a million objects that live as long as the process. Searching them
    for garbage takes a third of the time of the import, so they are also exempt from every later collection.
    """
    if module in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

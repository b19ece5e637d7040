"""Import torch and transformers in two thirds of the time."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

SCIPY_OPTIMIZE = "scipy.optimize"


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


@contextmanager
def without_scipy() -> Iterator[None]:
    """Import transformers' models in here without SciPy, which takes a seventh of the time of a start.

    They import one function of it, for losses of object detection alone: a stand-in imports SciPy when it is called.
    Whatever else is asked of the stand-in is SciPy's own.
    """
    if SCIPY_OPTIMIZE in sys.modules or find_spec("scipy") is None:
        yield
        return
    later = ModuleType(SCIPY_OPTIMIZE)
    # __file__ and __path__ are asked for by inspect and by the import itself.
    later.__dict__.update(
        linear_sum_assignment=_linear_sum_assignment, __getattr__=_of_scipy, __file__=None, __path__=[]
    )
    sys.modules[SCIPY_OPTIMIZE] = later
    try:
        yield
    finally:
        if sys.modules.get(SCIPY_OPTIMIZE) is later:
            del sys.modules[SCIPY_OPTIMIZE]


def _linear_sum_assignment(*arguments: Any, **options: Any) -> Any:
    return _of_scipy("linear_sum_assignment")(*arguments, **options)


def _of_scipy(name: str) -> Any:
    loaded = sys.modules.get(SCIPY_OPTIMIZE)
    if loaded is not None and loaded.__dict__.get("__getattr__") is _of_scipy:
        del sys.modules[SCIPY_OPTIMIZE]
    return getattr(importlib.import_module(SCIPY_OPTIMIZE), name)

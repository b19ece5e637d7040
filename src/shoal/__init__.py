"""shoal trains and fine-tunes transformers, on one device or many, from one YAML file.

    import shoal

    shoal.train("run.yaml")                  # what `shoal train` does; shoal.plan, shoal.dry_run, shoal.export likewise
    run = shoal.init("run.yaml")             # a training loop of your own: see docs/python.md

Importing this is cheap: torch is imported by what needs it.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# Name here → (module, name there).
_API = {
    "Config": ("shoal.config", "Config"),
    "Hook": ("shoal.train.hooks", "Hook"),
    "dry_run": ("shoal.api", "dry_run"),
    "export": ("shoal.api", "export"),
    "init": ("shoal.api", "init_run"),
    "load_config": ("shoal.config", "load_config"),
    "plan": ("shoal.api", "plan"),
    "train": ("shoal.api", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    if name in _CALLED:
        return importlib.import_module(f"shoal.{name}")
    module, there = _API[name]
    return getattr(importlib.import_module(module), there)


class _Called(ModuleType):
    """A package that is also a function of the API: shoal.train and shoal.plan are both."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        module, name = _API[self.__name__.removeprefix("shoal.")]
        return getattr(importlib.import_module(module), name)(*given, **named)


class _Package(ModuleType):
    """Importing a package sets it as an attribute here: the moment to make it callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLED and isinstance(value, ModuleType):
            value.__class__ = _Called
        super().__setattr__(name, value)


_CALLED = ("plan", "train")
sys.modules[__name__].__class__ = _Package

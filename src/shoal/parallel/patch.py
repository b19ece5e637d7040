"""Override methods of one module instance without changing its class, name or parameters.

The instance's class is replaced with a subclass, as FSDP2 does. Assigning a function to the instance would also work,
but the compiler would see a different function in each block and recompile every block.
"""

from functools import cache

from torch import nn


def patch(module: nn.Module, behaviour: type, **attributes: object) -> None:
    """`behaviour` is a mixin whose methods override the module's; `attributes` are set on the module for them."""
    module.__class__ = _subclass(type(module), behaviour)  # type: ignore[arg-type]
    for name, value in attributes.items():
        setattr(module, name, value)


@cache
def _subclass(kind: type, behaviour: type) -> type:
    # Keeps the class name: transformers initializes weights by it.
    return type(kind.__name__, (behaviour, kind), {"__module__": kind.__module__})

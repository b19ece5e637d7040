"""Give one module of a model another behaviour, without touching its class, its name or its parameters.

It becomes an instance of a subclass, as FSDP2 does it too. A function put on the instance would work as well, but the
compiler would see another one in each block, and compile each block anew.
"""

from functools import cache

from torch import nn


def patch(module: nn.Module, behaviour: type, **attributes: object) -> None:
    """`behaviour` is a class whose methods come before the module's own; `attributes` are what they use."""
    module.__class__ = _subclass(type(module), behaviour)  # type: ignore[arg-type]
    for name, value in attributes.items():
        setattr(module, name, value)


@cache
def _subclass(kind: type, behaviour: type) -> type:
    # Under the old name: transformers looks at names when it initialises weights.
    return type(kind.__name__, (behaviour, kind), {"__module__": kind.__module__})

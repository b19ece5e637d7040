"""Parameters and the modules that hold them."""

from collections.abc import Iterable

from torch import nn

Slots = dict[nn.Parameter, list[tuple[nn.Module, str]]]


def parameter_slots(modules: Iterable[nn.Module]) -> Slots:
    """Every distinct parameter with the (module, name) slots that hold it; a tied weight has two."""
    slots: Slots = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(parameter, []).append((module, name))
    return slots

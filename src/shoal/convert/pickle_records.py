"""Reads a pickle as records, without running anything in it.

A pickle is a program that imports functions and calls them. Here its instructions are read by `pickletools`, and every
class is only a name: an object becomes a `Record` of that name with its arguments and its state.
"""

import pickletools
from dataclasses import dataclass
from typing import Any

from shoal.mistakes import UserMistake

MOST_INSTRUCTIONS = 20_000_000
_MARK = object()


@dataclass(eq=False)
class Record:
    """An object in a pickle: the class's name, the arguments that it would be made with, and its state."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def get(self, field: str, default: Any = None) -> Any:
        """A field of the state."""
        return self.state.get(field, default) if isinstance(self.state, dict) else default


def read_records(data: bytes, source: str) -> Any:
    """The value in a pickle; a UserMistake if it is damaged, or does what only a program needs."""
    try:
        return _run(data, source)
    except UserMistake:
        raise
    except Exception as error:  # a damaged file can break any instruction
        raise UserMistake(f"{source} is damaged ({type(error).__name__}); copy it again.") from None


def _run(data: bytes, source: str) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number > MOST_INSTRUCTIONS:
            raise UserMistake(f"{source} has more than {MOST_INSTRUCTIONS:,} instructions.")
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack.pop()
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _LITERALS:
            stack.append(argument)
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            memo[len(memo) if name == "MEMOIZE" else int(argument or 0)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(argument or 0)])
        elif name == "GLOBAL":
            stack.append(Record(str(argument).replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            last, module = stack.pop(), stack.pop()
            stack.append(Record(f"{module}.{last}"))
        elif name in ("NEWOBJ", "REDUCE"):
            arguments, kind = stack.pop(), stack.pop()
            stack.append(Record(kind.name, tuple(arguments)))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(name[-1])
            stack[-size:] = [tuple(stack[-size:])]
        elif name in ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS", "ADDITEMS", "FROZENSET"):
            _collect(name, stack)
        elif name == "APPEND":
            item = stack.pop()
            stack[-1].append(item)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _items(stack[-1])[key] = value
        elif name == "POP":
            stack.pop()
        else:
            raise UserMistake(
                f"{source} is a pickle with the instruction {name}, which a table of tensors does not need."
            )
    raise ValueError("no end")


_CONSTANTS: dict[str, Any] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_LITERALS = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "SHORT_BINUNICODE"}
    | {"BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}
)


def _items(target: Any) -> dict[Any, Any]:
    """Where the items of a mapping go: of a subclass of dict, such as OrderedDict, into its state."""
    if isinstance(target, Record):
        target.state = target.state if isinstance(target.state, dict) else {}
        found: dict[Any, Any] = target.state
        return found
    assert isinstance(target, dict)
    return target


def _collect(name: str, stack: list[Any]) -> None:
    at = len(stack) - 1 - stack[::-1].index(_MARK)
    items = stack[at + 1 :]
    del stack[at:]
    if name in ("TUPLE", "FROZENSET"):
        stack.append(tuple(items))
    elif name == "LIST":
        stack.append(items)
    elif name == "APPENDS":
        stack[-1].extend(items)
    elif name == "ADDITEMS":
        stack[-1].update(items)
    else:
        if name == "DICT":
            stack.append({})
        _items(stack[-1]).update(zip(items[::2], items[1::2], strict=True))

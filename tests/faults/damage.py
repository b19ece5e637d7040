"""Ways to damage the files of a checkpoint. Each is a function of the file's bytes and of a seeded random generator."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from shoal.checkpoint.store import MANIFEST

Damage = Callable[[bytes, Random], bytes]

# Unexpected values in a JSON file. Python's json reads NaN and Infinity, so files may have them.
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    0.5,
    10**30,
    10**400,
    2**63,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x" * 5000,
    "\0",
    "\ud800",
    "é",
    "../../outside",
    [],
    [[]],
    [["size", 1]],
    {},
    {"size": {}},
    {"": None},
)


def flip_bytes(contents: bytes, chance: Random) -> bytes:
    damaged = bytearray(contents)
    for _ in range(chance.choice((1, 1, 1, 4, 40))):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def truncate(contents: bytes, chance: Random) -> bytes:
    return contents[: chance.choice((0, 1, len(contents) - 1, chance.randrange(len(contents))))]


def repeat_a_part(contents: bytes, chance: Random) -> bytes:
    first, last = sorted(chance.randrange(len(contents)) for _ in range(2))
    return contents[:last] + contents[first:]


def spoil_utf8(contents: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(contents))
    return contents[:at] + chance.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\xef\xbb\xbf")) + contents[at:]


def delete_a_key(contents: bytes, chance: Random) -> bytes:
    tree = json.loads(contents)
    holder, key = chance.choice([location for location in locations(tree) if isinstance(location[0], dict)])
    del holder[key]
    return as_json(tree)


def change_a_value(contents: bytes, chance: Random) -> bytes:
    tree = json.loads(contents)
    holder, key = chance.choice(list(locations(tree)))
    holder[key] = chance.choice(ODD_VALUES)
    return as_json(tree)


def rename_a_key(contents: bytes, chance: Random) -> bytes:
    tree = json.loads(contents)
    holder, key = chance.choice([location for location in locations(tree) if isinstance(location[0], dict)])
    holder[chance.choice(("", "\0", "\ud800", key + "#1", key.upper(), "../" + key, "x" * 5000))] = holder.pop(key)
    return as_json(tree)


def replace_the_whole(contents: bytes, chance: Random) -> bytes:
    return as_json(chance.choice(ODD_VALUES))


def nest_deeply(contents: bytes, chance: Random) -> bytes:
    depth = chance.choice((100, 900, 1_100, 100_000))
    opened, closed = chance.choice((("[", "]"), ('{"files":', "}")))
    deep = opened * depth + "1" + (closed * depth if chance.random() < 0.7 else "")
    if chance.random() < 0.5:
        return deep.encode()
    tree = json.loads(contents)
    holder, key = chance.choice(list(locations(tree)))
    holder[key] = "DEEP"
    return as_json(tree).replace(b'"DEEP"', deep.encode())


def say_a_key_twice(contents: bytes, chance: Random) -> bytes:
    tree = json.loads(contents)
    key = chance.choice(list(tree))
    value = json.dumps(chance.choice(ODD_VALUES)).encode()
    return b"{" + json.dumps(key).encode() + b": " + value + b", " + contents.strip()[1:]


def locations(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a tree, as (container, key)."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from locations(value)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


ANY_JSON: dict[str, Damage] = {
    "flipped bytes": flip_bytes,
    "cut short": truncate,
    "a part twice": repeat_a_part,
    "not UTF-8": spoil_utf8,
    "a key missing": delete_a_key,
    "another value": change_a_value,
    "another key": rename_a_key,
    "something else": replace_the_whole,
    "nested deeply": nest_deeply,
    "a key twice": say_a_key_twice,
}


# Manifests only.


def name_a_file_elsewhere(contents: bytes, chance: Random) -> bytes:
    manifest = json.loads(contents)
    files = manifest["files"]
    name = chance.choice(list(files))
    elsewhere = (
        "../{}",
        "/etc/passwd",
        "sub/../{}",
        "./{}",
        "..",
        ".",
        "",
        "{}/",
        "/dev/zero",
        "{}\0",
        "C:\\{}",
        "~/{}",
    )
    new = chance.choice(elsewhere).format(name)
    # Beside the true name or instead of it; with its size, or with that of most devices and pipes.
    files[new] = {**files[name], "size": chance.choice((files[name]["size"], 0, 4096))}
    if new != name and chance.random() < 0.5:
        del files[name]
    return as_json(manifest)


def swap_hashes(contents: bytes, chance: Random) -> bytes:
    manifest = json.loads(contents)
    one, other = chance.sample(list(manifest["files"].values()), 2)
    one["sha256"], other["sha256"] = other["sha256"], one["sha256"]
    return as_json(manifest)


def say_another_size(contents: bytes, chance: Random) -> bytes:
    manifest = json.loads(contents)
    entry = chance.choice(list(manifest["files"].values()))
    size = entry["size"]
    entry["size"] = chance.choice((-size, -1, 0, size + 1, str(size), [size], float(size), 10**30, math.inf, math.nan))
    return as_json(manifest)


def say_another_step(contents: bytes, chance: Random) -> bytes:
    manifest = json.loads(contents)
    step = chance.choice((-1, 0, 1, 3, 10**30, "3", "two", 2.5, math.inf, math.nan, None, True, [2]))
    return as_json({**manifest, "step": step})


def measure_something_odd(contents: bytes, chance: Random) -> bytes:
    metrics = chance.choice(
        ({"loss": chance.choice(ODD_VALUES)}, [["loss", "low"]], {"\ud800": 1.0}, {"x" * 5000: 1.0})
    )
    return as_json({**json.loads(contents), "metrics": metrics})


MANIFEST_ONLY: dict[str, Damage] = {
    "files elsewhere": name_a_file_elsewhere,
    "hashes swapped": swap_hashes,
    "another size": say_another_size,
    "another step": say_another_step,
    "odd metrics": measure_something_odd,
}


# Tensor files only. Their data is not changed: only the hash can detect that.


def take_apart(contents: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    end = 8 + int.from_bytes(contents[:8], "little")
    return json.loads(contents[8:end]), contents[end:]


def put_together(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def say_another_length(contents: bytes, chance: Random) -> bytes:
    length = int.from_bytes(contents[:8], "little")
    total = len(contents)
    odd = (0, 1, 7, length - 1, length + 1, total, total - 8, 2**31, 2**32 + length, 2**63 - 1, 2**63, 2**64 - 1)
    return chance.choice(odd).to_bytes(8, "little") + contents[8:]


def damage_the_header(contents: bytes, chance: Random) -> bytes:
    """As any JSON is damaged, with a length that fits."""
    end = 8 + int.from_bytes(contents[:8], "little")
    return put_together(chance.choice(list(ANY_JSON.values()))(contents[8:end].rstrip(), chance), contents[end:])


def flip_in_the_header(contents: bytes, chance: Random) -> bytes:
    end = 8 + int.from_bytes(contents[:8], "little")
    return contents[:8] + flip_bytes(contents[8:end], chance) + contents[end:]


def truncate_the_data(contents: bytes, chance: Random) -> bytes:
    start = 8 + int.from_bytes(contents[:8], "little")
    return contents[: chance.choice((start, start + 1, len(contents) - 1, chance.randrange(start, len(contents))))]


def add_to_the_data(contents: bytes, chance: Random) -> bytes:
    return contents + bytes(chance.choice((1, 8, 4096)))


def _change_a_tensor(change: Callable[[dict[str, Any], Random], None]) -> Damage:
    def damage(contents: bytes, chance: Random) -> bytes:
        header, data = take_apart(contents)
        change(header[chance.choice([name for name in header if name != "__metadata__"])], chance)
        return put_together(as_json(header), data)

    return damage


def _move(tensor: dict[str, Any], chance: Random) -> None:
    begin, end = tensor["data_offsets"]
    moved = ([end, begin], [begin, begin], [0, end], [begin + 4, end + 4], [begin, end + 4], [-4, end], [begin, 10**15])
    tensor["data_offsets"] = chance.choice((*moved, [2**64 - 4, end], [begin], [], "0", [begin, end, end], None))


def _retype(tensor: dict[str, Any], chance: Random) -> None:
    real = ("F64", "F16", "BF16", "I64", "I32", "I32", "U32", "I16", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64")
    tensor["dtype"] = chance.choice((*real, "float32", "f32", "", None, 32))


def _reshape(tensor: dict[str, Any], chance: Random) -> None:
    shape = tensor["shape"]
    grown = [[*shape, 1], [1, *shape], shape[::-1], [math.prod(shape)], [-size for size in shape], [2**33, 2**33], []]
    odd = [[*shape, 0], [0.5], None, "x", [2**64], [-1], [math.prod(shape) // 2, 2], [2, math.prod(shape) // 2]]
    tensor["shape"] = chance.choice([other for other in (*grown, *odd) if other != shape])


def _change_the_slices(change: Callable[[dict[str, Any], Random], Any]) -> Damage:
    """Damage the metadata that says which slice of which tensor is in the file."""

    def damage(contents: bytes, chance: Random) -> bytes:
        header, data = take_apart(contents)
        tensor_slices = json.loads(header["__metadata__"]["slices"])
        changed = change(tensor_slices, chance)
        header["__metadata__"]["slices"] = changed if isinstance(changed, str) else json.dumps(changed)
        return put_together(as_json(header), data)

    return damage


def _move_a_slice(tensor_slices: dict[str, Any], chance: Random) -> Any:
    record = tensor_slices[chance.choice([name for name, record in tensor_slices.items() if record["offset"]])]
    index = chance.randrange(len(record["offset"]))
    true = record["offset"][index]
    odd = (true - 1, true + 1, -1, -(10**9), 10**9, 2**64, None, "x", [], math.nan, math.inf)
    record["offset"][index] = chance.choice(odd)
    return tensor_slices


def _overlap_slices(tensor_slices: dict[str, Any], chance: Random) -> Any:
    """Inside the tensor, so that only the other slices of the tensor show the error."""
    shared = [record for record in tensor_slices.values() if record["whole"] and record["whole"][0] % 2 == 0]
    record = chance.choice(shared)
    # Two ranks have half of the rows each.
    half = record["whole"][0] // 2
    record["offset"][0] = chance.choice([row for row in range(half + 1) if row != record["offset"][0]])
    return tensor_slices


def _resize_the_whole(tensor_slices: dict[str, Any], chance: Random) -> Any:
    record = tensor_slices[chance.choice([name for name, record in tensor_slices.items() if record["offset"]])]
    index = chance.randrange(len(record["whole"]))
    true = record["whole"][index]
    record["whole"][index] = chance.choice((true - 1, true + 1, 2 * true, 0, -true, 2**31, 2**70, 10**400, math.inf))
    return tensor_slices


def _change_the_rank(tensor_slices: dict[str, Any], chance: Random) -> Any:
    record = tensor_slices[chance.choice(list(tensor_slices))]
    for key in chance.choice((("offset",), ("whole",), ("offset", "whole"))):
        record[key] = chance.choice(([*record[key], 1], [1, *record[key]], [], None, 7, {}, "11"))
        if record[key] == [] and chance.random() < 0.5:
            del record[key]
    return tensor_slices


def _lose_a_slice(tensor_slices: dict[str, Any], chance: Random) -> Any:
    if chance.random() < 0.2:
        return {}
    del tensor_slices[chance.choice(list(tensor_slices))]
    return tensor_slices


def _any_json(tensor_slices: dict[str, Any], chance: Random) -> Any:
    damaged = chance.choice(list(ANY_JSON.values()))(as_json(tensor_slices), chance)
    return damaged.decode(errors="replace")


def lose_the_slices(contents: bytes, chance: Random) -> bytes:
    header, data = take_apart(contents)
    if chance.random() < 0.5:
        del header["__metadata__"]
    else:
        header["__metadata__"] = chance.choice(({}, {"format": "pt"}, {"Slices": "{}"}, None, [], {"slices": 1}))
    return put_together(as_json(header), data)


TENSORS_ONLY: dict[str, Damage] = {
    "header of another length": say_another_length,
    "header damaged": damage_the_header,
    "header with flipped bytes": flip_in_the_header,
    "data cut short": truncate_the_data,
    "data too long": add_to_the_data,
    "data elsewhere": _change_a_tensor(_move),
    "another type": _change_a_tensor(_retype),
    "another shape": _change_a_tensor(_reshape),
    "a slice elsewhere": _change_the_slices(_move_a_slice),
    "overlapping slices": _change_the_slices(_overlap_slices),
    "another whole": _change_the_slices(_resize_the_whole),
    "another number of dimensions": _change_the_slices(_change_the_rank),
    "a slice missing": _change_the_slices(_lose_a_slice),
    "slices damaged": _change_the_slices(_any_json),
    "no slices": lose_the_slices,
}


# Write them to disk.


@contextmanager
def written(contents: Mapping[Path, bytes]) -> Iterator[None]:
    """Replace the contents of files until the end of the block."""
    before = {path: path.read_bytes() for path in contents}
    for path, damaged in contents.items():
        path.write_bytes(damaged)
    try:
        yield
    finally:
        for path, whole in before.items():
            path.write_bytes(whole)


def hashed_anew(file: Path, contents: bytes) -> dict[Path, bytes]:
    """`file` with other `contents`, and a manifest that says it should have them."""
    manifest = json.loads((file.parent / MANIFEST).read_bytes())
    manifest["files"][file.name] = {"size": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    return {file: contents, file.parent / MANIFEST: as_json(manifest)}

"""Reads state dicts that other programs saved, from a file or a folder, without executing code in them.

A `.pt`, `.pth` or `.bin` file is a pickle, which can execute code. `torch.load(weights_only=True)` accepts only
instructions that create tensors and plain containers; a file that contains others is refused. Values are memory-mapped
until they are used.
"""

import json
import logging
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.mistakes import UserMistake
from shoal.models.stored import InMemory, Stored

LITGPT, DEEPSPEED, STATE_DICT = "LitGPT", "DeepSpeed", "state dict"
LITGPT_FILE = "lit_model.pth"
DEEPSPEED_FILE = "mp_rank_00_model_states.pt"
PYTORCH_FILE = "pytorch_model.bin"
# Keys under which training scripts store the state dict in a larger dict.
STATE_DICT_KEYS = ("module", "model", "state_dict", "model_state_dict")
# Components that wrappers add to parameter names.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"})
EXTRA_STATE = "_extra_state"
CHUNK = 1 << 22


@dataclass(frozen=True)
class Foreign:
    """The tensors of a foreign checkpoint under their own names, without wrapper prefixes."""

    kind: str
    path: Path  # of the file, for error messages
    config_folders: tuple[Path, ...]  # may hold its config and tokenizer, the most likely first
    tensors: dict[str, Tensor]
    note: str = ""  # a remark for the user
    stored: dict[str, Stored] | None = None  # instead of tensors, where they are assembled from the files of ranks

    @property
    def all_stored(self) -> dict[str, Stored]:
        """The tensors, read when they are used."""
        if self.stored is not None:
            return self.stored
        return {name: InMemory(tensor) for name, tensor in self.tensors.items()}


def open_foreign(source: Path) -> Foreign:
    """Detect the format of `source`, a file or a folder, and open it."""
    if not source.exists():
        raise UserMistake(f"{source} does not exist; give a LitGPT, DeepSpeed or FSDP checkpoint.")
    files = _files_of(source) if source.is_dir() else [source]
    tensors: dict[str, Tensor] = {}
    deepspeed = False
    for file in files:
        _refuse_partitioned(file)
        state, key = _find_state_dict(file, read_tensors(file))
        deepspeed = deepspeed or key == "module"
        tensors |= _unwrap(file, state)
    _refuse_empty(files[0], tensors)
    if not tensors:
        raise UserMistake(f"{files[0]} holds no tensors; give the file that holds the weights.")
    kind = DEEPSPEED if deepspeed else STATE_DICT
    if is_litgpt(tensors):
        kind = LITGPT
    note = ""
    low_precision = any(tensor.dtype.itemsize == 2 for tensor in tensors.values())
    if deepspeed and low_precision and any(files[0].parent.glob("*zero_pp_rank_*_optim_states.pt")):
        note = (
            "These are the 16-bit weights; the fp32 master weights are in the optimizer state files. To import those, "
            "create a pytorch_model.bin with DeepSpeed's zero_to_fp32.py."
        )
    folder = files[0].absolute().parent
    # DeepSpeed writes to a subfolder; the training script's files are in its parent.
    config_folders = dict.fromkeys([folder, folder.parent] if files[0].name == DEEPSPEED_FILE else [folder])
    return Foreign(kind, files[0], tuple(config_folders), tensors, note)


def is_litgpt(names: Iterable[str]) -> bool:
    """Whether these are names of LitGPT's tensors."""
    return any(re.fullmatch(r"transformer\.h\.\d+\.attn\.(qkv|attn)\.weight", name) for name in names)


def read_tensors(path: Path) -> Any:
    """Load a PyTorch file with `weights_only=True`."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserMistake(f"{path} cannot be read: {error.strerror}.") from None
    try:
        archive = _is_archive(path)
        if archive:
            _verify_checksums(path)
        with _quiet():
            # Files from before PyTorch 1.6 are not zip archives and cannot be memory-mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        if wanted := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserMistake(
                f"{path} holds more than tensors: loading it would run {wanted[1]}, and shoal never runs code from a "
                "file; where the file was made, save only the state dict with torch.save(model.state_dict(), FILE), "
                "and import that."
            ) from None
        raise _damaged(path, error) from None
    except Exception as error:  # a damaged file can make the unpickler raise anything
        raise _damaged(path, error) from None


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # the central directory is present but damaged
        return False


def _verify_checksums(path: Path) -> None:
    """torch.save writes a checksum per tensor, but torch.load does not verify it."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.CRC:  # 0 if it was saved without checksums
                with archive.open(entry) as file:
                    while file.read(CHUNK):  # raises BadZipFile at the end if the checksum differs
                        pass


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings about what it refuses and about DTensors: the error message here is enough."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _damaged(path: Path, error: Exception) -> UserMistake:
    with path.open("rb") as file:
        begins = file.read(4)
    if begins == b"PK\x03\x04" and not _is_archive(path):
        return UserMistake(f"{path} is truncated: the zip directory at its end is missing or damaged; copy it again.")
    if "TorchScript" in str(error):
        return UserMistake(f"{path} is a TorchScript program, not a file of weights; save the model's state dict.")
    # The first opcode of such a file; torch.save does not write it by default.
    if f"operand {pickle.FRAME[0]}" in str(error):
        return UserMistake(
            f"{path} uses pickle protocol 4 or newer (as LitGPT's converters before 0.5.8 did), which weights-only "
            "loading does not support; where it was made, load it and save its state dict again with torch.save."
        )
    # torch first explains how to disable weights_only; the actual error follows this marker.
    reason = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    return UserMistake(
        f"{path} is damaged, or was not written by torch.save "
        f"({type(error).__name__}: {reason.splitlines()[0].rstrip('.') if reason else 'no details'}); "
        "copy it again."
    )


def _files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that hold the weights."""
    if (folder / LITGPT_FILE).is_file():
        return [folder / LITGPT_FILE]
    if (folder / "latest").is_file():
        return _files_of(latest_folder(folder))
    if (folder / DEEPSPEED_FILE).is_file():
        return [folder / DEEPSPEED_FILE]
    if (index := folder / f"{PYTORCH_FILE}.index.json").is_file():
        return _files_in(index)
    if (folder / PYTORCH_FILE).is_file():
        return [folder / PYTORCH_FILE]
    if any(folder.glob("model*.safetensors")):
        raise UserMistake(f"{folder} already holds safetensors; use it directly, with model.from.")
    raise UserMistake(
        f"{folder} holds no {LITGPT_FILE}, {DEEPSPEED_FILE}, {PYTORCH_FILE} or latest; if the weights are in another "
        "file, give that file."
    )


def latest_folder(folder: Path) -> Path:
    """Return the folder of DeepSpeed's newest checkpoint, named in the file `latest`."""
    tag = (folder / "latest").read_text(errors="replace").strip()
    if not tag or Path(tag).name != tag or not (folder / tag).is_dir():
        raise UserMistake(
            f"{folder / 'latest'} names {tag[:80]!r}, which is not a folder there; give the checkpoint's folder."
        )
    if (folder / tag / "latest").exists():
        raise UserMistake(f"{folder / tag} is not a DeepSpeed checkpoint: it holds a file `latest` of its own.")
    return folder / tag


def _files_in(index: Path) -> list[Path]:
    """Return the shards that zero_to_fp32.py, or an older save_pretrained, wrote."""
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserMistake(f"{index} is not a valid index of {PYTORCH_FILE} shards.") from None
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise UserMistake(f"{index} names {name}, which is not a file in that folder; copy it there.")
    if not names:
        raise UserMistake(f"{index} names no files.")
    return [index.parent / name for name in names]


def _refuse_partitioned(file: Path) -> None:
    """Refuse files that hold only a partition of the model, which DeepSpeed's file names tell."""
    folder = file.parent
    if re.fullmatch(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt", file.name):
        raise _consolidate(file)
    if re.fullmatch(r"mp_rank_\d+_model_states\.pt", file.name):
        split = sorted(folder.glob("mp_rank_*_model_states.pt"))
        if len(split) > 1:
            raise UserMistake(
                f"{folder} holds a model split by tensor parallelism over {len(split)} files; "
                "gather it into one state dict where it was trained, and import that."
            )
        if any(folder.glob("layer_*-model_*states.pt")):
            raise UserMistake(
                f"{folder} holds a model split by DeepSpeed's pipeline parallelism, one file per layer; "
                "gather it into one state dict where it was trained, and import that."
            )


def _consolidate(file: Path) -> UserMistake:
    return UserMistake(
        f"{file} belongs to a ZeRO-3 checkpoint, in which every rank holds a partition of each parameter: import the "
        "folder with the files of all ranks."
    )


def _refuse_empty(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """In a ZeRO-3 model file, parameters are empty tensors. Buffers have values."""
    empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
    if 2 * len(empty) > len(tensors):
        raise _consolidate(file)
    if empty:
        raise UserMistake(f"{file} holds the empty tensor {empty[0]}; save the full state dict.")


def _find_state_dict(file: Path, loaded: Any) -> tuple[Mapping[Any, Any], str]:
    """Return the state dict in the loaded object, and the key it was found under."""
    parent_key = ""
    while isinstance(loaded, Mapping):
        if parent_key != "module" and "module" in loaded and loaded["module"] is None:
            raise UserMistake(
                f"{file} holds no weights (its module is None): pipeline parallelism saves them in one file per layer."
            )
        key = next((key for key in STATE_DICT_KEYS if isinstance(loaded.get(key), Mapping)), None)
        if key is None and any(isinstance(value, Tensor) for value in loaded.values()):
            return loaded, parent_key
        if key is None:
            found = ", ".join(str(key) for key in list(loaded)[:6]) or "nothing"
            raise UserMistake(
                f"{file} holds no state dict: neither tensors nor {', '.join(STATE_DICT_KEYS[:-1])} or "
                f"{STATE_DICT_KEYS[-1]}, but {found}."
            )
        parent_key, loaded = key, loaded[key]
    raise UserMistake(f"{file} holds a {type(loaded).__name__}, not a state dict of names and tensors.")


def _unwrap(file: Path, state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors under the model's own parameter names."""
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        name = unwrapped_name(str(key))
        if name.rpartition(".")[2] == EXTRA_STATE:
            continue  # a module's own state, such as fp8 scales: not a weight
        if not isinstance(value, Tensor):
            raise UserMistake(
                f"{file} holds {key} as {type(value).__name__}, not as a tensor; save only the state dict."
            )
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
            kind = type(value).__name__ if value.layout is torch.strided else str(value.layout)
            raise UserMistake(
                f"{file} holds {key} as {kind}, not as a plain tensor: save the full state dict, neither sharded nor "
                "quantized."
            )
        if name in tensors:
            raise UserMistake(f"{file} holds {name} twice, once as {key}; save the state dict of a single model.")
        tensors[name] = value.detach()
    return tensors


def unwrapped_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":  # added by DDP and DeepSpeed; deeper it may be the model's own
        parts = parts[1:]
    return ".".join(parts)

"""What other programs have saved: found in a file or a folder, and read without running any of it.

A `.pt`, `.pth` or `.bin` file is a pickle, and a pickle is a program. `torch.load(weights_only=True)` runs only the
instructions that make tensors and plain containers of them; a file that asks for more is refused. Values stay in the
file (mmap) until they are used.
"""

import json
import logging
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.mistakes import UserMistake

LITGPT, DEEPSPEED, STATE_DICT = "LitGPT", "DeepSpeed", "state dict"
LITGPT_FILE = "lit_model.pth"
DEEPSPEED_FILE = "mp_rank_00_model_states.pt"
WHOLE = "pytorch_model.bin"
# Where training scripts keep the state dict inside of a larger one.
NESTS = ("module", "model", "state_dict", "model_state_dict")
# Names that wrappers put between those of the model's own modules.
WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"})
EXTRA_STATE = "_extra_state"
CHUNK = 1 << 22


@dataclass(frozen=True)
class Foreign:
    """The tensors of a foreign checkpoint under the names it has for them, less those of wrappers."""

    kind: str
    path: Path  # of the file, for sentences about it
    beside: tuple[Path, ...]  # folders that may hold its config and tokenizer, the likeliest first
    tensors: dict[str, Tensor]
    note: str = ""  # what the user should know of what was read


def open_foreign(source: Path) -> Foreign:
    """Recognise and open what lies at `source`, a file or a folder."""
    if not source.exists():
        raise UserMistake(f"{source} does not exist; give a LitGPT, DeepSpeed or FSDP checkpoint.")
    files = _files_of(source) if source.is_dir() else [source]
    tensors: dict[str, Tensor] = {}
    deepspeed = False
    for file in files:
        _refuse_parts(file)
        state, inside = _state_of(file, read_tensors(file))
        deepspeed = deepspeed or inside == "module"
        tensors |= _named(file, state)
    _refuse_gathered_later(files[0], tensors)
    if not tensors:
        raise UserMistake(f"{files[0]} holds no tensors; give the file that holds the weights.")
    kind = DEEPSPEED if deepspeed else STATE_DICT
    if any(re.fullmatch(r"transformer\.h\.\d+\.attn\.(qkv|attn)\.weight", name) for name in tensors):
        kind = LITGPT
    note = ""
    rounded = any(tensor.dtype.itemsize == 2 for tensor in tensors.values())
    if deepspeed and rounded and any(files[0].parent.glob("*zero_pp_rank_*_optim_states.pt")):
        note = (
            "These are the weights that the model computed with; their fp32 originals are in the optimizer's files, "
            "from which DeepSpeed's zero_to_fp32.py makes a pytorch_model.bin to import."
        )
    folder = files[0].absolute().parent
    # DeepSpeed's files lie in a folder of their own, below that of whoever called it.
    beside = dict.fromkeys([folder, folder.parent] if files[0].name == DEEPSPEED_FILE else [folder])
    return Foreign(kind, files[0], tuple(beside), tensors, note)


def read_tensors(path: Path) -> Any:
    """What a file of PyTorch holds, by weights-only loading and nothing else."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserMistake(f"{path} cannot be read: {error.strerror}.") from None
    try:
        archive = _is_archive(path)
        if archive:
            _compare_sums(path)
        with _quiet():
            # Files of before 2020 are no zip archives, and cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except pickle.UnpicklingError as error:
        if wanted := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserMistake(
                f"{path} holds more than tensors: loading it would run {wanted[1]}, and shoal runs nothing that a file "
                "asks for; save the bare state dict where the file was made, with "
                "torch.save(model.state_dict(), FILE), and import that."
            ) from None
        raise _damaged(path, error) from None
    except Exception as error:  # a damaged file makes the unpickler fail in any way there is
        raise _damaged(path, error) from None


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # its table at the end is there, and damaged
        return False


def _compare_sums(path: Path) -> None:
    """torch.save writes a checksum for each tensor, and torch.load looks at none of them: a wrong weight is silent."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.CRC:  # 0 where whoever saved it turned checksums off
                with archive.open(entry) as file:
                    while file.read(CHUNK):  # the end of it raises BadZipFile where the sum is another
                        pass


@contextmanager
def _quiet() -> Iterator[None]:
    """torch also warns of what it refuses, and of DTensors, which are refused here: one sentence is enough."""
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
        return UserMistake(
            f"{path} is cut short: the archive's table, at its end, is missing or damaged; copy it again."
        )
    if "TorchScript" in str(error):
        return UserMistake(f"{path} is a TorchScript program, not a file of weights; save the model's state dict.")
    # The first instruction of such a file, which torch.save does not write unless it is told to.
    if f"operand {pickle.FRAME[0]}" in str(error):
        return UserMistake(
            f"{path} is pickled by protocol 4 or newer (LitGPT's converters before 0.5.8 did so), which weights-only "
            "loading does not read; where it was made, load it and save its state dict again with torch.save."
        )
    # torch says at length how to load it all the same; what was wrong stands after this.
    reason = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    return UserMistake(
        f"{path} is damaged, or is no file that torch.save wrote "
        f"({type(error).__name__}: {reason.splitlines()[0].rstrip('.') if reason else 'nothing more is said'}); "
        "copy it again."
    )


def _files_of(folder: Path) -> list[Path]:
    """The files of a folder that hold its weights."""
    if (folder / LITGPT_FILE).is_file():
        return [folder / LITGPT_FILE]
    if (folder / "latest").is_file():
        return _files_of(_latest(folder))
    if (folder / DEEPSPEED_FILE).is_file():
        return [folder / DEEPSPEED_FILE]
    for file in sorted(folder.glob("zero_pp_rank_*_model_states.pt")):
        _refuse_parts(file)
    if (index := folder / f"{WHOLE}.index.json").is_file():
        return _files_in(index)
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if any(folder.glob("*.distcp")):
        raise UserMistake(
            f"{folder} is a checkpoint in parts (torch.distributed.checkpoint), whose index is a pickle; make one file "
            f"of it (python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE) and import that."
        )
    if any(folder.glob("model*.safetensors")):
        raise UserMistake(f"{folder} holds safetensors already; use it as it is, with model.from.")
    raise UserMistake(
        f"{folder} holds no {LITGPT_FILE}, {DEEPSPEED_FILE}, {WHOLE} or latest; if the weights are in another file, "
        "give that file."
    )


def _latest(folder: Path) -> Path:
    """The folder of DeepSpeed's newest checkpoint, which the file `latest` names."""
    tag = (folder / "latest").read_text(errors="replace").strip()
    if not tag or Path(tag).name != tag or not (folder / tag).is_dir():
        raise UserMistake(f"{folder / 'latest'} names {tag[:80]!r}, which is no folder there; give the one you mean.")
    if (folder / tag / "latest").exists():
        raise UserMistake(f"{folder / tag} holds a file latest, so it is no DeepSpeed checkpoint.")
    return folder / tag


def _files_in(index: Path) -> list[Path]:
    """The files that zero_to_fp32.py, or an older save_pretrained, divided the weights into."""
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserMistake(f"{index} is not an index of {WHOLE} files.") from None
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise UserMistake(f"{index} names {name}, which is not a file of that folder; copy it there.")
    if not names:
        raise UserMistake(f"{index} names no files.")
    return [index.parent / name for name in names]


def _refuse_parts(file: Path) -> None:
    """DeepSpeed's names of files tell which of them are parts of a model."""
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
                f"{folder} holds a model split by DeepSpeed's pipeline, layer by layer; "
                "gather it into one state dict where it was trained, and import that."
            )


def _consolidate(file: Path) -> UserMistake:
    return UserMistake(
        f"{file} is of a ZeRO-3 checkpoint, in which every rank holds a part of each parameter; put them together with "
        "the zero_to_fp32.py that DeepSpeed leaves beside the checkpoint (python zero_to_fp32.py FOLDER OUTPUT), and "
        "import OUTPUT."
    )


def _refuse_gathered_later(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """In a model file of ZeRO-3 parameters have their names, and no values. Buffers are whole."""
    empty = [name for name, tensor in tensors.items() if tensor.numel() == 0]
    if 2 * len(empty) > len(tensors):
        raise _consolidate(file)
    if empty:
        raise UserMistake(f"{file} holds {empty[0]} without values; save the whole state dict.")


def _state_of(file: Path, loaded: Any) -> tuple[Mapping[Any, Any], str]:
    """The state dict in what was loaded, and the key it was under."""
    inside = ""
    while isinstance(loaded, Mapping):
        if inside != "module" and "module" in loaded and loaded["module"] is None:
            raise UserMistake(f"{file} holds no weights (its module is None): a pipeline saves them layer by layer.")
        key = next((key for key in NESTS if isinstance(loaded.get(key), Mapping)), None)
        if key is None and any(isinstance(value, Tensor) for value in loaded.values()):
            return loaded, inside
        if key is None:
            found = ", ".join(str(key) for key in list(loaded)[:6]) or "nothing"
            raise UserMistake(
                f"{file} holds no state dict: neither tensors nor {', '.join(NESTS[:-1])} or {NESTS[-1]}, but {found}."
            )
        inside, loaded = key, loaded[key]
    raise UserMistake(f"{file} holds a {type(loaded).__name__}, where a state dict (names and tensors) is needed.")


def _named(file: Path, state: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The tensors under the model's own names for them."""
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        name = _unwrapped(str(key))
        if name.rpartition(".")[2] == EXTRA_STATE:
            continue  # what a module keeps of its own, such as scales for fp8: no weight
        if not isinstance(value, Tensor):
            raise UserMistake(f"{file} holds {key} as {type(value).__name__}, not as a tensor; save a bare state dict.")
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_quantized:
            kind = type(value).__name__ if value.layout is torch.strided else str(value.layout)
            raise UserMistake(
                f"{file} holds {key} as {kind}, not as a plain tensor: save the full state dict, neither sharded nor "
                "quantised."
            )
        if name in tensors:
            raise UserMistake(f"{file} holds {name} twice, once as {key}; save the state dict of one model.")
        tensors[name] = value.detach()
    return tensors


def _unwrapped(name: str) -> str:
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while len(parts) > 1 and parts[0] == "module":  # DDP's, and DeepSpeed's; further in it may be the model's own
        parts = parts[1:]
    return ".".join(parts)

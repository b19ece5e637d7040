"""Opens checkpoints whose tensors are spread over the files of several ranks: ZeRO 3 and DCP."""

from pathlib import Path

from shoal.convert.dcp import is_dcp, read_dcp
from shoal.convert.state_dicts import LITGPT, LITGPT_FILE, Foreign, is_litgpt, latest_folder, unwrapped_name
from shoal.convert.zero3 import is_zero3, read_zero3
from shoal.mistakes import UserMistake
from shoal.models.stored import Stored

ZERO_3, DCP = "DeepSpeed ZeRO 3", "DCP"
# Where Accelerate and the Trainer put the shards of the model.
INSIDE = "pytorch_model_fsdp_0"


def open_sharded(source: Path) -> Foreign | None:
    """Open `source` if it is such a checkpoint; None: it is another."""
    if not source.is_dir() or (source / LITGPT_FILE).is_file():
        return None
    folder = source / INSIDE if (source / INSIDE).is_dir() else source
    if (folder / "latest").is_file():
        folder = latest_folder(folder)
    if is_zero3(folder):
        kind, found = ZERO_3, read_zero3(folder)
    elif is_dcp(folder):
        kind, found = DCP, read_dcp(folder)
    else:
        return None
    stored: dict[str, Stored] = {}
    for name, one in found.items():
        plain = unwrapped_name(name)
        if plain in stored:
            raise UserMistake(f"{folder} holds {plain} twice, once as {name}; save the state of a single model.")
        stored[plain] = one
    if not stored:
        raise UserMistake(f"{folder} holds no tensors of a model.")
    place = folder.absolute()
    kind = LITGPT if is_litgpt(stored) else kind
    return Foreign(kind, folder, (place, place.parent), {}, stored=stored)

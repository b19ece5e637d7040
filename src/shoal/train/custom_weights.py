"""The weights of a custom loop in one safetensors file."""

from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.files import TEMPORARY, sync
from shoal.mistakes import UserMistake
from shoal.train.custom_job import CustomJob


def save_whole_weights(job: CustomJob, file: Path) -> None:
    """Write the unsharded weights by all names that the model has for them, so that its `load_state_dict` takes them.
    All ranks call it; rank 0 writes."""
    found: dict[str, Tensor] = {}
    for name, tensor in job.model.saved.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if job.ranks.first:
            found[name] = whole.detach().cpu().contiguous()
    problem = None
    if job.ranks.first:
        found |= {name: found[first].clone() for name, first in job.tied.items()}
        problem = _write(found, file)
    if job.ranks.largest(float(problem is not None)):
        raise UserMistake(problem or f"Rank 0 could not write {file}.")


def _write(found: dict[str, Tensor], file: Path) -> str | None:
    """Why it could not be written, if it could not."""
    from safetensors.torch import save_file

    partial = file.with_name(f".{file.name}{TEMPORARY}")
    try:
        save_file(found, partial)
        sync(partial)
        partial.replace(file)
        sync(file.parent)
    except Exception as error:  # safetensors has an exception of its own for what the system says
        partial.unlink(missing_ok=True)
        return f"The weights could not be written to {file}: {error}. Free space, or name another file."
    return None

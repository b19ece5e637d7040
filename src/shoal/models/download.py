"""Download a model or a dataset into the local Hugging Face cache. The only code that uses the network.

Separate from `hub.py`, which sets the Hugging Face library to offline mode: this module must be imported without it.
"""

from pathlib import Path

from shoal.mistakes import UserMistake

# Weights as safetensors, configs and tokenizers. Not pickles, nor weights for other frameworks.
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", "*.md"]


def download(name: str, *, dataset: bool = False) -> Path:
    """Download `name` (owner/name); returns its folder in the cache, where later runs find it by its id."""
    if name.count("/") != 1 or not all(name.split("/")):
        raise UserMistake(f"{name} is not an id of the Hugging Face hub; write owner/name.")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE:
        raise UserMistake("HF_HUB_OFFLINE is set, so nothing can be downloaded; unset it for this command.")
    try:
        found = snapshot_download(
            name, repo_type="dataset" if dataset else "model", allow_patterns=None if dataset else MODEL_FILES
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserMistake(
            f"{name} could not be downloaded ({reason}); is the id right, and is there a network?"
        ) from None
    return Path(found)

"""Download a model or a dataset from the Hugging Face Hub, or a package from pip's index. The only code that uses the
network.

Separate from `hub.py`, which sets the Hugging Face library to offline mode: this module must be imported without it.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shoal.catalogue.packaged_models import PACKAGED
from shoal.mistakes import UserMistake, shortened

# Weights as safetensors, configs and tokenizers. Not pickles, nor weights for other frameworks.
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", "*.md"]


class HubFailed(UserMistake):
    """The hub did not give the files, or must not be asked. The message is a sentence; `reason` is why, within one."""

    def __init__(self, sentence: str, reason: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def download(name: str, *, dataset: bool = False, folder: Path | None = None) -> Path:
    """Download `name` (owner/name) into the cache, where later runs find it by its id, or into `folder`; returns the
    folder."""
    if name.count("/") != 1 or not all(name.split("/")):
        raise UserMistake(
            f"{name} is not an id of the Hugging Face hub; write owner/name, or the name of a model that shoal knows: "
            f"{', '.join(PACKAGED)}."
        )
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE:
        raise HubFailed(
            "HF_HUB_OFFLINE is set, so nothing can be downloaded; unset it for this command.", "HF_HUB_OFFLINE is set"
        )
    try:
        found = snapshot_download(
            name,
            repo_type="dataset" if dataset else "model",
            allow_patterns=None if dataset else MODEL_FILES,
            local_dir=folder,
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise HubFailed(
            f"{name} could not be downloaded ({reason}); is the id right, and is there a network?", reason
        ) from None
    return Path(found)


def download_wheel(package: str, version: str, folder: Path, *, tick: Callable[[int], None]) -> Path:
    """Let pip download a wheel into `folder`, from the index that it is configured with. Nothing of it is run: it is
    not installed, and a package that would have to be built is refused. `tick` is called with the bytes so far."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"{package}=={version}"]
    # pip writes the file to its temporary folder first, where its size tells how far it is.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder), "PIP_NO_COLOR": "1"},
    ) as pip:
        while True:
            try:
                _, said = pip.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if done := _bytes_in(folder):
                    tick(done)
    wheel = next(folder.glob("*.whl"), None)
    if pip.returncode or wheel is None:
        raise UserMistake(
            f"pip could not download {package} {version} ({_reason(said)}); is there a network, or a package index "
            "that pip is configured with?"
        )
    return wheel


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(parent, name))
            except OSError:  # removed meanwhile
                continue
    return total


def _reason(said: str) -> str:
    """Why pip failed: its first error, or its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    chosen = errors[:1] or lines[-1:] or ["it did not say why"]
    return shortened(chosen[0].rstrip("."))

"""A user's mistake under torchrun: said once on each node, shown in torchrun's report, and not tried again.

torchrun starts all ranks again after any failure, `--max-restarts` times, and cannot be told that this is in vain. Each
rank would read the same file and say the same sentence each time. So the first rank of a node that finds a mistake
leaves it in the folder that torchrun has made for the launch on this node, and ranks that are started again end at
once, before they import torch.
"""

import json
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# Where torchrun looks for the error of a worker: LOGS/RUN/attempt_0/LOCAL_RANK/error.json.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def is_new(sentence: str, environment: Mapping[str, str]) -> bool:
    """Whether no other rank of this node has said this in this launch; from now on one has. torchrun's report shows
    it as the cause."""
    if (folder := _launch_folder(environment)) is None:
        return True
    _write_error(sentence, environment)
    if environment.get("TORCHELASTIC_RESTART_COUNT") == "0":
        with suppress(OSError):
            _marker(folder, environment).write_text(sentence)
    try:
        (folder / f"shoal-said-{zlib.crc32(sentence.encode(errors='replace')):08x}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def ends_again(environment: Mapping[str, str]) -> bool:
    """Whether the first ranks of this launch have found a mistake, which this one would only find again."""
    if environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" or (folder := _launch_folder(environment)) is None:
        return False
    try:
        sentence = _marker(folder, environment).read_text()
    except OSError:
        return False
    _write_error(sentence, environment)
    return True


def _launch_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder of this launch on this node; None if this is no worker of torchrun."""
    file = environment.get(ERROR_FILE, "")
    attempt = Path(file).parent.parent
    return attempt.parent if file and attempt.name.startswith("attempt_") and attempt.parent.is_dir() else None


def _marker(folder: Path, environment: Mapping[str, str]) -> Path:
    # On another number of nodes it may be none.
    return folder / f"shoal-mistake-of-{environment.get('WORLD_SIZE', '1')}"


def _write_error(sentence: str, environment: Mapping[str, str]) -> None:
    """In the format of torch.distributed.elastic, which this process has no time to import."""
    error = {"message": {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with suppress(OSError):
        temporary = Path(f"{environment[ERROR_FILE]}.{os.getpid()}")
        temporary.write_text(json.dumps(error))
        temporary.replace(environment[ERROR_FILE])

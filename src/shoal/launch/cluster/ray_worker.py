"""A worker of Ray Train: it runs one rank of a run as a process of its own.

Ray calls `train` in a thread, where no signal can be handled, and has made a process group. The rank makes its own.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.resilience.signals import STOPPED_FILE


def train(settings: Mapping[str, Any]) -> None:
    """Run the rank until it ends. `settings`: its command, its working folder, and variables of its environment."""
    environment = {**os.environ, **settings["environment"], "MASTER_PORT": str(_agree_on_port())}
    # Where Ray has found its libraries, if not in the environment of Python.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    stopped = Path(environment[STOPPED_FILE])
    if dist.get_rank() == 0:
        stopped.unlink(missing_ok=True)
    dist.barrier()
    dist.destroy_process_group()
    process = subprocess.Popen(settings["command"], cwd=settings["folder"], env=environment)
    try:
        status = process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    if status != 0:
        raise RuntimeError(f"shoal train ended with status {status}; its output says why")
    if stopped.exists():
        raise RuntimeError("the run was stopped early, with a complete checkpoint; it is to be started again")


def _agree_on_port() -> int:
    """A free port of the first worker's node, where the ranks meet."""
    port = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port[0] = free.getsockname()[1]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    shared = port.to(device)
    dist.broadcast(shared, 0)
    return int(shared.item())

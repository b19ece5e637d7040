"""What is examined: the run directory, the number of devices and nodes, and facts that several checks share."""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shoal.config.schema import Config
from shoal.launch.doctor.nvidia import DriverReport, read_driver
from shoal.launch.doctor.probe import TorchReport, ask_torch


@dataclass(frozen=True)
class Setting:
    """The run directory, which need not exist, and what the run would use of this node."""

    folder: Path
    config: Config | None = None
    processes: int | None = None  # as asked for with --devices
    addresses: tuple[str, ...] = ()  # HOST:PORT that have to be reachable

    @cached_property
    def driver(self) -> DriverReport:
        return read_driver()

    @cached_property
    def torch(self) -> TorchReport:
        return ask_torch()

    @property
    def devices(self) -> int:
        """Processes of the run on this node."""
        if self.processes is not None:
            return self.processes
        if self.config is not None and self.config.hardware.devices != "auto":
            return self.config.hardware.devices
        if "LOCAL_WORLD_SIZE" in os.environ:
            return int(os.environ["LOCAL_WORLD_SIZE"])
        return max(1, len(self.driver.gpus))

    @property
    def group(self) -> int:
        """Processes to start for the checks of a group: those that were asked for, by --devices or by the config."""
        return self.devices if self.processes is not None or self.config is not None else 1

    @property
    def nodes(self) -> int:
        """Nodes of the run."""
        if "WORLD_SIZE" in os.environ:
            return max(1, int(os.environ["WORLD_SIZE"]) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        return 1 if self.config is None else self.config.hardware.nodes

    @property
    def existing_folder(self) -> Path:
        """The run directory, or the nearest folder above it that exists."""
        folder = self.folder.absolute()
        while not folder.is_dir():
            folder = folder.parent
        return folder

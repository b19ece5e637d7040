"""Measures collectives: in processes started here, or as one rank of a launched job."""

import os
from pathlib import Path

import torch

from shoal.bench.collectives_measure import measure
from shoal.bench.collectives_plot import plot
from shoal.bench.collectives_report import CollectivesReport, Measured
from shoal.bench.collectives_request import Request
from shoal.bench.output import make_folder, write_report
from shoal.bench.sizes import show_size
from shoal.catalogue.gpus import Link
from shoal.launch.join import (
    check_processes,
    cuda_devices,
    first_device,
    is_first,
    joined_within,
    started_by_others,
)
from shoal.launch.processes import run_processes
from shoal.mistakes import RunFailed, UserMistake
from shoal.observe.progress import Reporter

LARGEST_ON_CUDA, LARGEST_ON_CPU = 256 * 2**20, 64 * 2**20
# Timeout of a collective in seconds: long enough for a slow link, so it means that a link is down.
HANG_TIMEOUT = 300
# Memory as a multiple of the tensor's size: the full tensor, a chunk, and the expected values.
BUFFERS = 4


def measure_collectives(
    request: Request, *, devices: int | None = None, link: Link | None = None, output: Path | None = None
) -> CollectivesReport:
    """Measure collectives and return the same report on all ranks; rank 0 writes it to `output`."""
    reporter = Reporter(enabled=is_first())
    if output is not None and is_first():
        make_folder(output)  # fail before measuring, not after
    if started_by_others():
        if devices is not None:
            reporter.warn("--devices has no effect: the processes are already running.")
        measured = measure_as_rank(request)
    else:
        measured = _measure_in_processes(request, _processes(devices), reporter)
    report = CollectivesReport(measured, link)
    if output is not None and is_first():
        for note in write_report(report.as_dict(), output, lambda: plot(report)):
            reporter.warn(note)
    return report


def measure_as_rank(request: Request) -> Measured:
    """Join the process group and measure."""
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        raise UserMistake("Collectives need at least two processes; start two or more.")
    largest = _largest(request, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with joined_within(HANG_TIMEOUT) as ranks:
        return measure(request, largest, ranks, Reporter(enabled=ranks.first))


def _measure_in_processes(request: Request, processes: int, reporter: Reporter) -> Measured:
    _largest(request, processes)  # report a mistake before starting processes
    reporter.say(f"Starting {processes} processes …")
    found = run_processes("shoal.bench.collectives_worker", [request.to_text()], processes)
    if found is None:
        raise RunFailed("Interrupted before all measurements were done.")
    return Measured.from_dict(found)


def _processes(devices: int | None) -> int:
    present = cuda_devices()
    if devices is None and present != 1:
        return present or 2
    if devices is None or devices == 1:
        too_few = "Collectives need at least two processes"
        if present == 1:
            raise UserMistake(
                f"{too_few}, and this node has one CUDA device; for two processes on the CPU use "
                "CUDA_VISIBLE_DEVICES= shoal bench collectives --devices 2."
            )
        raise UserMistake(f"{too_few}; use --devices 2.")
    if devices < 1:
        raise UserMistake(f"--devices is {devices}, but must be at least 2.")
    return check_processes(devices, "--devices")


def _largest(request: Request, processes_here: int) -> int:
    """The largest size to measure; a UserMistake if memory is too small for it."""
    device = first_device()
    if device.type == "cuda":
        largest = request.largest or LARGEST_ON_CUDA
        room, where = torch.cuda.get_device_properties(device).total_memory, "a GPU"
    else:
        largest = request.largest or LARGEST_ON_CPU
        room, where = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this node"
        room //= processes_here
    if largest * BUFFERS > room:
        raise UserMistake(
            f"--largest is {show_size(largest)}, which needs {show_size(largest * BUFFERS)} per process, but {where} "
            f"has {show_size(room)} per process; give at most {show_size(room // BUFFERS)}."
        )
    return largest

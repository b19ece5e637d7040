"""How many tokens per second the loader of one rank delivers: packed sequences, memory-mapped, in the page cache.

    python benchmarks/data/loader_speed.py --output benchmarks/data/loader_speed.json

Wall time depends on what else the machine does, so the CPU time of the process is reported too.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.data import Order, Summary
from shoal.data.loader import batches
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN, Sequences, open_sequences, write_array, write_summary

GLOBAL_BATCH, MICRO_BATCH = 64, 8


def write_sequences(folder: Path, count: int, length: int, *, separate: bool) -> Sequences:
    """Full sequences of about eight documents each, as best-fit packing makes them."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50_000, count * (length + 1)).astype(np.uint16)
    flags = (random.random(len(tokens)) < 0.6).astype(np.uint8) * np.uint8(LOSS_TOKEN)
    flags[random.random(len(tokens)) < 8 / length] = DOCUMENT
    flags[:: length + 1] = DOCUMENT
    starts = np.arange(count) * (length + 1)
    loss_tokens = (flags.reshape(count, length + 1)[:, 1:] & LOSS_TOKEN).sum(axis=1).astype(np.int32)
    arrays = {"tokens": tokens, "flags": flags, "starts": starts, "ends": starts + length + 1}
    for name, values in {**arrays, "loss_tokens": loss_tokens}.items():
        write_array(folder / f"{name}.npy", values)
    documents = int(np.count_nonzero(flags & DOCUMENT))
    write_summary(
        folder,
        Summary(
            "alpaca", not separate, separate, documents, len(tokens), count, length, int(loss_tokens.sum()), 0.6, ""
        ),
    )
    return open_sequences(folder)


def measure(sequences: Sequences, length: int, workers: int, steps: int, repeat: int) -> dict[str, Any]:
    order = Order(len(sequences), seed=1)
    stream = batches(
        sequences,
        order,
        first_step=0,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        rank=0,
        ranks=1,
        pad=0,
        workers=workers,
    )
    walls, work = [], []
    for _ in islice(stream, 5):  # threads start, pages are read
        pass
    for _ in range(repeat):
        began, used = time.perf_counter(), time.process_time()
        for _ in islice(stream, steps):
            pass
        walls.append(steps * GLOBAL_BATCH * length / (time.perf_counter() - began))
        work.append(steps * GLOBAL_BATCH * length / (time.process_time() - used))
    stream.close()
    return {
        "workers": workers,
        "tokens_per_second": round(statistics.median(walls)),
        "best_tokens_per_second": round(max(walls)),
        "tokens_per_cpu_second": round(statistics.median(work)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sequences", type=int, default=4000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),  # of other processes too
            "numpy": np.__version__,
            "torch": torch.__version__,
        },
        "length": given.length,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "packed_documents": [],
        "stream": [],
    }
    for name, separate in (("packed_documents", True), ("stream", False)):
        with tempfile.TemporaryDirectory() as folder:
            sequences = write_sequences(Path(folder), given.sequences, given.length, separate=separate)
            for workers in (0, 1, 2, 4):
                result = measure(sequences, given.length, workers, given.steps, given.repeat)
                found[name].append(result)
                print(name, result)
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

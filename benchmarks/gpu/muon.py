"""Muon's orthogonalization of matrices one by one and in batches: the same bits, and how long each takes.

    python benchmarks/gpu/muon.py FOLDER [--tiny]

Writes FOLDER/muon.json. `--tiny`: on a CPU, to see that it runs.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.catalogue.optimizers import orthogonalized_together
from shoal.optim.muon import orthogonalize

# Of SmolLM2-360M, GPT-2, Llama-3.2-1B and Llama-3.1-8B.
SHAPES = [(960, 960), (320, 960), (2560, 960), (768, 768), (3072, 768), (2048, 2048), (8192, 2048), (14336, 4096)]
MATRICES = 32


def milliseconds(step: Callable[[], object], times: int = 10) -> float:
    """Of a call, with the host: the mean after two others."""
    step()
    step()
    _wait()
    began = time.perf_counter()
    for _ in range(times):
        step()
    _wait()
    return 1e3 * (time.perf_counter() - began) / times


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(rows: int, columns: int) -> dict[str, object]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrices = torch.randn(MATRICES, rows, columns, device=device).bfloat16()
    together = min(MATRICES, orthogonalized_together(rows * columns))

    def one_by_one() -> torch.Tensor:
        return torch.cat([orthogonalize(one) for one in matrices.split(1)])

    def in_batches() -> torch.Tensor:
        return torch.cat([orthogonalize(some) for some in matrices.split(together)])

    return {
        "shape": [rows, columns],
        "matrices": MATRICES,
        "together": together,
        "equal": torch.equal(one_by_one(), in_batches()),
        "one_by_one_ms": round(milliseconds(one_by_one), 2),
        "in_batches_ms": round(milliseconds(in_batches), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Muon's orthogonalization one by one and in batches.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="two small shapes, as on a CPU")
    arguments = parser.parse_args()
    found = []
    for rows, columns in [(33, 70), (64, 16)] if arguments.tiny else SHAPES:
        found.append(measure(rows, columns))
        print(json.dumps(found[-1]), flush=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    written = {"device": device, "torch": torch.__version__, "shapes": found}
    (arguments.folder / "muon.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()

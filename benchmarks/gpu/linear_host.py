"""The host time of a linear layer's forward pass, as NVIDIA/TransformerEngine's issue 2053 gives it for three hosts.

`python benchmarks/gpu/linear_host.py OUTPUT_FOLDER`: a bf16 layer of 2,048 inputs and outputs, 50 passes between two
synchronizations, so that the queue of launches never fills. Writes linear_host.json: microseconds per pass, repeat by
repeat, with and without a graph of autograd.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

SIZE, TOKENS, PASSES, REPEATS = 2048, 8192, 50, 200


def measure(layer: torch.nn.Module, inputs: torch.Tensor, device: str) -> list[float]:
    """Microseconds of host time per forward pass, repeat by repeat."""
    found = []
    for _ in range(REPEATS):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(PASSES):
            layer(inputs)
        found.append((time.perf_counter() - began) / PASSES * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = TOKENS if device == "cuda" else 8
    layer = torch.nn.Linear(SIZE, SIZE, bias=False, device=device, dtype=torch.bfloat16)
    inputs = torch.randn(tokens, SIZE, device=device, dtype=torch.bfloat16)
    measure(layer, inputs, device)
    processor = next((line for line in cpu_lines() if line.startswith("model name")), platform.processor())
    record = {"host": processor.partition(":")[2].strip() or processor, "torch": torch.__version__}
    for name, context in (("training", torch.enable_grad), ("inference", torch.no_grad)):
        with context():
            repeats = sorted(measure(layer, inputs, device))
        record[name] = {
            "median_us": round(statistics.median(repeats), 2),
            "p10_us": round(repeats[len(repeats) // 10], 2),
            "p90_us": round(repeats[-len(repeats) // 10], 2),
        }
    output.mkdir(parents=True, exist_ok=True)
    (output / "linear_host.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


def cpu_lines() -> list[str]:
    """What the kernel says of the host's processors."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main()

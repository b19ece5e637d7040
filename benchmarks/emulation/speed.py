"""Cost of low precision on a CPU: the README's first example in every precision, with emulated and torch's matmuls.

usage: python benchmarks/emulation/speed.py OUTPUT.json [REPEATS]

Cases alternate, and the fastest median step of each counts: on a shared machine only ratios within one run are
comparable. `native` is without emulation, also on a CPU without the instructions. `capped`
limits oneDNN to the instruction set of an older processor.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from shoal import api

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "fp8")
SHAPES = {
    "README's example, hidden 128, 4 layers": {"hidden": 128, "layers": 4, "heads": 4},
    "the tests' Llama, hidden 32, 2 layers": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 96},
}
CAPPED = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
CASES: dict[str, dict[str, str]] = {
    **{precision: {"SHOAL_MATMULS": "emulated"} for precision in PRECISIONS},
    "bf16-mixed, native": {"SHOAL_MATMULS": "native"},
    "bf16-mixed, native, capped": {"SHOAL_MATMULS": "native", **CAPPED},
    "bf16-mixed, as measured, capped": CAPPED,
}


def measure(case: str, shape: dict[str, Any], text: Path) -> dict[str, Any]:
    config = api.config_from_mapping(
        {
            "name": "emulation",
            "model": {"shape": {"family": "llama", "vocab": 260, "positions": 256, **shape}, "tokenizer": "bytes"},
            "data": {"source": "text", "path": str(text), "max_length": 256},
            "train": {"global_batch": 16, "lr": 4e-3, "precision": case.partition(",")[0]},
        }
    )
    before = dict(os.environ)
    os.environ.update(CASES[case], OMP_NUM_THREADS="1")  # threads wait for each other on a shared machine
    try:
        found = api.bench_train(config, steps=2 if "native" in case else 8, warmup=1 if "native" in case else 3)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return {"step_seconds": found.step_seconds, "tokens_per_second": found.tokens_per_second, "machine": found.machine}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("repeats", type=int, nargs="?", default=2)
    args = parser.parse_args()
    text = Path(tempfile.mkdtemp()) / "argparse.txt"
    text.write_text(Path(argparse.__file__).read_text())
    report: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        fastest: dict[str, dict[str, Any]] = {}
        for repeat in range(args.repeats):
            for case in CASES:
                if "native" in case and repeat:
                    continue
                found = measure(case, shape, text)
                report["machine"] = found.pop("machine")
                if case not in fastest or found["step_seconds"] < fastest[case]["step_seconds"]:
                    fastest[case] = found
                print(f"{name}: {case}: {found['step_seconds'] * 1e3:.1f} ms", file=sys.stderr, flush=True)
        exact = fastest["32-true"]["step_seconds"]
        report[name] = {
            case: {**found, "times_32_true": round(found["step_seconds"] / exact, 2)} for case, found in fastest.items()
        }
    args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

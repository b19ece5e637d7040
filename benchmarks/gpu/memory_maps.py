"""Where PyTorch's allocator reserves more than is allocated: the memory that runs of the sweep map, in order.

`python benchmarks/gpu/memory_maps.py OUTPUT_FOLDER ROW...`: trains five steps of each row of `sweeps/rows.py` with the
allocator's history, and writes memory_maps.json: for every mapping of at least 24 MiB the step, what was mapped and
allocated by then, the tensor that it was for, and the free blocks of at least 8 MiB that this tensor did not fit.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE)]

import torch  # noqa: E402
from peers.sequences import text_data  # noqa: E402
from sweeps.folders import FOLDERS, with_weights  # noqa: E402
from sweeps.forecast import make_config  # noqa: E402
from sweeps.rows import ROWS, SEED, Row  # noqa: E402
from sweeps.worker import clean  # noqa: E402

from shoal.bench.steps import only_measuring  # noqa: E402
from shoal.launch.run import start  # noqa: E402
from shoal.train.hooks import Hook, StepEnd  # noqa: E402

STEPS, ENTRIES = 5, 3_000_000
MIB = 2**20
SMALLEST, SMALLEST_FREE = 24 * MIB, 8 * MIB


class Ends(Hook):
    """How many events the allocator's history had at the end of each step."""

    def __init__(self) -> None:
        self.events: list[int] = []

    def on_step_end(self, end: StepEnd) -> None:
        self.events.append(len(torch.cuda.memory._snapshot()["device_traces"][0]))


def train(row: Row, work: Path) -> list[int]:
    """The events by which each step of a row ended."""
    values, ends = row.values(), Ends()
    data = text_data(work, values["data.max_length"])
    more = {"seed": SEED, "train.schedule.name": "constant", "train.schedule.warmup": 0}
    more |= {f"data.{key}": value for key, value in data.items()}
    if row.shape in FOLDERS:
        more["model.from"] = str(with_weights(row.shape, work / row.shape, tiny=False))
    start(only_measuring(make_config(values, **more), STEPS), runs=work / "runs", hooks=[ends])
    return ends.events


def free_blocks(mapped: list[tuple[int, int]], used: dict[int, int]) -> list[float]:
    """MiB of the free blocks that are not small, from low to high addresses."""
    spans: list[list[int]] = []
    for begin, end in sorted(mapped):
        if spans and begin <= spans[-1][1]:
            spans[-1][1] = max(end, spans[-1][1])
        else:
            spans.append([begin, end])
    found: list[int] = []
    for low, high in spans:
        at = low
        for begin in sorted(one for one in used if low <= one < high):
            found.append(begin - at)
            at = max(at, begin + used[begin])
        found.append(high - at)
    return [round(one / MIB, 1) for one in found if one >= SMALLEST_FREE]


def mappings(trace: list[dict[str, Any]], ends: list[int]) -> list[dict[str, Any]]:
    """The mappings that are not small, each with the tensor that it was for."""
    spans: dict[int, list[tuple[int, int]]] = {}  # mapped for each stream
    used: dict[int, int] = {}
    mapped = allocated = 0
    found: list[dict[str, Any]] = []
    waiting: dict[str, Any] | None = None
    for index, event in enumerate(trace):
        size, mine = event["size"], spans.setdefault(event["stream"], [])
        if event["action"] == "alloc":
            if waiting is not None:
                found.append({**waiting, "for_mib": round(size / MIB, 1)})
                waiting = None
            used[event["addr"]] = size
            allocated += size
        elif event["action"] == "free_completed":
            allocated -= used.pop(event["addr"], 0)
        elif event["action"] in ("segment_map", "segment_alloc"):
            if size >= SMALLEST:
                waiting = {
                    "step": sum(end <= index for end in ends),
                    "mapped_gib": round((mapped + size) / 2**30, 3),
                    "allocated_gib": round(allocated / 2**30, 3),
                    "free_mib": free_blocks(mine, used),
                }
            mapped += size
            mine.append((event["addr"], event["addr"] + size))
        elif event["action"] in ("segment_unmap", "segment_free"):
            mapped -= size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("rows", nargs="+", choices=[row.name for row in ROWS], metavar="ROW")
    arguments = parser.parse_args()
    by_name, records = {row.name: row for row in ROWS}, []
    for name in arguments.rows:
        clean()
        torch.cuda.memory._record_memory_history(context=None, max_entries=ENTRIES)
        with tempfile.TemporaryDirectory() as folder:
            ends = train(by_name[name], Path(folder))
        found = mappings(torch.cuda.memory._snapshot()["device_traces"][0], ends)
        torch.cuda.memory._record_memory_history(enabled=None)
        records.append({"row": name, "mappings": found})
        last = found[-1]
        print(name, last["mapped_gib"], last["allocated_gib"], last["for_mib"], last["free_mib"], flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    (arguments.output / "memory_maps.json").write_text(json.dumps({**machine, "rows": records}) + "\n")


if __name__ == "__main__":
    main()

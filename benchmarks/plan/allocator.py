"""What PyTorch's caching allocator reserves beyond what is allocated: if sequences have varied lengths, and in the runs
of Hugging Face's Trainer that were measured on an H200.

    python benchmarks/plan/allocator.py

Both are replays of `shoal/plan/memory/fragmentation.py`. With varied lengths, the steps are those of LoRA runs of
Hugging Face's models with sequences whose lengths are log-normal around a share of the limit. Writes
`allocator.md`: the constants of `shoal/plan/memory/forecast.py`.
"""

import json
import math
import random
import statistics
import sys
from pathlib import Path

from shoal.catalogue.gpus import GPUS, LINKS
from shoal.catalogue.shapes import NAMED
from shoal.plan.memory.fragmentation import fragmented, replay
from shoal.plan.run.run import FROZEN, Adapter, Run
from shoal.plan.systems.modelled import SYSTEMS
from shoal.plan.terms import GIB

HERE = Path(__file__).parent
STEPS, SEEDS, LIMIT, SIGMA, MULTIPLE = 40, 10, 2048, 0.6, 32
MODELS = ("llama2-7b", "llama3-8b")
MEASURED = HERE.parent / "gpu" / "trainer_h200" / "trainer.jsonl"


def lengths(share: float, seed: int, sequences: int) -> list[int]:
    """Of the longest of some sequences, in every step."""
    drawn = random.Random(seed)
    found = [share * LIMIT * math.exp(max(drawn.gauss(0, SIGMA) for _ in range(sequences))) for _ in range(STEPS)]
    return [max(MULTIPLE, min(LIMIT, int(one) // MULTIPLE * MULTIPLE)) for one in found]


def varied(model: str, recompute: str, sequences: int = 1) -> tuple[float, float]:
    """(bytes per logit of the longest sequence, share of all that a step needs for a time)."""
    gpu = GPUS["a100-80gb"]
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    run = Run(
        NAMED[model],
        gpu,
        LINKS[gpu.link],
        LINKS[gpu.link],
        LIMIT,
        micro_batch=sequences,
        precision="bf16-true",
        recompute=recompute,
        compiled=False,
        loss="plain",
        adapter=Adapter(8, targets),
        trained=FROZEN,
        traits=SYSTEMS["axolotl"],
    )
    weights = replay(run, []).allocated
    found = []
    for share in (0.25, 0.5):
        for seed in range(SEEDS):
            drawn = lengths(share, seed, sequences)
            memory = replay(run, drawn)
            beyond = memory.reserved - memory.peak
            found.append((beyond / (sequences * max(drawn) * run.shape.vocab), beyond / (memory.peak - weights)))
    return statistics.mean(one for one, _ in found), statistics.mean(one for _, one in found)


def main() -> None:
    text = [
        "# Reserved memory with sequences of varied length",
        "",
        f"Made by `benchmarks/plan/allocator.py`: means over {2 * SEEDS} runs of {STEPS} steps. What the allocator",
        "reserves beyond the peak of allocated memory: in bytes per logit of the longest micro-batch, and in parts of",
        "what a step needs for a time.",
        "",
        "| model | micro-batch | recompute | bytes per logit | of what a step needs |",
        "| --- | --- | --- | --- | --- |",
    ]
    for model in MODELS:
        for recompute, sequences in (("full", 1), ("none", 1), ("full", 16)):
            logits, share = varied(model, recompute, sequences)
            text.append(f"| {model} | {sequences} | {recompute} | {logits:.1f} | {share:.2f} |")
            print(text[-1], flush=True)
    sys.path.insert(0, str(HERE.parent))
    from plan_published import read_measured

    text += [
        "",
        "# Reserved memory of the Trainer",
        "",
        "GiB that are reserved beyond the peak of allocated memory: measured on an H200, and replayed.",
        "",
        "| run | allocated | measured beyond | replayed beyond |",
        "| --- | --- | --- | --- |",
    ]
    for row, line in zip(read_measured(MEASURED), MEASURED.read_text().splitlines(), strict=True):
        assert row.run is not None
        assert row.gib is not None
        allocated = json.loads(line)["allocated_gib"]
        replayed = fragmented(row.run) / GIB
        text.append(f"| {row.label} | {allocated:.2f} | {row.gib - allocated:.2f} | {replayed:.2f} |")
        print(text[-1], flush=True)
    (HERE / "allocator.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()

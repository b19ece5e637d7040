"""Worked examples of memory and scaling from guides, with the forecast of the same runs.

python benchmarks/plan_examples.py [OUTPUT_FOLDER]        (default: benchmarks/plan)
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from shoal import api
from shoal.plan.resolved import ResolvedRun
from shoal.plan.terms import GIB

HERE = Path(__file__).parent
GB = 1e9


@dataclass(frozen=True)
class Example:
    """A run as a guide describes it, what the guide says of it, and why the forecast differs."""

    what: str
    theirs: str
    why: str
    settings: tuple[str, ...]


EXAMPLES = (
    Example(
        "Pythia-1B, FSDP on 2 × L40, 16 sequences of 512 per device",
        "8.45 GiB steady, 9.3–10.2 at the peak",
        "They count half of 16 bytes per parameter and 1 GiB of activations. At the peak there are no gradients yet, "
        "but the activations of 16 blocks and 8,192 tokens are many times 1 GiB, plus the logits.",
        ("model.shape=pythia-1b", "hardware.gpu=l40", "hardware.devices=2", "parallel.strategy=fsdp",
         "train.micro_batch=16", "train.global_batch=32", "data.max_length=512"),
    ),
    Example(
        "TinyLlama-1.1B, one device, 8 sequences of 2,048",
        "16 GB without FSDP",
        "They count fp32 weights, gradients and Adam, and no activations. Ours has bf16 compute copies, and "
        "the activations of 16,384 tokens.",
        ("model.shape=tinyllama-1.1b", "hardware.gpu=a100-80gb", "parallel.strategy=single", "train.micro_batch=8",
         "train.global_batch=64"),
    ),
    Example(
        "TinyLlama-1.1B, FSDP on 8 devices, 8 sequences of 2,048",
        "2 GB",
        "Sharding divides only weights, gradients and optimizer state by 8, not activations and logits.",
        ("model.shape=tinyllama-1.1b", "hardware.gpu=a100-80gb", "hardware.devices=8", "parallel.strategy=fsdp",
         "train.micro_batch=8", "train.global_batch=512"),
    ),
    Example(
        "Llama-2-7B, FSDP on 4 nodes of 8, 2 sequences of 2,048",
        "3.5 GB",
        "As above: 112 GB / 32 are the sharded states, a tenth of what a device needs.",
        ("model.shape=llama2-7b", "hardware.gpu=a100-80gb", "hardware.devices=8", "hardware.nodes=4",
         "parallel.strategy=fsdp", "train.micro_batch=2", "train.global_batch=1024"),
    ),
    Example(
        "Llama-2-7B LoRA r8, FSDP on 4 × A100-40GB, 4 sequences of 2,048",
        "about 20 GB, about 5 samples/s",
        "Without activation checkpointing the activations of 8,192 tokens alone are more than that. Alpaca's sequences "
        "are far shorter than 2,048: see the next row.",
        ("model.shape=llama2-7b", "hardware.gpu=a100-40gb", "hardware.devices=4", "parallel.strategy=fsdp",
         "adapter.kind=lora", "train.micro_batch=4", "train.global_batch=64"),
    ),
    Example(
        "the same, with sequences of 300 tokens, as in Alpaca",
        "about 20 GB, about 5 samples/s",
        "The longest sequence of a micro-batch decides its memory, and theirs vary: 20 GB lie between the two. Sizes "
        "do not explain their low speed.",
        ("model.shape=llama2-7b", "hardware.gpu=a100-40gb", "hardware.devices=4", "parallel.strategy=fsdp",
         "adapter.kind=lora", "train.micro_batch=4", "train.global_batch=64", "data.max_length=300"),
    ),
    Example(
        "Llama-2-70B LoRA r8, FSDP on 8 × A100-80GB, 1 sequence of 2,048",
        "about 70 GB, about 1 sample/s",
        "An eighth of 138 GB of weights, and the activations of 80 blocks without activation checkpointing.",
        ("model.shape=llama2-70b", "hardware.gpu=a100-80gb", "hardware.devices=8", "parallel.strategy=fsdp",
         "adapter.kind=lora", "train.micro_batch=1", "train.global_batch=32"),
    ),
    Example(
        "Llama-3.1-405B LoRA r16, FSDP on 8 nodes of 8 × H100, 1 sequence of 4,096",
        "about 60 GB",
        "They shard within each node, which would leave 101 GB of weights on a device; over all 64 it is 13 GB. "
        "Gathered blocks, embedding and head are most of the rest, with full activation checkpointing.",
        ("model.shape=llama3.1-405b", "hardware.gpu=h100-80gb", "hardware.devices=8", "hardware.nodes=8",
         "parallel.strategy=fsdp", "adapter.kind=lora", "adapter.rank=16", "train.micro_batch=1",
         "train.global_batch=128", "data.max_length=4096", "train.recompute=full"),
    ),
    Example(
        "7B full, one device, 1 sequence of 2,048",
        "140+ GB",
        "18 bytes per parameter are 121 GB, plus the activations of one sequence.",
        ("model.shape=llama2-7b", "hardware.gpu=h200", "parallel.strategy=single", "train.micro_batch=1",
         "train.global_batch=8"),
    ),
    Example(
        "7B full, FSDP on 8 devices, 1 sequence of 2,048",
        "about 25 GB",
        "13.5 GB are the eighth of 16 bytes per parameter; the rest are one sequence's activations. They do not state "
        "the number of devices or the batch.",
        ("model.shape=llama2-7b", "hardware.gpu=a100-80gb", "hardware.devices=8", "parallel.strategy=fsdp",
         "train.micro_batch=1", "train.global_batch=64"),
    ),
    Example(
        "7B full, ZeRO-3 on 8 devices, 1 sequence of 2,048, recompute full",
        "about 20 GB",
        "zero3 is fsdp here; with full activation checkpointing only the input of each block is saved.",
        ("model.shape=llama2-7b", "hardware.gpu=a100-80gb", "hardware.devices=8", "parallel.strategy=zero3",
         "train.micro_batch=1", "train.global_batch=64", "train.recompute=full"),
    ),
    Example(
        "the same, with everything offloaded",
        "about 8 GB",
        "Weights, gradients and optimizer state are in host memory; gathered blocks, the head and one block's "
        "activations remain.",
        ("model.shape=llama2-7b", "hardware.gpu=a100-80gb", "hardware.devices=8", "parallel.strategy=fsdp",
         "train.micro_batch=1", "train.global_batch=64", "train.recompute=full", "parallel.offload=cpu"),
    ),
)  # fmt: skip

SCALING = {1: (1.0, 1.0), 2: (1.95, 1.9), 4: (3.8, 3.7), 8: (7.5, 7.2), 16: (14.5, 13.8), 32: (28.0, 26.0)}


def plan_of(settings: tuple[str, ...]) -> ResolvedRun:
    return api.plan(api.load_config(None, settings, planned=True)).choice


def example_rows() -> list[str]:
    lines = ["| run | theirs | ours | why they differ |", "| --- | --- | --- | --- |"]
    for one in EXAMPLES:
        choice = plan_of(one.settings)
        worst, speed = choice.memory.worst, choice.speed
        samples = speed.tokens_per_second_per_gpu * speed.world_size / choice.run.length
        ours = (
            f"{worst.allocated / GIB:.1f} GiB allocated ({worst.allocated / GB:.0f} GB), {worst.reserved / GIB:.1f} "
            f"reserved; {samples:.1f} samples/s"
        )
        lines.append(f"| {one.what} | {one.theirs} | {ours} | {one.why} |")
    return lines


def speedup(devices: int, strategy: str, network: str) -> float:
    """Speedup over one device: Llama-3.2-1B, 4 sequences of 2,048 per device, A100s in nodes of eight."""
    nodes = max(1, devices // 8)
    common = ("model.shape=llama3.2-1b", "hardware.gpu=a100-80gb", "train.micro_batch=4", f"hardware.network={network}")
    alone = plan_of((*common, "train.global_batch=4"))
    if devices == 1:
        return 1.0
    many = plan_of(
        (
            *common,
            f"train.global_batch={4 * devices}",
            f"hardware.devices={devices // nodes}",
            f"hardware.nodes={nodes}",
            f"parallel.strategy={strategy}",
        )
    )
    return devices * many.speed.tokens_per_second_per_gpu / alone.speed.tokens_per_second_per_gpu


def scaling_rows() -> list[str]:
    lines = [
        "| GPUs | theirs: DDP, FSDP | ours, 200 Gb/s per GPU: ddp, fsdp | ours, 25 Gb/s per GPU: ddp, fsdp |",
        "| --- | --- | --- | --- |",
    ]
    for devices, (ddp, fsdp) in SCALING.items():
        ours = [
            ", ".join(f"{speedup(devices, strategy, network):.1f}×" for strategy in ("ddp", "fsdp"))
            for network in ("infiniband-hdr", "ethernet-25")
        ]
        lines.append(f"| {devices} | {ddp:g}×, {fsdp:g}× | {ours[0]} | {ours[1]} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the forecast with examples of guides.")
    parser.add_argument("output", type=Path, nargs="?", default=HERE / "plan", help="output folder")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Worked examples of guides, and the forecast",
        "",
        "Made by `benchmarks/plan_examples.py`, which has the settings of each.",
        "",
        *example_rows(),
        "",
        "Llama-3.2-1B, 4 sequences of 2,048 tokens per device and step, A100-80GB in nodes of eight:",
        "",
        *scaling_rows(),
    ]
    text = "\n".join(lines) + "\n"
    (output / "examples.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

"""docs/pictures/strategy.svg: which strategy to use, and what `shoal plan` says of an example of each."""

from dataclasses import dataclass

from benchmarks.pictures.forecast import gib, plan
from benchmarks.pictures.svg import Drawing

H100 = "hardware.gpu=h100-80gb hardware.devices=8"


@dataclass(frozen=True)
class Leaf:
    """A question, the answer to it, and an example: its words, and its settings for `shoal plan`."""

    question: tuple[str, ...]
    answer: str
    example: str
    settings: str


LEAVES = (
    Leaf(
        ("Does the whole training state",
         "fit on one device?"),
        "strategy: ddp",
        "Llama-3.2-1B on 8 H100",
        f"model.shape=llama3.2-1b {H100} data.max_length=4096",
    ),
    Leaf(
        ("Does it fit sharded over all",
         "devices, with fast links?"),
        "strategy: fsdp",
        "Llama-3-8B on 8 H100",
        f"model.shape=llama3-8b {H100} data.max_length=8192",
    ),
    Leaf(
        ("… or with a slow network",
         "between the nodes?"),
        "sharding: hybrid_shard",
        "Llama-3-8B on 2 × 8 H100, 25 Gb/s",
        f"model.shape=llama3-8b {H100} hardware.nodes=2 hardware.network=ethernet-25 data.max_length=4096",
    ),
    Leaf(
        ("Would it fit with fewer",
         "activations?"),
        "train.recompute: auto",
        "Llama-3-70B on 8 × 8 H100",
        f"model.shape=llama3-70b {H100} hardware.nodes=8 data.max_length=8192 train.recompute=auto",
    ),
    Leaf(
        ("Is one sequence too long",
         "for a device?"),
        "cp: 8",
        "Llama-3-8B, 262,144 tokens, 8 H100",
        f"model.shape=llama3-8b {H100} data.max_length=262144 train.recompute=full parallel.strategy=fsdp "
        "parallel.cp=8 parallel.cp_method=ulysses",
    ),
    Leaf(
        ("Are there fewer sequences in a",
         "step than devices?"),
        "tp: 8",
        "Llama-3-70B on 8 × 8 H100, batch 16",
        f"model.shape=llama3-70b {H100} hardware.nodes=8 data.max_length=8192 train.recompute=auto "
        "train.global_batch=16 parallel.strategy=fsdp parallel.tp=8",
    ),
    Leaf(
        ("Is there one device, and the",
         "model is too large for it?"),
        "adapter: qlora",
        "Llama-3-8B on one RTX 4090",
        "model.shape=llama3-8b hardware.gpu=rtx4090 hardware.devices=1 data.max_length=2048 adapter.kind=qlora",
    ),
)  # fmt: skip


def figures(leaf: Leaf) -> tuple[str, float, float]:
    """What the plan chooses, GiB reserved per device, and tokens per second and device."""
    choice = plan(leaf.settings).choice
    return choice.name, gib(choice.memory.worst.reserved), choice.speed.tokens_per_second_per_gpu


def draw() -> str:
    height = 78
    drawing = Drawing(
        800,
        64 + height * len(LEAVES),
        "Which strategy",
        "Questions from top to bottom, each with the setting to use if the answer is yes, and the forecast of an "
        "example: " + "; ".join(f"{leaf.answer}: {leaf.example}, {figures(leaf)[1]:.1f} GiB" for leaf in LEAVES) + ".",
    )
    drawing.text(16, 30, "Take the first yes. parallel.strategy: auto, the default, answers the first three.", "strong")
    for row, leaf in enumerate(LEAVES):
        y = 48 + row * height
        name, memory, speed = figures(leaf)
        drawing.box(16, y, 238, 56, "panel")
        for index, words in enumerate(leaf.question):
            drawing.text(28, y + 24 + index * 19, words)
        drawing.arrow((254, y + 28), (304, y + 28))
        drawing.text(278, y + 20, "yes", "small faint", anchor="middle")
        drawing.box(308, y, 206, 56, "weights")
        drawing.text(320, y + 33, leaf.answer, "code strong")
        drawing.text(530, y + 14, leaf.example, "small faint")
        drawing.text(530, y + 33, name, "small strong")
        drawing.text(530, y + 51, f"{memory:.1f} GiB, {speed:,.0f} tokens/s per device", "small")
        if row < len(LEAVES) - 1:
            drawing.arrow((135, y + 56), (135, y + height))
            drawing.text(143, y + 71, "no", "small faint")
    return drawing.svg()

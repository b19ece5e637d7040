"""docs/pictures/shardings.svg: what four devices hold under each strategy, with the forecast's figures."""

from benchmarks.pictures.forecast import gib, plan
from benchmarks.pictures.svg import Drawing

SETTINGS = (
    "model.shape=llama3-8b hardware.gpu=h200 hardware.nodes=2 hardware.devices=2 data.max_length=4096 "
    "train.global_batch=16 train.micro_batch=1"
)
ROWS = (
    ("ddp", "parallel.strategy=ddp"),
    ("zero1", "parallel.strategy=zero1"),
    ("zero2", "parallel.strategy=zero2"),
    ("fsdp", "parallel.strategy=fsdp"),
    ("fsdp, hybrid_shard", "parallel.strategy=fsdp parallel.sharding=hybrid_shard"),
)
KINDS = (
    ("weights", ("weights",)),
    ("gradients", ("gradients",)),
    ("optimizer", ("optimizer state",)),
    ("head", ("gathered weights",)),
)


def held(settings: str) -> dict[str, float]:
    """GiB per device by kind, at the peak of a step."""
    tree = plan(f"{SETTINGS} {settings}").choice.memory.worst.peak.tree
    return {kind: sum(gib(part.amount) for part in tree.parts if part.name in names) for kind, names in KINDS}


def reserved(settings: str) -> float:
    return gib(plan(f"{SETTINGS} {settings}").choice.memory.worst.reserved)


def draw() -> str:
    top, height = 84, 92
    drawing = Drawing(
        800,
        top + height * len(ROWS) + 34,
        "What each strategy holds on each device",
        "Weights, gradients, optimizer state and gathered weights on four devices of two nodes, Llama-3-8B: "
        + "; ".join(f"{name} {sum(held(settings).values()):.0f} GiB per device" for name, settings in ROWS)
        + ".",
    )
    drawing.text(16, 30, "Llama-3-8B, bf16-mixed, 2 nodes of 2 devices, at the peak of a step", "strong")
    drawing.legend(
        16,
        56,
        [
            ("weights", "weights"),
            ("gradients", "gradients"),
            ("optimizer", "optimizer state"),
            ("head", "gathered weights"),
        ],
    )
    drawing.text(600, 56, "GiB per device", "small faint")
    largest = max(amount for _, settings in ROWS for amount in held(settings).values())
    for row, (name, settings) in enumerate(ROWS):
        y = top + row * height
        amounts = held(settings)
        first, *rest = name.split(", ")
        drawing.text(16, y + 36, first, "code")
        for words in rest:
            drawing.text(16, y + 54, words, "code")
        for device in range(4):
            x = 130 + device * 112 + (device // 2) * 14
            drawing.box(x, y, 100, height - 14, "panel")
            for index, (kind, amount) in enumerate(amounts.items()):
                bar = (height - 26) * amount / largest
                drawing.box(x + 8 + index * 22, y + height - 18 - bar, 18, max(bar, 0.5), kind)
        drawing.text(
            600,
            y + 30,
            " + ".join(f"{amount:.1f}" for amount in amounts.values() if amount > 0.05),
            "small",
        )
        drawing.text(600, y + 48, f"= {sum(amounts.values()):.1f} and activations:", "small")
        drawing.text(600, y + 66, f"{reserved(settings):.1f} reserved", "small strong")
    drawing.text(130, top + height * len(ROWS) + 16, "node 0", "small faint")
    drawing.text(368, top + height * len(ROWS) + 16, "node 1", "small faint")
    return drawing.svg()

"""docs/pictures/memory.svg: the term tree of a plan as a bar and a list."""

from benchmarks.pictures.forecast import gib, plan
from benchmarks.pictures.svg import Drawing

SETTINGS = "model.shape=llama3-8b hardware.gpu=h100-80gb hardware.devices=8 data.max_length=8192"
COLOURS = {
    "weights": "weights",
    "gathered weights": "weights",
    "optimizer state": "optimizer",
    "gradients": "gradients",
    "activations": "activations",
    "head": "head",
}


def draw() -> str:
    choice = plan(SETTINGS).choice
    worst = choice.memory.worst
    device = choice.machine.gpu.memory_gib
    shown = [(term.name, gib(term.amount), COLOURS.get(term.name, "communication")) for term in worst.peak.tree.parts]
    shown.append(("allocator overhead", gib(worst.reserve), "rest"))
    shown.append(("CUDA context and NCCL", gib(choice.memory.context), "rest"))
    details = {
        term.name: [(part.name, gib(part.amount)) for part in sorted(term.parts, key=lambda one: -one.amount)]
        for term in worst.peak.tree.parts
        if len(term.parts) > 1
    }
    rows = sum(1 + len(details.get(name, ())) for name, *_ in shown)
    drawing = Drawing(
        800,
        92 + rows * 23,
        "Memory of a device, term by term",
        f"Llama-3-8B under FSDP on 8 H100 with 8192 tokens: {gib(worst.allocated):.1f} GiB allocated, of "
        + ", ".join(f"{name} {amount:.1f}" for name, amount, _ in shown)
        + f"; the device has {device:.1f} GiB.",
    )
    drawing.text(
        16, 30, f"fsdp on 8 × h100-80gb, Llama-3-8B, one sequence of 8192 tokens; peak: {worst.peak.name}", "strong"
    )
    top, height = 56, rows * 23
    drawing.box(16, top, 90, height, "panel")
    at, y = 0.0, top + 12.0
    drawing.text(116, top + height + 20, f"{device:.1f} GiB: the device", "small faint")
    for name, amount, colour in shown:
        start, bar = top + height * at / device, height * amount / device
        drawing.box(16, start, 90, bar, colour)
        at += amount
        drawing.line(106, start + bar / 2, 190, y - 4)
        drawing.box(196, y - 13, 12, 12, colour)
        drawing.text(262, y - 2, f"{amount:.2f}", "strong", anchor="end")
        drawing.text(276, y - 2, name, "strong")
        y += 23
        for part, size in details.get(name, ()):
            drawing.text(332, y - 2, f"{size:.2f}", "small faint", anchor="end")
            drawing.text(344, y - 2, part, "small")
            y += 23
    return drawing.svg()

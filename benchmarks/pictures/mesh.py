"""docs/pictures/mesh.svg: which rank of a device mesh holds what."""

from benchmarks.pictures.svg import Drawing
from shoal.config.mesh import Mesh

MESH = Mesh(pp=2, dp_shard=2, cp=2, tp=2)
LAYERS = HEADS = 32  # as Llama-3-8B
CELL, GAP = 84, 6
AXES = (
    ("tp", "fastest link: in every block", "one part of each matrix"),
    ("cp", "in the attention of every block", "one part of the tokens of each sequence"),
    ("dp_shard", "weights and gradients, overlapped", "other sequences; a shard of the weights"),
    ("pp", "slowest link: hidden states only", "one part of the blocks"),
)


def draw() -> str:
    drawing = Drawing(
        800,
        490,
        "Device mesh",
        f"{MESH.world_size} ranks as a mesh of 2 pipeline stages, 2 data-parallel shards, 2 context-parallel ranks and "
        "2 tensor-parallel ranks. Ranks that differ only in tp are neighbours; pipeline stages are farthest apart.",
    )
    drawing.text(16, 30, "parallel: {strategy: fsdp, tp: 2, cp: 2, pp: 2} on 16 devices", "strong")
    node = 4 * (CELL + GAP) + 20
    for rank in range(MESH.world_size):
        at = MESH.coordinate(rank)
        x = 16 + at["pp"] * (node + 12) + 10 + (at["cp"] * 2 + at["tp"]) * (CELL + GAP)
        y = 86 + at["dp_shard"] * (CELL + 40)
        if at["tp"] == at["cp"] == at["dp_shard"] == 0:
            drawing.outline(16 + at["pp"] * (node + 12), 48, node, 2 * (CELL + 40) + 18)
            first = at["pp"] * LAYERS // MESH.pp
            last = first + LAYERS // MESH.pp - 1
            drawing.text(x, 68, f"pp {at['pp']}: blocks {first} to {last}", "strong small")
        if at["tp"] == 0:
            drawing.box(x - 3, y + 14, 2 * CELL + GAP + 6, CELL, "panel")
            drawing.text(x, y + 8, f"dp_shard {at['dp_shard']}, cp {at['cp']}", "small faint")
        drawing.box(x, y + 17, CELL, CELL - 6, "weights" if at["dp_shard"] == 0 else "activations")
        drawing.text(x + CELL / 2, y + 42, f"rank {rank}", "strong small", anchor="middle")
        drawing.text(x + CELL / 2, y + 60, f"tp {at['tp']}", "small", anchor="middle")
        heads = HEADS // MESH.tp
        words = f"heads {at['tp'] * heads}–{(at['tp'] + 1) * heads - 1}"
        drawing.text(x + CELL / 2, y + 77, words, "small", anchor="middle")
    drawing.text(16, 348, "axis", "small faint")
    drawing.text(120, 348, "ranks along it communicate", "small faint")
    drawing.text(400, 348, "each of them has", "small faint")
    for row, (axis, links, holds) in enumerate(AXES):
        y = 372 + row * 24
        drawing.text(16, y, axis, "code")
        drawing.text(120, y, links, "small")
        drawing.text(400, y, holds, "small")
    drawing.legend(120, 472, [("weights", "sequences 0, 2, …"), ("activations", "sequences 1, 3, …")])
    return drawing.svg()

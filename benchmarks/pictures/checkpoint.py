"""docs/pictures/checkpoint.svg: the life of a checkpoint, and what a crash at each moment leaves."""

from benchmarks.pictures.svg import Drawing

WRITING = (
    ("mkdir step-00000200/", "no checkpoint"),
    ("rank-00000.safetensors, …", "no checkpoint"),
    ("hashes of every file, fsync", "no checkpoint"),
    ("MANIFEST.json, by rename", "complete"),
    ("latest, by rename", "complete"),
)
AFTER = (
    ("kept", ("the newest, the best,", "every n-th")),
    ("resumed", ("hashes are checked,", "shards redistributed")),
    ("used", ("export, merge,", "generate, eval")),
    ("removed-…", ("renamed, then", "deleted")),
)


def draw() -> str:
    drawing = Drawing(
        800,
        446,
        "The life of a checkpoint",
        "Training waits only for the copy to host memory. A thread writes one file per rank, then the manifest, then "
        "the name of the newest checkpoint. Before the manifest exists, a crash leaves no checkpoint; after it, a "
        "complete one. Later it is resumed, exported, kept or removed.",
    )
    drawing.text(16, 31, "training", "strong")
    for x, words in ((150, "step 199"), (274, "step 200"), (454, "step 201"), (578, "step 202")):
        drawing.box(x, 12, 120, 28, "weights")
        drawing.text(x + 60, 31, words, "small", anchor="middle")
    drawing.box(398, 12, 52, 28, "gradients")
    drawing.text(424, 31, "copy", "small", anchor="middle")
    drawing.text(710, 31, "…", "faint")
    drawing.arrow((424, 42), (424, 70))
    drawing.text(16, 93, "host memory", "strong")
    drawing.box(314, 74, 220, 28, "head")
    drawing.text(424, 93, "this rank's shard of the state", "small", anchor="middle")
    drawing.arrow((424, 104), (424, 132))
    drawing.text(16, 154, "writer thread", "strong")
    for index, (words, left) in enumerate(WRITING):
        y = 136 + index * 34
        complete = left == "complete"
        drawing.box(150, y, 300, 28, "activations" if complete else "rest")
        drawing.text(162, y + 19, words, "code")
        drawing.text(466, y + 19, f"a crash after this leaves: {left}", "small" if complete else "small faint")
    drawing.line(150, 235, 784, 235, more="dashed")
    drawing.arrow((300, 302), (300, 344))
    drawing.text(16, 372, "afterwards", "strong")
    for index, (words, notes) in enumerate(AFTER):
        x = 150 + index * 160
        drawing.box(x, 348, 152, 78, "panel")
        drawing.text(x + 10, 371, words, "strong small")
        for row, note in enumerate(notes):
            drawing.text(x + 10, 392 + row * 18, note, "small faint")
    return drawing.svg()

"""docs/pictures/pipeline.svg: a step of 1F1B on four stages, and its bubble."""

from collections.abc import Iterator

from benchmarks.pictures.svg import Drawing

STAGES = 4
FORWARD, BACKWARD = 1, 2  # a backward pass takes twice as long: two matmuls for each of the forward pass
Pass = tuple[int, int, str, int, int]  # stage, micro-batch, kind, start, end


def order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """1F1B: as many forward passes ahead as there are stages behind, then one backward and one forward in turn."""
    ahead = min(stages - stage, micro_batches)
    yield from (("F", one) for one in range(ahead))
    for one in range(micro_batches):
        yield "B", one
        if one + ahead < micro_batches:
            yield "F", one + ahead


def schedule(stages: int, micro_batches: int) -> list[Pass]:
    """Each pass as early as its stage and the pass that it waits for allow."""
    waiting = {stage: list(order(stage, stages, micro_batches)) for stage in range(stages)}
    free = dict.fromkeys(waiting, 0)
    ends: dict[tuple[int, str, int], int] = {}
    done: list[Pass] = []
    while any(waiting.values()):
        for stage, passes in waiting.items():
            while passes:
                kind, one = passes[0]
                needed = (stage - 1, "F", one) if kind == "F" else (stage + 1, "B", one)
                if kind == "B" and stage == stages - 1:
                    needed = (stage, "F", one)
                if needed[0] >= 0 and needed not in ends:
                    break
                start = max(free[stage], ends.get(needed, 0))
                free[stage] = ends[stage, kind, one] = start + (FORWARD if kind == "F" else BACKWARD)
                done.append((stage, one, kind, start, free[stage]))
                passes.pop(0)
    return done


def idle_share(passes: list[Pass], stages: int) -> float:
    """The share of the step in which a stage has nothing to do."""
    length = max(end for *_, end in passes)
    busy = sum(end - start for *_, start, end in passes)
    return 1 - busy / (stages * length)


def draw() -> str:
    left, height = 84, 26
    counts = (4, 8, 16)
    longest = max(max(end for *_, end in schedule(STAGES, count)) for count in counts)
    unit = 640 / longest
    drawing = Drawing(
        760,
        64 + len(counts) * (STAGES * height + 62),
        "1F1B pipeline schedule",
        "Three steps of a pipeline of four stages with 4, 8 and 16 micro-batches. A stage waits in each for as long as "
        "three micro-batches take: "
        + ", ".join(f"{idle_share(schedule(STAGES, count), STAGES):.0%} of the step with {count}" for count in counts)
        + ".",
    )
    drawing.text(16, 30, "parallel.pp: 4, schedule 1f1b: the step of each stage, from left to right", "strong")
    top = 56.0
    for count in counts:
        passes = schedule(STAGES, count)
        length = max(end for *_, end in passes)
        share = idle_share(passes, STAGES)
        drawing.text(16, top + 12, f"{count} micro-batches", "strong")
        drawing.text(180, top + 12, f"bubble: {share:.0%} of the step", "accent")
        for stage in range(STAGES):
            y = top + 22 + stage * height
            drawing.text(16, y + 17, f"stage {stage}", "small faint")
            drawing.box(left, y, length * unit, height - 4, "panel", more="")
            for one_stage, one, kind, start, end in passes:
                if one_stage != stage:
                    continue
                fill = "weights" if kind == "F" else "gradients"
                drawing.box(left + start * unit, y, (end - start) * unit, height - 4, fill)
                if count <= 8:
                    drawing.text(left + (start + end) / 2 * unit, y + 16, str(one), "small", anchor="middle")
        top += STAGES * height + 58
    drawing.legend(84, top + 6, [("weights", "forward pass"), ("gradients", "backward pass"), ("panel", "idle")])
    return drawing.svg()

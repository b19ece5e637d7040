"""A plan as text for a terminal: summary, memory bar, speed, table of strategies, suggested changes."""

from shoal.plan.accuracy import expected_error
from shoal.plan.advise import Change
from shoal.plan.goodput import DAY
from shoal.plan.report import Plan
from shoal.plan.resolved import ResolvedRun, shown_recompute
from shoal.plan.speed.forecast import replays_graphs
from shoal.plan.terms import GIB, Term

SHORT = 120  # seconds of a run, below which nobody asks about interruptions
WIDTH = 44
# One letter per kind of memory, so that the bar needs no colour.
KINDS = (
    ("weights", "w"),
    ("gathered weights", "w"),
    ("gradients", "g"),
    ("unreduced gradients", "g"),
    ("gradients being reduced", "g"),
    ("optimizer state", "o"),
    ("activations", "a"),
    ("block backward", "a"),
    ("head", "h"),
    ("communication buffers", "c"),
    ("retained", "g"),
    ("optimizer temporaries", "o"),
)


def plan_text(plan: Plan) -> str:
    """The plan as text."""
    choice, lines = plan.choice, []
    lines += [_headline(plan), ""]
    lines += _memory_lines(choice)
    lines += ["", *_speed_lines(plan)]
    lines += _goodput_lines(plan)
    if len(plan.alternatives) > 1:
        lines += ["", *_table(plan)]
    lines += ["", *_limit_lines(plan), *_error_lines(choice)]
    if not plan.fits:
        lines += ["", *_change_lines(plan.changes)]
    if plan.notes:
        lines += ["", *(f"note: {note}" for note in plan.notes)]
    return "\n".join(line.rstrip() for line in lines)


def _headline(plan: Plan) -> str:
    choice, run, machine = plan.choice, plan.choice.run, plan.choice.machine
    nodes = f"{machine.nodes} nodes of " if machine.nodes > 1 else ""
    verdict = "fits" if plan.fits else "does NOT fit"
    batch = f"micro-batch {run.micro_batch}, {_count(run.grad_accum_steps, 'gradient accumulation step')}"
    return (
        f"{plan.name}: {choice.name} on {nodes}{machine.devices} × {machine.gpu.name} {verdict} ({choice.reason}).\n"
        f"{batch}, sequence length {run.length}, recompute {shown_recompute(run)}, loss {run.loss}, "
        f"precision {run.precision}{', CUDA graphs' if replays_graphs(run) else ''}."
    )


def _memory_lines(choice: ResolvedRun) -> list[str]:
    worst, memory = choice.memory.worst, choice.memory
    device = choice.machine.gpu.memory_gib
    rank = f" on pipeline rank {worst.pipeline_rank}" if memory.run.mesh.pp > 1 else ""
    # The parts of a small model would all be 0.00 GiB.
    unit, size = ("GiB", GIB) if worst.reserved >= GIB else ("MiB", GIB / 1024)
    lines = [
        f"memory per device{rank}: {worst.allocated / size:.1f} {unit} allocated, {worst.reserved / size:.1f} {unit} "
        f"reserved, of {device:.1f} GiB; peak at: {worst.peak.name}",
        f"  |{bar(choice)}|",
    ]
    for term in worst.peak.tree.parts:
        lines.append(f"  {_letter(term.name)} {term.amount / size:8.2f}  {term.name}")
        if term.amount / worst.allocated > 0.1:
            lines += [f"    {part.amount / size:10.2f}  {part.name}" for part in _largest(term)]
    lines.append(f"    {worst.reserve / size:8.2f}  allocator overhead (reserved, not allocated)")
    if memory.context:
        lines.append(f"    {memory.context / size:8.2f}  CUDA context and NCCL, outside PyTorch (typical)")
    if choice.run.offload != "none" or choice.run.offloads_inputs:
        lines.append(f"  host memory: {memory.host.amount / GIB:.1f} GiB per device")
    return lines


def _largest(term: Term) -> list[Term]:
    return sorted(term.parts, key=lambda part: -part.amount)[:5]


def bar(choice: ResolvedRun, width: int = WIDTH) -> str:
    """The device's memory as a bar, one letter per kind; ends in ! if it does not fit."""
    device = choice.machine.gpu.memory_gib * GIB
    worst = choice.memory.worst
    text = ""
    total = 0.0
    for letter, amount in _kinds(worst.peak.tree, worst.reserve + choice.memory.context):
        total += amount
        text += letter * (round(min(total / device, 1.0) * width) - len(text))
    if total > device:
        return text[: width - 1] + "!"
    return text.ljust(width, ".")


def _kinds(tree: Term, rest: float) -> list[tuple[str, float]]:
    found: dict[str, float] = {}
    for term in tree.parts:
        letter = _letter(term.name)
        found[letter] = found.get(letter, 0.0) + term.amount
    return [*found.items(), ("r", rest)]


def _letter(name: str) -> str:
    return dict(KINDS).get(name, "c")


def _speed_lines(plan: Plan) -> list[str]:
    speed = plan.choice.speed
    total = speed.tokens_per_second_per_gpu * speed.world_size
    lines = [
        f"speed: {speed.tokens_per_second_per_gpu:,.0f} tokens/s per device ({total:,.0f} in total), "
        f"MFU {speed.mfu:.1%}, {_duration(speed.step_seconds)} per step"
    ]
    shares = sorted(speed.step.parts, key=lambda part: -part.amount)
    lines.append("  " + ", ".join(f"{part.name} {part.amount / speed.step_seconds:.0%}" for part in shares[:6]))
    if plan.seconds is not None and plan.gpu_hours is not None:
        price = (
            f", cost {plan.cost:,.2f} at {plan.choice.machine.price:g} per device hour" if plan.cost is not None else ""
        )
        lines.append(f"  {plan.steps:,} steps: {_duration(plan.seconds)}, {plan.gpu_hours:,.1f} device hours{price}")
    else:
        lines.append("  time to finish: unknown, because epochs depend on the data; set train.steps or train.tokens")
    return lines


def _goodput_lines(plan: Plan) -> list[str]:
    """What is lost to interruptions and saves, and the interval between checkpoints that loses least."""
    goodput = plan.goodput
    if goodput.wall_seconds is not None and goodput.wall_seconds < SHORT:
        return []
    conditions = goodput.conditions
    if goodput.interruptions is not None and goodput.wall_seconds is not None:
        expected = f"{_small(goodput.interruptions)} expected in {_duration(goodput.wall_seconds)}"
    else:
        expected = f"{_small(DAY / conditions.mtbf)} expected per day"
    auto = plan.choice.requested.checkpoint.every == "auto"
    interval = f"{_count(goodput.every, 'step')} ({_duration(goodput.interval)})"
    best = f"{_count(goodput.best_every, 'step')} ({_duration(goodput.best_every * goodput.step_seconds)})"
    blocked = _duration(conditions.blocks_after(goodput.interval))
    return [
        f"  goodput {goodput.share:.2%} with a checkpoint every {interval}; interruptions: {expected}",
        f"    saves {goodput.saving:.2%}, repeated steps {goodput.repeating:.2%}, restarts {goodput.restarting:.2%}; a "
        f"checkpoint of {goodput.bytes / GIB:,.1f} GiB blocks for {blocked}"
        + (f" and is complete {_duration(conditions.written)} later" if conditions.written else ""),
        *([] if auto else [f"    checkpoint.every=auto: every {best}, goodput {goodput.best_share:.2%}"]),
    ]


def _small(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _table(plan: Plan) -> list[str]:
    head = (
        f"  {'strategy':22}{'fits':>5}{'reserved':>11}  {'':{WIDTH // 2}} {'tokens/s':>10}{'micro-batch':>13}"
        f"{'recompute':>11}"
    )
    lines = [
        "strategies on the same devices (memory and tokens/s per device; * is chosen):",
        head + ("   time" if plan.steps else ""),
    ]
    for one in plan.alternatives:
        mark = "*" if one.name == plan.choice.name else " "
        time = f"   {_duration(plan.steps * one.speed.step_seconds)}" if plan.steps else ""
        lines.append(
            f"{mark} {one.name:22}{'yes' if one.fits else 'no':>5} {one.memory.reserved / GIB:>6.1f} GiB  "
            f"{bar(one, WIDTH // 2)} {one.speed.tokens_per_second_per_gpu:>10,.0f}{one.run.micro_batch:>13}"
            f"{shown_recompute(one.run):>11}{time}"
        )
    return lines


def _limit_lines(plan: Plan) -> list[str]:
    found = plan.limits
    parts = []
    if found.micro_batch is not None:
        parts.append(f"largest micro-batch {found.micro_batch}")
    if found.length is not None:
        parts.append(f"longest sequence {found.length:,} tokens (at micro-batch 1)")
    if found.devices is not None:
        parts.append(f"fewest devices {found.devices}")
    return [f"limits: {', '.join(parts)}"] if parts else []


def _error_lines(choice: ResolvedRun) -> list[str]:
    error = expected_error(choice.run)
    if error is None:
        return []
    memory, speed = (f"{median:.0%} (p90 {p90:.0%})" for median, p90 in (error.memory, error.speed))
    return [f"expected error: memory {memory}, speed {speed}: {error.runs}"]


def _change_lines(changes: tuple[Change, ...]) -> list[str]:
    if not changes:
        return ["No combination of a few changes makes it fit; use a smaller model or many more devices."]
    alone = changes[0].choice.fits
    lines = ["changes that make it fit, cheapest first:" if alone else "changes that make it fit when combined:"]
    if not changes[-1].choice.fits:
        lines = ["changes that save memory when combined, but not enough:"]
    for change in changes:
        setting = " ".join(change.settings) if alone else change.settings[-1]
        time = f"{change.slower:+.0%} time per token" if abs(change.slower) >= 0.005 else "same speed"
        lines.append(
            f"  {setting:44} → {change.choice.memory.reserved / GIB:6.1f} GiB (saves {change.saves_gib:.1f}), {time}"
            + (f"; changes {change.affects}" if change.affects != "execution" else "")
            + ("" if change.built else "; shoal train does not accept it yet")
        )
    return lines


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.2g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 72 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"

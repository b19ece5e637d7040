"""A plan as a plot: the memory of each strategy as stacked bars against the device's, and its speed."""

from pathlib import Path

from shoal.mistakes import UserMistake
from shoal.plan.report import Plan
from shoal.plan.resolved import ResolvedRun
from shoal.plan.terms import GIB

COLOURS = {
    "weights": "#3b6ea5",
    "gathered weights": "#8fb4d9",
    "gradients": "#c8553d",
    "unreduced gradients": "#c8553d",
    "gradients being reduced": "#e59a88",
    "optimizer state": "#f2c14e",
    "activations": "#588157",
    "block backward": "#a3b899",
    "head": "#7d5ba6",
    "communication buffers": "#999999",
    "retained": "#e5b3a6",
    "optimizer temporaries": "#d9b86c",
    "allocator overhead": "#dddddd",
}


def plot_plan(plan: Plan, path: Path) -> None:
    """Write the plot to `path`, in the format of its suffix."""
    try:
        import matplotlib
    except ImportError:
        raise UserMistake("--plot needs matplotlib: pip install 'shoal[plot]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    choices = list(plan.alternatives) or [plan.choice]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1.6 + 0.45 * len(choices)), gridspec_kw={"width_ratios": [3, 2]}, layout="constrained"
    )
    used: dict[str, str] = {}
    for position, one in enumerate(choices):
        start = 0.0
        for name, amount in _bars(one):
            colour = COLOURS.get(name, "#bbbbbb")
            left.barh(position, amount, left=start, color=colour, label=None if name in used else name)
            used[name] = colour
            start += amount
    device = plan.choice.machine.gpu.memory_gib
    left.axvline(device, color="black", linestyle="--", linewidth=1)
    left.set_yticks(range(len(choices)), [("* " if one.name == plan.choice.name else "") + one.name for one in choices])
    left.invert_yaxis()
    left.set_xlabel(f"peak GiB per device; dashed: {plan.choice.machine.gpu.name}")
    left.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=4, frameon=False)
    speeds = [one.speed.tokens_per_second_per_gpu for one in choices]
    right.barh(range(len(choices)), speeds, color=["#3b6ea5" if one.fits else "#cccccc" for one in choices])
    right.set_yticks([])
    right.invert_yaxis()
    right.set_xlabel("tokens/s per device; grey: does not fit")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserMistake(f"--plot {path} cannot be written: {why}.") from None
    finally:
        pyplot.close(figure)


def _bars(choice: ResolvedRun) -> list[tuple[str, float]]:
    worst = choice.memory.worst
    found = [(term.name, term.amount / GIB) for term in worst.peak.tree.parts]
    return [*found, ("allocator overhead", worst.reserve / GIB)]

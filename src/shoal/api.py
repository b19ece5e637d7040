"""The Python door: the same functions that the commands call.

    import shoal.api

    config = shoal.api.load_config("run.yaml", ["train.lr=3e-4"])
    summary = shoal.api.train(config)
    shoal.api.export(summary.run, "model")

Importing this is cheap; torch is imported by the call that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import Config, config_from_mapping, config_to_yaml, config_values, json_schema, load_config
from shoal.mistakes import UserMistake

if TYPE_CHECKING:
    from shoal.bench.collectives_report import CollectivesReport
    from shoal.bench.training import RankReport, Steps
    from shoal.checkpoint.inspect import Listed
    from shoal.convert.imports import Imported
    from shoal.plan.report import Plan
    from shoal.train.loop import Summary
    from shoal.train.preview import Preview
    from shoal.use.evaluate import Evaluation
    from shoal.use.generate import Generated
    from shoal.use.load import LoadedRun

__all__ = [
    "Config",
    "bench_collectives",
    "bench_rank",
    "bench_train",
    "chat",
    "checkpoints",
    "config_from_mapping",
    "config_to_yaml",
    "config_values",
    "download",
    "dry_run",
    "evaluate",
    "export",
    "generate",
    "import_checkpoint",
    "init",
    "json_schema",
    "load_config",
    "load_run",
    "plan",
    "recipes",
    "train",
]


def train(
    config: Config,
    *,
    runs: Path | str = "runs",
    resume: bool = False,
    start_from: Path | str | None = None,
    overwrite: bool = False,
    max_restarts: int = 0,
) -> Summary:
    """Train as `config` says, under `runs`/NAME; see `shoal train --help` for what the options mean."""
    from shoal.launch.run import start

    return start(
        config,
        runs=Path(runs),
        resume=resume,
        start_from=None if start_from is None else Path(start_from),
        overwrite=overwrite,
        max_restarts=max_restarts,
    )


def plan(config: Config, *, system: str = "shoal") -> Plan:
    """The forecast of `config` on the hardware it names: memory, speed, and what would change them.

    `load_config(..., planned=True)` reads configs that ask for what is not built yet. `system` forecasts what another
    system's code would do with the same run.
    """
    from shoal.plan.report import make_plan

    return make_plan(config, system=system)


def dry_run(config: Config) -> Preview:
    """What `train` would do: counts, batch arithmetic, the learning rate, the first row. Trains nothing."""
    from shoal.launch.run import dry_run

    return dry_run(config)


def recipes() -> dict[str, str]:
    """The recipes that come with shoal: name and what each does."""
    from shoal.catalogue.recipes import about_recipe, recipe_names

    return {name: about_recipe(name) for name in recipe_names()}


def init(recipe: str, output: Path | str | None = None) -> Path:
    """Write a recipe as a config file (RECIPE.yaml unless `output` says otherwise); never over another file."""
    from shoal.catalogue.recipes import read_recipe

    text = read_recipe(recipe)
    path = Path(output) if output is not None else Path(f"{recipe}.yaml")
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UserMistake(f"{path} is there already; choose another name with --output.") from None
    except OSError as error:
        raise UserMistake(f"{path} cannot be written: {error.strerror}.") from None
    return path


def download(name: str, *, dataset: bool = False) -> Path:
    """Fetch a model or dataset of the Hugging Face hub into the local cache; returns its folder there."""
    from shoal.models.download import download

    return download(name, dataset=dataset)


def export(
    run: Path | str,
    output: Path | str | None = None,
    *,
    step: int | None = None,
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write a run's weights, config and tokenizer as a Hugging Face folder (RUN/hf unless `output` says otherwise)."""
    from shoal.convert.export import export_hf

    folder = Path(run)
    return export_hf(folder, folder / "hf" if output is None else Path(output), step=step, dtype=dtype, report=report)


def import_checkpoint(
    source: Path | str,
    output: Path | str,
    *,
    model: Path | str | None = None,
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Imported:
    """Make a Hugging Face folder of a LitGPT, DeepSpeed or FSDP checkpoint; nothing in its files is run.

    `model` is the folder whose config.json and tokenizer the weights go with; by default, what lies beside them.
    """
    from shoal.convert.imports import import_hf

    described = None if model is None else str(model)
    return import_hf(Path(source), Path(output), model=described, dtype=dtype, report=report)


def checkpoints(
    run: Path | str, *, verify: bool = False, report: Callable[[str], None] = lambda _: None
) -> list[Listed]:
    """A run's checkpoints, oldest first; with `verify`, every file is read and compared with its hash."""
    from shoal.checkpoint.inspect import list_checkpoints

    return list_checkpoints(Path(run), verify=verify, report=report)


def load_run(run: Path | str, *, step: int | None = None, device: str = "auto", dtype: str | None = None) -> LoadedRun:
    """A run's model and tokenizer on one device, of its newest checkpoint or that of `step`; or a Hugging Face folder.

    `dtype` is fp32, bf16 or fp16; by default the weights are as they were saved.
    """
    from shoal.use.load import load_run as load

    return load(Path(run), step=step, device=device, dtype=dtype)


def generate(
    run: Path | str | LoadedRun,
    prompt: str,
    *,
    tokens: int = 100,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    raw: bool = False,
    step: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    write: Callable[[str], None] = lambda _: None,
) -> Generated:
    """What the run's model says after `prompt`; `write` hears each piece of it as it is made."""
    from shoal.use.generate import Sampling, stream

    sampling = Sampling(tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    loaded = load_run(run, step=step, device=device, dtype=dtype) if isinstance(run, Path | str) else run
    with stream(loaded, prompt, sampling, raw=raw) as answer:
        for piece in answer:
            write(piece)
    return answer.result(prompt)


def chat(
    run: Path | str,
    lines: Iterable[str],
    *,
    write: Callable[[str], None],
    say: Callable[[str], None] = lambda _: None,
    tokens: int = 500,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    step: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
) -> None:
    """Answer `lines` one after another. `write` hears the answers' pieces; `say`, what is not part of them."""
    from shoal.use.chat import Chat, converse
    from shoal.use.generate import Sampling

    sampling = Sampling(tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    talk = Chat(load_run(run, step=step, device=device, dtype=dtype), sampling, say)
    converse(talk, lines, write, say)


def evaluate(
    run: Path | str,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    batches: int | None = None,
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Loss and perplexity on the rows that the run held out, or on other data: `overrides=["data.path=FILE"]`."""
    from shoal.use.evaluate import evaluate_run

    return evaluate_run(Path(run), overrides, step=step, batches=batches, device=device, report=report)


def bench_train(
    config: Config, *, steps: int = 20, warmup: int = 5, report: Callable[[str], None] = lambda _: None
) -> Steps:
    """Train some steps as `config` says, in a process of its own that saves nothing, and measure them."""
    from shoal.bench.training import measure_training

    return measure_training(config, steps=steps, warmup=warmup, report=report)


def bench_rank(
    config: Config,
    world_size: int,
    *,
    steps: int = 10,
    warmup: int = 4,
    real: bool | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> RankReport:
    """One rank of `world_size`, against its forecast: run for real, its exchanges with the others returning at once, or
    traced, which finds its memory only. By default real on a GPU and traced without one."""
    from shoal.bench.training import measure_rank

    return measure_rank(config, world_size, steps=steps, warmup=warmup, real=real, report=report)


def bench_collectives(
    *,
    devices: int | None = None,
    largest: int | str | None = None,
    dtype: str = "fp32",
    repeat: int = 20,
    seconds: float = 1.0,
    link: str | None = None,
    output: Path | str | None = None,
) -> CollectivesReport:
    """What all-reduce, all-gather and reduce-scatter reach here; see `shoal bench collectives --help`.

    Among ranks that torchrun or srun has started, each calls this, and each gets the same report.
    """
    from shoal.bench.collectives_request import make_request, named_link

    request = make_request(largest=largest, dtype=dtype, repeat=repeat, seconds=seconds)
    named = named_link(link)
    from shoal.bench.collectives import measure_collectives

    return measure_collectives(request, devices=devices, link=named, output=None if output is None else Path(output))

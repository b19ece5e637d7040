"""Look at the data of a run, or at a file: without a model, without an accelerator, and without importing torch."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.catalogue.causal_models import why_not_packed
from shoal.catalogue.shapes import find_shape
from shoal.config.interpolate import escape
from shoal.config.load import load_config
from shoal.config.resolve import with_global_batch
from shoal.config.run import RunDirectory
from shoal.config.schema import Config, DataConfig
from shoal.data.cells.make_tokenizer import are_cells
from shoal.data.inspect.packed import Choice
from shoal.data.inspect.preview import SourcePreview, preview_source
from shoal.data.inspect.preview_text import Piece, plain_text, source_pieces
from shoal.data.inspect.stats import SourceStats, measure_source
from shoal.data.inspect.stats_text import source_lines
from shoal.data.masks import loss_share, make_masks
from shoal.data.order import ShuffledOrder
from shoal.data.prepare import prepare
from shoal.data.sets import Sets, prepare_sets
from shoal.data.tokenizer import load_tokenizer
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.models.hub import local_folder
from shoal.models.read_config import count_positions, read_settings
from shoal.observe.figures import counted
from shoal.paths import user_path
from shoal.plan.batches import count_steps
from shoal.train.tokenizer import check_sizes, load_model_tokenizer

Report = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """What is looked at."""

    file: str | None
    config: Config
    tokenizer: Tokenizer
    not_apart: str | None  # why the model cannot keep packed documents apart
    vocabulary: int | None  # of the model, and the longest sequence that it supports, if they are known
    positions: int | None

    def refused(self) -> str | None:
        """Why training would refuse these tokens for this model."""
        if self.vocabulary is None:
            return None
        # The vocabulary of a model grows by the added tokens that it has no rows for.
        known = max(self.vocabulary, self.tokenizer.size) if self.config.model.add_tokens else self.vocabulary
        try:
            check_sizes(known, self.positions, self.tokenizer, self.config.data)
        except UserMistake as mistake:
            return str(mistake)
        return None


@dataclass(frozen=True)
class DataPreview:
    """The result of `shoal data preview`: examples or sequences of each source."""

    file: str | None
    tokenizer: str
    drawn: bool  # at random
    sources: list[SourcePreview]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def pieces(self, characters: int | None = None) -> Iterator[Piece]:
        """The text in pieces of one style each. `characters`: the most that are shown of each document."""
        for index, source in enumerate(self.sources):
            if index:
                yield "\n", "plain"
            yield from source_pieces(source, self.tokenizer, characters, drawn=self.drawn)

    def text(self, characters: int | None = None) -> str:
        return plain_text(self.pieces(characters))


@dataclass(frozen=True)
class DataStats:
    """The result of `shoal data stats`. Sequences, tokens and steps are those that training would have."""

    file: str | None
    tokenizer: str
    max_length: int
    documents: int
    tokens: int
    sequences: int
    training_sequences: int
    validation_sequences: int
    tokens_per_epoch: int  # of the training sequences, without padding
    loss_tokens_per_epoch: int
    global_batch: int
    steps_per_epoch: float
    steps: int | None  # of the run; None: the data gives less than one
    epochs: float | None
    problem: str | None  # why training would refuse
    sources: list[SourceStats]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _counted(self) -> str:
        """What the loss counts."""
        kind = self.sources[0].objective
        return {"masked_lm": "masked", "classify": "labels"}.get(kind, "in the loss")

    def text(self) -> str:
        """Human-readable form."""
        several = len(self.sources) > 1
        lines = [f"tokenizer    {self.tokenizer}"]
        for source in self.sources:
            lines += [*([""] if several else []), *source_lines(source, self.max_length, titled=several)]
        lines += [""] if several else []
        lines.append(
            f"epoch        {counted(self.training_sequences, 'training sequence')}, {self.tokens_per_epoch:,} tokens, "
            f"{self.loss_tokens_per_epoch:,} {self._counted()}; "
            f"{counted(self.validation_sequences, 'validation sequence')}"
        )
        lines.append(f"steps        {self.steps_per_epoch:,g} per epoch with train.global_batch {self.global_batch:,}")
        if self.steps is not None:
            steps, epochs = ("" if number == 1 else "s" for number in (self.steps, self.epochs))
            lines.append(f"run          {self.steps:,} step{steps}, {self.epochs:,g} epoch{epochs}")
        if self.problem is not None:
            lines.append(f"run          {self.problem}")
        return "\n".join(lines)


def find_subject(file: Path | str | None, overrides: Sequence[str], report: Report) -> Subject:
    """FILE is a config, a run's folder, or data."""
    config = _read_config(file, overrides)
    model, folder, not_apart = config.model, None, None
    vocabulary, positions = None, None
    if model.from_ is not None:
        try:
            folder = local_folder(model.from_, "model.from")
        except UserMistake:
            if model.tokenizer is None:
                raise
            report(f"{model.from_} is not on this machine: packing is shown as for a model that keeps documents apart.")
        else:
            settings = read_settings(folder)
            text, positions = settings.get_text_config(), count_positions(settings)
            not_apart, vocabulary = why_not_packed(str(text.model_type)), int(text.vocab_size)
    elif model.shape is not None:
        shape = find_shape(model.shape) if isinstance(model.shape, str) else model.shape.named()
        not_apart = why_not_packed(shape.traits.model_type)
        vocabulary, positions = shape.vocab, shape.positions
    cells = are_cells(config.data)
    if folder is None and model.tokenizer is None and not cells:
        report("No tokenizer is given: one token per byte. Set model.tokenizer=FOLDER for that of your model.")
        masked = config.train.objective == "masked_lm"
        tokenizer = load_tokenizer("bytes", add_tokens=["<mask>"] if masked else ())
    else:
        tokenizer = load_model_tokenizer(model, folder, config.data, report)
    return Subject(None if file is None else str(file), config, tokenizer, not_apart, vocabulary, positions)


def _read_config(file: Path | str | None, overrides: Sequence[str]) -> Config:
    if file is None:
        return load_config(None, overrides, needs_model=False)
    path = user_path(file, "FILE")
    if path.is_dir() and (run := RunDirectory(path)).exists:
        return load_config(run.config, overrides, needs_model=False)
    if path.suffix.lower() in (".yaml", ".yml"):
        return load_config(path, overrides, needs_model=False)
    given = f"data.path={json.dumps(escape(str(file)), ensure_ascii=False)}"
    return load_config(None, [given, *overrides], needs_model=False)


def preview_data(
    file: Path | str | None, overrides: Sequence[str] = (), *, choice: Choice, drawn: bool = False, report: Report
) -> DataPreview:
    """Decode some examples or sequences of each source."""
    subject = find_subject(file, overrides, report)
    masked = subject.config.train.objective == "masked_lm"
    masks = make_masks(subject.config, subject.tokenizer) if masked else None
    sources = [
        preview_source(
            block,
            subject.tokenizer,
            choice,
            report=report,
            not_apart=subject.not_apart,
            objective=subject.config.train.objective,
            masks=masks,
        )
        for block, _ in subject.config.data.blocks()
    ]
    return DataPreview(subject.file, subject.tokenizer.name, drawn and not choice.sequences, sources)


def measure_data(file: Path | str | None, overrides: Sequence[str] = (), *, report: Report) -> DataStats:
    """Prepare the data as training does, into the same cache, and describe it."""
    subject = find_subject(file, overrides, report)
    config = _with_batch(subject.config)
    data = config.data.model_copy(update={"streaming": False})  # counted as a whole
    tokenizer = subject.tokenizer
    common: dict[str, Any] = {"not_apart": subject.not_apart, "objective": config.train.objective}
    sets, problem = _prepare(data, tokenizer, config.seed, report, common)
    problem = problem or subject.refused()
    if not config.data.streaming:
        report("The tokenized data is in the cache: training with the same settings and tokenizer starts with it.")
    blocks = data.blocks()
    sources = []
    for block, weight in blocks:
        alone = len(blocks) == 1
        # Of a mixture, each again from the cache, which has been reported.
        prepared = sets.training if alone else prepare(block, tokenizer, report=_say_nothing, **common)
        sources.append(
            measure_source(
                block,
                tokenizer,
                prepared,
                weight=weight,
                report=report,
                objective=config.train.objective,
                mask_ratio=config.train.mask_ratio,
            )
        )
    order, train = sets.order, config.train
    assert order.training_count is not None
    loss_tokens = round(sets.mean_loss_tokens * order.training_count * loss_share(config))
    steps = None
    try:
        steps = count_steps(
            epochs=train.epochs,
            steps=train.steps,
            tokens=train.tokens,
            sequences=order.training_count,
            loss_tokens=loss_tokens,
            global_batch=train.global_batch,
        )
    except UserMistake as mistake:
        problem = problem or str(mistake)
    return DataStats(
        file=subject.file,
        tokenizer=tokenizer.name,
        max_length=data.max_length,
        documents=sum(one.documents for one in sources),
        tokens=sum(one.tokens for one in sources),
        sequences=len(sets.training),
        training_sequences=order.training_count,
        validation_sequences=order.validation_count,
        tokens_per_epoch=round(sets.mean_length * order.training_count),
        loss_tokens_per_epoch=loss_tokens if len(sources) > 1 else _of_epoch(sources[0], sets, order.training_count),
        global_batch=train.global_batch,
        steps_per_epoch=round(order.training_count / train.global_batch, 2),
        steps=steps,
        epochs=None if steps is None else round(steps * train.global_batch / order.training_count, 2),
        problem=problem,
        sources=sources,
    )


def _of_epoch(source: SourceStats, sets: Sets, training: int) -> int:
    """Of the loss tokens of all sequences, those of the ones that are not held out."""
    return round(source.loss_tokens / len(sets.training) * training)


def _say_nothing(sentence: str) -> None:
    return


def _prepare(
    data: DataConfig, tokenizer: Tokenizer, seed: int, report: Report, common: Mapping[str, Any]
) -> tuple[Sets, str | None]:
    """The sets of a run. If there is too little data to hold some out: all of it, and why training would refuse."""
    if isinstance(data.validation, str) or len(data.blocks()) > 1:
        return prepare_sets(data, tokenizer, seed=seed, report=report, **common), None
    share = float(data.validation)
    whole = data.model_copy(update={"validation": 0.0})
    sets = prepare_sets(whole, tokenizer, seed=seed, report=report, **common)
    try:
        order = ShuffledOrder(len(sets.training), seed, share)
        return replace(sets, validation=sets.training if share else None, order=order), None
    except UserMistake as mistake:
        return sets, str(mistake)


def _with_batch(config: Config) -> Config:
    """With the global batch that train.grad_accum means on the devices that the config names, or on one."""
    devices = config.hardware.devices if isinstance(config.hardware.devices, int) else 1
    return with_global_batch(config, devices * config.hardware.nodes)

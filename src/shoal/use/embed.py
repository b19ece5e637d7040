"""Embeddings and classes of examples, by an encoder that a run trained: one for each record, or for each cell."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.config.given_run import no_run
from shoal.config.load import load_config
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.data.cells.source import find_cell_tokenizer
from shoal.data.encode import encode
from shoal.data.formats.choose import choose_format
from shoal.data.formats.preference import read_documents
from shoal.data.prepare import options_of, reading_of, settings_of, template_of
from shoal.data.progress import Progress
from shoal.data.sources import Record, read_records, stop
from shoal.mistakes import UserMistake
from shoal.models.emulate import emulated_dtypes, emulated_matmuls
from shoal.paths import cache_root
from shoal.use.evaluate import class_names, read_config
from shoal.use.load import LoadedRun, load_run

Report = Callable[[str], None]
POOLS = ("mean", "cls")


@dataclass(frozen=True)
class Example:
    """The tokens of a record or a cell. `place`: which one it is, in which file."""

    tokens: np.ndarray
    values: np.ndarray | None
    place: tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """What the encoder makes of all examples."""

    run: str
    step: int
    files: tuple[Path, ...]
    places: np.ndarray  # examples × 2: the file of each, and which one it is there
    embeddings: np.ndarray  # examples × hidden size, fp32
    classes: list[str] | None = None  # of a classifier
    probabilities: np.ndarray | None = None  # examples × classes
    cells: bool = False

    @property
    def labels(self) -> list[str]:
        """The most probable class of each example."""
        assert self.classes is not None
        assert self.probabilities is not None
        return [self.classes[one] for one in self.probabilities.argmax(1).tolist()]


def encode_data(
    run: Path,
    changes: Sequence[str] = (),
    *,
    pool: str = "mean",
    step: int | None = None,
    device: str = "auto",
    batch: int = 32,
    classify: bool = False,
    report: Report = lambda _: None,
) -> Encoded:
    """Encode the data of a run, or other data that `changes` name. With `classify` the run must have classes."""
    if pool not in POOLS:
        raise UserMistake(f"--pool {pool} is not one of {', '.join(POOLS)}.")
    if not RunDirectory(run).exists:
        raise no_run(run)
    config = read_config(run, changes)
    if load_config(RunDirectory(run).config).train.objective == "classify":
        classify = True
    elif classify:
        raise UserMistake(f"{run} has no classes: it was not trained with train.objective classify; use shoal embed.")
    loaded = load_run(run, step=step, device=device)
    if not loaded.anatomy.of_encoder:
        raise UserMistake(f"{run} is not an encoder: it was trained with train.objective {config.train.objective}.")
    files, examples = read_examples(config, loaded, report)
    found: list[np.ndarray] = []
    probabilities: list[np.ndarray] = []
    places: list[tuple[int, int]] = []
    progress = Progress(report)
    with torch.no_grad(), emulated_matmuls(emulated_dtypes(loaded.device, torch.float32)):
        while some := list(islice(examples, batch)):
            embedded, logits = _forward(loaded, some, pool)
            found.append(embedded.float().cpu().numpy())
            if classify:
                probabilities.append(logits.float().softmax(-1).cpu().numpy())
            places += [one.place for one in some]
            progress.tick("Embedding", len(places), "examples")
    if not found:
        raise UserMistake(f"There is no example in {config.data.path}.")
    assert loaded.step is not None
    return Encoded(
        run=str(run),
        step=loaded.step,
        files=files,
        places=np.array(places, dtype=np.int64),
        embeddings=np.concatenate(found),
        classes=class_names(loaded) if classify else None,
        probabilities=np.concatenate(probabilities) if classify else None,
        cells=config.data.kinds == {"cells"},
    )


def read_examples(config: Config, loaded: LoadedRun, report: Report) -> tuple[tuple[Path, ...], Iterator[Example]]:
    """The examples of `config.data`, in the order of the files. Labels are not read: there may be none."""
    data = config.data.model_copy(update={"label": None, "pack": False})
    reading = reading_of(data, None, cache_root(None), report)
    template = template_of(data, loaded.tokenizer)
    settings = settings_of(data, reading, template, None, "masked_lm")
    length = settings.max_length
    if reading.source == "cells":
        work = find_cell_tokenizer(data, reading.files, loaded.tokenizer, replace(settings, on_error="skip"))
        return reading.files, _cells(work)
    if reading.source == "tokens":
        raise UserMistake("data.source tokens is one stream, not examples; give records with a text, or text files.")
    options = options_of(settings, template)

    def texts() -> Iterator[Example]:
        chosen, place = None, (-1, 0)
        numbers = {file: number for number, file in enumerate(reading.files)}
        for record in read_records(reading, stop):
            chosen = chosen or choose_format(str(data.format), record, "masked_lm")
            file = numbers.get(record.file, 0)
            place = (file, place[1] + 1 if place[0] == file else 0)
            yield Example(_tokens(loaded, chosen, record, options)[:length], None, place)

    return reading.files, texts()


def _tokens(loaded: LoadedRun, chosen: Any, record: Record, options: Any) -> np.ndarray:
    (document,) = read_documents(chosen, record, options)
    return encode(loaded.tokenizer, [document], keep_empty=True, encoder=True).ids


def _cells(work: Any) -> Iterator[Example]:
    for where in work.cells.ranges():
        made = work(where)
        ends = np.cumsum(made.lengths)
        kept = np.flatnonzero(made.kept).tolist()
        for cell, end, length in zip(kept, ends.tolist(), made.lengths.tolist(), strict=True):
            inside = slice(end - length, end)
            values = None if made.values is None else made.values[inside]
            yield Example(made.ids[inside], values, (where[0], where[1] + cell))


def _forward(loaded: LoadedRun, examples: list[Example], pool: str) -> tuple[Tensor, Tensor]:
    """The pooled last hidden states and, of a classifier, the logits."""
    longest = max(len(one.tokens) for one in examples)
    shape = (len(examples), longest)
    tokens = torch.full(shape, loaded.tokenizer.pad, dtype=torch.int64)
    mask, values = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    for line, one in enumerate(examples):
        size = len(one.tokens)
        tokens[line, :size] = torch.from_numpy(one.tokens.astype(np.int64))
        mask[line, :size] = 1
        if one.values is not None:
            values[line, :size] = torch.from_numpy(one.values.astype(np.int64))
    inputs: dict[str, Tensor] = {"input_ids": tokens, "attention_mask": mask}
    if examples[0].values is not None:
        inputs["token_type_ids"] = values
    inputs = {name: one.to(loaded.device) for name, one in inputs.items()}
    backbone = loaded.model.get_submodule(loaded.anatomy.backbone)
    states: list[Tensor] = []
    hook = backbone.register_forward_hook(lambda module, given, found: states.append(found.last_hidden_state))
    try:
        # The head of a masked language model is not needed.
        logits = loaded.model(**inputs).logits if loaded.anatomy.classifies else backbone(**inputs).last_hidden_state
    finally:
        hook.remove()
    hidden = states[0]
    if pool == "cls":
        return hidden[:, 0], logits
    counted = inputs["attention_mask"][:, :, None].to(hidden.dtype)
    return (hidden * counted).sum(1) / counted.sum(1), logits

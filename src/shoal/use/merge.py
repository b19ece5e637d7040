"""Merges the adapter of a run into its base, one tensor at a time: an ordinary Hugging Face folder."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.choose import choose_checkpoint
from shoal.checkpoint.layout import SliceReader
from shoal.checkpoint.state import MODEL
from shoal.convert.peft import adapter_run
from shoal.convert.shards import DTYPES, SHARD_BYTES, check_dtype, check_output, temporary_folder, write_shards
from shoal.models.adapters import DOWN, MAGNITUDE, UP, row_norms, scale_of
from shoal.models.base import Base, check_drawn_on, find_base, prepare_adapted
from shoal.models.buffers import kept_buffers
from shoal.models.emulate import emulated_dtypes, emulated_matmuls
from shoal.models.names import sources_in_files
from shoal.models.new_rows import ExtendedRows
from shoal.models.nf4 import dequantize, quantize
from shoal.models.prepare import PreparedModel
from shoal.models.read_weights import fresh_parameters, locate_weights
from shoal.models.stored import InFile, InMemory, Stored, open_folder
from shoal.models.tensor_slices import whole
from shoal.models.weights import materialize
from shoal.parallel.precision import read_precision
from shoal.use.load import choose_device, load_run

COMPARED_TOKENS = 64
# Root mean square of the differences over that of the logits, up to which rounding to the dtype explains them.
NORMAL = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.15}


@dataclass(frozen=True)
class Merged:
    """A merged model."""

    output: str
    dtype: str
    tensors: int  # merged with an adapter
    largest_logit_difference: float | None  # None: not compared
    largest_logit: float | None
    relative_difference: float | None = None  # of the logits, root mean square; None: not compared

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        if self.relative_difference is None:
            return self.output
        if self.relative_difference <= NORMAL[self.dtype]:
            verdict = f"That is the rounding of {self.dtype}."
        elif self.dtype == "float32":
            verdict = "That is more than rounding: the merged model is not that of the run. Please report it."
        else:
            verdict = f"That is more than {self.dtype} usually rounds; --dtype fp32 writes weights that round less."
        return (
            f"{self.output}\nThe logits of {COMPARED_TOKENS} random tokens differ from the run's by "
            f"{100 * self.relative_difference:.2g}% (root mean square). {verdict}"
        )


def merge_run(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    compare: bool = True,
    device: str = "auto",
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[str], None] = lambda _: None,
) -> Merged:
    """Write the complete weights of a run's checkpoint (the newest, or that of `step`), in the dtype of its base or in
    `dtype`. With `compare`, the model is then loaded and its logits are compared with those of the run."""
    check_dtype(dtype, "export")
    chosen_device = choose_device(device)
    directory, config = adapter_run(run)
    checkpoint = choose_checkpoint(run, step)
    base = find_base(directory, config)
    check_output(output)
    prepared = prepare_adapted(directory, config, base, adapted=False)
    check_drawn_on(base, chosen_device, directory)
    weights = base_weights(prepared, base, chosen_device)
    merger = Merger(prepared.model, weights, SliceReader(checkpoint.path), scale_of(config.adapter), dtype)
    if config.adapter.kind == "qlora":
        adapters = prepare_adapted(directory, config, base).adapters
        merger.quantized = frozenset(() if adapters is None else adapters.quantized)
        merger.rounding = config.adapter.quantize, read_precision(config.train.precision, "fp32").compute
    with temporary_folder(output, directory.model.iterdir()) as part:
        saved = write_shards(
            part, prepared.model, merger.sizes(), merger.read, dtype=None, shard_bytes=shard_bytes, report=report
        )
    difference = largest = relative = None
    if compare:
        report(f"comparing the logits of {COMPARED_TOKENS} tokens")
        difference, largest, relative = _compare(run, output, checkpoint.step, saved, device)
    return Merged(str(output), str(saved).removeprefix("torch."), len(merger.layers), difference, largest, relative)


def base_weights(prepared: PreparedModel, base: Base, device: torch.device) -> dict[str, Stored]:
    """The parameters and persistent buffers of the base, each read when it is needed: from its folder, or drawn again
    from the seed, and then all in memory."""
    model = prepared.model
    if base.folder is None:
        materialize(model, prepared.anatomy, device=device, dtype=torch.float32, source=base.weights(prepared))
        return {
            name: InMemory(one.detach().cpu())
            for name, one in {**dict(model.named_parameters()), **kept_buffers(model)}.items()
        }
    found = locate_weights(model, Path(base.folder), new_rows=prepared.new_rows)
    dtype = next(iter(found.values())).dtype
    fresh = {name: model.get_parameter(name) for name in fresh_parameters(model, Path(base.folder))}
    found |= {name: InMemory(torch.zeros(one.shape, dtype=dtype)) for name, one in fresh.items()}  # as trained, later
    files = open_folder(Path(base.folder))
    sources = sources_in_files(model, files.files)
    # A buffer that is not in the files has its initial value, also in the merged model.
    for name, buffer in kept_buffers(model).items():
        if name in sources:
            found[name] = InFile(files, sources[name].all_names[0], tuple(buffer.shape), buffer.dtype)
    return found


class Merger:
    """Computes the merged tensors, each when it is written."""

    def __init__(
        self, model: nn.Module, base: Mapping[str, Stored], reader: SliceReader, scale: float, dtype: str | None
    ) -> None:
        self.model, self.base, self.reader, self.scale = model, base, reader, scale
        self.quantized: frozenset[str] = frozenset()  # layers of QLoRA
        self.rounding = ("nf4", torch.float32)  # how they are stored, and the dtype to which they are dequantized
        self.trained = reader.shapes(MODEL)
        down = f".{DOWN}.weight"
        self.layers = {name.removesuffix(down) for name in self.trained if name.endswith(down)}
        buffers = kept_buffers(model)
        self.dtypes = {
            name: DTYPES[dtype] if dtype is not None and name not in buffers else _dtype_in_files(stored)
            for name, stored in base.items()
        }

    def sizes(self) -> dict[str, int]:
        """Name → bytes, of every tensor of the model."""
        return {name: prod(stored.shape) * self.dtypes[name].itemsize for name, stored in self.base.items()}

    def base_weight(self, name: str) -> Tensor:
        found = self.base[name].read(whole(self.base[name].shape))
        layer, _, key = name.rpartition(".")
        if key != "weight" or layer not in self.quantized:
            return found
        kind, dtype = self.rounding  # as in training
        return dequantize(quantize(found, kind), dtype, kind)

    def read(self, name: str) -> Tensor:
        """The merged tensor, rounded once."""
        layer, _, key = name.rpartition(".")
        if name in self.trained:
            found = self.reader.read_whole(MODEL + name)
        elif key == "weight" and layer in self.layers:
            found = self._merge(layer, self.base_weight(name).float())
        else:
            found = self.base_weight(name)
        return found.to(self.dtypes[name])

    def _merge(self, layer: str, weight: Tensor) -> Tensor:
        """`W + scale · B A` and, with DoRA, each row scaled to its trained norm. In fp32."""
        down, up = self._trained(layer, DOWN), self._trained(layer, UP)
        added = self.scale * (up @ down)
        if not isinstance(self.model.get_submodule(layer), nn.Linear):  # Conv1D stores its matrix transposed
            return weight + added.t()
        merged = weight + added
        if f"{layer}.{MAGNITUDE}.weight" in self.trained:
            merged *= (self._trained(layer, MAGNITUDE) / row_norms(merged))[:, None]
        return merged

    def _trained(self, layer: str, child: str) -> Tensor:
        return self.reader.read_whole(f"{MODEL}{layer}.{child}.weight").float()


def _dtype_in_files(stored: Stored) -> torch.dtype:
    return stored.stored.dtype if isinstance(stored, ExtendedRows) else stored.dtype


@torch.no_grad()
def _compare(run: Path, output: Path, step: int, dtype: torch.dtype, device: str) -> tuple[float, float, float]:
    """The largest difference of a logit between the run and the merged model, the largest logit, and the difference of
    all, relative. Both compute in the dtype of the merged model, one after the other."""
    tokens: Tensor | None = None
    logits: list[Tensor] = []
    for folder in (run, output):
        loaded = load_run(folder, step=step if folder == run else None, device=device, dtype=dtype)
        if tokens is None:
            length = min(COMPARED_TOKENS, loaded.positions or COMPARED_TOKENS)
            tokens = torch.randint(loaded.tokenizer.size, (1, length), generator=torch.Generator().manual_seed(0))
        with emulated_matmuls(emulated_dtypes(loaded.device, dtype)):
            logits.append(loaded.model(tokens.to(loaded.device)).logits.float().cpu())
        del loaded
    difference = logits[0] - logits[1]
    relative = float(difference.norm() / logits[0].norm().clamp_min(torch.finfo(torch.float32).tiny))
    return float(difference.abs().max()), float(logits[0].abs().max()), relative

"""Merges the adapter of a run into its base, one tensor at a time: an ordinary Hugging Face folder."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
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
from shoal.models.adapters import DOWN, MAGNITUDE, UP, row_norms, scale_of, without_adapters
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
from shoal.use.load import LoadedRun, choose_device, load_run

COMPARED_TOKENS = 64
# Up to which the logits of a right merge differ from the run's, root mean square, relative. In fp32, before the weights
# are rounded, right merges and wrong ones are orders of magnitude apart: benchmarks/finetune/merge.py measures both.
EXACT = 2e-5
# The same where weights and arithmetic are of the merged model's dtype, more than twice the largest that was measured:
# that finds coarse mistakes only.
ROUNDING = {"float32": EXACT, "float16": 0.008, "bfloat16": 0.08}


@dataclass(frozen=True)
class Compared:
    """The logits of a merged model beside those of its run."""

    largest_logit_difference: float
    largest_logit: float
    relative_difference: float  # root mean square
    adapter_effect: float  # the same, of the run against the run without its adapter


@dataclass(frozen=True)
class Merged:
    """A merged model."""

    output: str
    dtype: str
    tensors: int  # merged with an adapter
    largest_logit_difference: float | None = None  # None: not compared
    largest_logit: float | None = None
    relative_difference: float | None = None  # of the logits, root mean square; None: not compared
    adapter_effect: float | None = None  # the same, of the run against the run without its adapter
    exact_difference: float | None = None  # the same before weights are rounded; None: no memory for fp32
    is_right: bool | None = None  # whether the differences are those of rounding; None: not compared

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        if self.relative_difference is None or self.adapter_effect is None:
            return self.output
        said = (
            f"{self.output}\nThe logits of {COMPARED_TOKENS} random tokens differ from the run's by "
            f"{100 * self.relative_difference:.2g}% (root mean square); the adapter changes them by "
            f"{100 * self.adapter_effect:.2g}%."
        )
        if self.exact_difference is not None and self.dtype != "float32":
            said += (
                f" Before the weights are rounded to {self.dtype} they differ by {100 * self.exact_difference:.2g}%."
            )
        return f"{said} {self._verdict()}"

    def _verdict(self) -> str:
        assert self.relative_difference is not None
        assert self.adapter_effect is not None
        if not self.is_right:
            return "That is more than rounding: the merged model is not that of the run. Please report it."
        said = f"That is the rounding of {self.dtype}."
        if self.dtype != "float32" and self.relative_difference > self.adapter_effect / 2:
            return f"{said} It hides much of what this adapter does: --dtype fp32 rounds less."
        if self.exact_difference is None:
            return f"{said} There is no memory to compare in fp32, which would also find small mistakes."
        return said


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
    merged = Merged(str(output), str(saved).removeprefix("torch."), len(merger.layers))
    if not compare:
        return merged
    report(f"comparing the logits of {COMPARED_TOKENS} tokens")
    return replace(merged, **_compare(run, output, checkpoint.step, saved, merger, chosen_device))


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
        return self.compute(name).to(self.dtypes[name])

    def compute(self, name: str) -> Tensor:
        """The merged tensor, before it is rounded."""
        layer, _, key = name.rpartition(".")
        if name in self.trained:
            return self.reader.read_whole(MODEL + name)
        if key == "weight" and layer in self.layers:
            return self._merge(layer, self.base_weight(name).float())
        return self.base_weight(name)

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


def _compare(
    run: Path, output: Path, step: int, dtype: torch.dtype, merger: Merger, device: torch.device
) -> dict[str, Any]:
    """What `Merged` says about the logits."""
    found = _compare_in(dtype, run, output, step, device)
    exact: float | None = found.relative_difference
    limit = ROUNDING[str(dtype).removeprefix("torch.")]
    is_right = found.relative_difference <= limit
    if dtype != torch.float32:
        exact = None
        if _has_room(device, 4 * sum(prod(stored.shape) for stored in merger.base.values())):
            exact = _compare_in(torch.float32, run, output, step, device, merger).relative_difference
            # What training has dequantized to 16 bits, the run dequantizes to 32 here.
            dequantized = merger.rounding[1] if merger.quantized else torch.float32
            is_right = is_right and exact <= ROUNDING[str(dequantized).removeprefix("torch.")]
    return asdict(found) | {"exact_difference": exact, "is_right": is_right}


def _compare_in(
    dtype: torch.dtype, run: Path, output: Path, step: int, device: torch.device, merger: Merger | None = None
) -> Compared:
    """Run and merged model, one after the other, computed in `dtype`; with a `merger`, of its weights before they were
    rounded in place of those in the files."""
    loaded = load_run(run, step=step, device=str(device), dtype=dtype)
    tokens = random_tokens(loaded)
    expected = compute_logits(loaded, tokens, dtype)
    with without_adapters(loaded.model):
        base = compute_logits(loaded, tokens, dtype)
    del loaded
    loaded = load_run(output, device=str(device), dtype=dtype)
    if merger is not None:
        with torch.no_grad():
            for name, parameter in loaded.model.named_parameters():
                parameter.copy_(merger.compute(name))
    return compare_logits(compute_logits(loaded, tokens, dtype), expected, base)


def _has_room(device: torch.device, size: int) -> bool:
    """Whether the device has memory for weights of `size` bytes, and a fifth more for one tensor and its logits."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) > 1.2 * size
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return True  # not Linux
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return available is None or int(available) * 1024 > 1.2 * size


def random_tokens(loaded: LoadedRun, seed: int = 0) -> Tensor:
    length = min(COMPARED_TOKENS, loaded.positions or COMPARED_TOKENS)
    return torch.randint(loaded.tokenizer.size, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def compute_logits(loaded: LoadedRun, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    with emulated_matmuls(emulated_dtypes(loaded.device, dtype)):
        return loaded.model(tokens.to(loaded.device)).logits.float().cpu()  # type: ignore[no-any-return]


def compare_logits(merged: Tensor, expected: Tensor, base: Tensor) -> Compared:
    """`expected` are the logits of the run, `base` those of the run without its adapter."""
    tiny = torch.finfo(torch.float32).tiny
    difference, effect = merged - expected, expected - base
    return Compared(
        largest_logit_difference=float(difference.abs().max()),
        largest_logit=float(expected.abs().max()),
        relative_difference=float(difference.norm() / expected.norm().clamp_min(tiny)),
        adapter_effect=float(effect.norm() / expected.norm().clamp_min(tiny)),
    )

"""Loads a model on one device, from a run's checkpoint of any parallel strategy or from a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.choose import choose_checkpoint
from shoal.checkpoint.layout import SliceReader
from shoal.checkpoint.state import load_parameters
from shoal.checkpoint.store import MANIFEST
from shoal.config.given_run import no_run
from shoal.config.load import load_config
from shoal.config.run import RunDirectory
from shoal.config.schema import Config
from shoal.data.formats.chat_template import read_template
from shoal.data.tokenizer import load_tokenizer
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy
from shoal.models.attention import MASKLESS
from shoal.models.base import check_drawn_on, find_base, prepare_adapted
from shoal.models.buffers import kept_buffers
from shoal.models.prepare import prepare_model, read_blueprint
from shoal.models.weights import Weights, materialize
from shoal.parallel.adapters import use_adapters, use_quantized
from shoal.parallel.device import inspect_device
from shoal.parallel.float8 import check_float8, use_float8
from shoal.parallel.precision import DTYPES, read_precision


@dataclass(frozen=True)
class LoadedRun:
    """A model ready for inference: in eval mode, with an attention implementation that supports a KV cache."""

    path: Path
    model: Any  # the transformers model
    anatomy: Anatomy
    tokenizer: Tokenizer
    config: Config | None  # None: a Hugging Face folder, which does not record how it was trained
    step: int | None
    device: torch.device
    positions: int | None  # the model's maximum sequence length, if known


def load_run(
    run: Path,
    *,
    step: int | None = None,
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    vectors: torch.dtype | None = None,
    float8: bool = False,
) -> LoadedRun:
    """Load the newest complete checkpoint of `run`, or that of `step`.

    `dtype` None keeps the dtype of the saved weights; an adapter and its base have that of the matmuls in training.
    `vectors` is the dtype of norms and biases, if it differs. `float8`: with the matmuls of `train.precision: fp8`.
    """
    chosen_device = choose_device(device)
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise UserMistake(f"The dtype {dtype} is not one of {', '.join(DTYPES)}.")
    wanted = DTYPES[dtype] if isinstance(dtype, str) else dtype
    if RunDirectory(run).exists:
        return _load_checkpoint(RunDirectory(run), step, chosen_device, wanted, vectors, float8)
    if (run / "config.json").is_file() and not (run / MANIFEST).is_file():
        if step is not None:
            raise UserMistake(f"{run} is a Hugging Face folder, which has no steps; omit --step.")
        return _load_folder(run, chosen_device, wanted)
    raise no_run(run)


def able_to_write(loaded: LoadedRun) -> LoadedRun:
    """The same; a UserMistake if it is an encoder."""
    if loaded.anatomy.of_encoder:
        raise UserMistake(f"{loaded.path} is an encoder, which writes no text; use shoal embed or shoal predict.")
    return loaded


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserMistake(f"--device {name} is not a device; give auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserMistake(f"--device {name} is not supported; give auto, cpu, cuda or cuda:N.")
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= present:
        raise UserMistake(f"--device {name}: this machine has {present} CUDA devices; give one of those, or cpu.")
    return device


def _load_checkpoint(
    run: RunDirectory,
    step: int | None,
    device: torch.device,
    dtype: torch.dtype | None,
    vectors: torch.dtype | None,
    float8: bool,
) -> LoadedRun:
    config = load_config(run.config)
    checkpoint = choose_checkpoint(run.path, step)
    # The run's own copy, unless the name is that of a built-in tokenizer.
    tokenizer = load_tokenizer(config.model.tokenizer or str(run.model), run.model, add_tokens=config.model.add_tokens)
    if tokenizer.chat_template is None and config.data.chat_template is not None:  # a built-in one has none
        tokenizer.chat_template = read_template(str(run.model / "chat_template.jinja"))
    plan = read_blueprint(run.model)
    precision = read_precision(config.train.precision, config.train.reduce_dtype)
    reader = SliceReader(checkpoint.path)
    if config.adapter.kind == "none":
        prepared = prepare_model(plan, attention=config.model.attention, longest=config.data.max_length)
        model, anatomy = prepared.model, prepared.anatomy
        materialize(model, anatomy, device=device, dtype=dtype or precision.weights, source=None, vectors=vectors)
        load_parameters(reader, dict(model.named_parameters()) | kept_buffers(model))
    else:
        base = find_base(run, config)
        check_drawn_on(base, device, run)
        prepared = prepare_adapted(run, config, base, attention=config.model.attention, longest=config.data.max_length)
        model, anatomy = prepared.model, prepared.anatomy
        # Adapter and base in one dtype: that in which training computes with both.
        held = dtype or precision.compute
        use_quantized(model, held)
        materialize(model, anatomy, device=device, dtype=held, source=base.weights(prepared))
        load_parameters(reader, {name: one for name, one in model.named_parameters() if one.requires_grad})
    if float8:
        check_float8(model, inspect_device(device))
        use_float8(anatomy.block_modules(model))
    use_adapters(model, anatomy, together=False)  # after float8, whose matmuls they add to
    return LoadedRun(
        path=run.path,
        model=_for_inference(model),
        anatomy=anatomy,
        tokenizer=tokenizer,
        config=config,
        step=checkpoint.step,
        device=device,
        positions=plan.positions,
    )


def _load_folder(folder: Path, device: torch.device, dtype: torch.dtype | None) -> LoadedRun:
    plan = read_blueprint(folder)
    saved = getattr(plan.settings, "dtype", None)
    tokenizer = load_tokenizer(str(folder), folder)
    prepared = prepare_model(plan, longest=plan.positions or 0)
    model, anatomy = prepared.model, prepared.anatomy
    as_saved = saved if isinstance(saved, torch.dtype) else torch.float32
    materialize(model, anatomy, device=device, dtype=dtype or as_saved, source=Weights(folder, seed=0))
    return LoadedRun(
        path=folder,
        model=_for_inference(model),
        anatomy=anatomy,
        tokenizer=tokenizer,
        config=None,
        step=None,
        device=device,
        positions=plan.positions,
    )


def _for_inference(model: Any) -> Any:
    """Replace training's attention, which builds no masks, by sdpa: generation with a KV cache needs masks."""
    if model.config._attn_implementation == MASKLESS:
        model.set_attn_implementation("sdpa")
    return model.eval().requires_grad_(False)

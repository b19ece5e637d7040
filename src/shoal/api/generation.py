"""Load a trained model, and generate text with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config.given_run import run_folder
from shoal.imports import importing

if TYPE_CHECKING:
    from shoal.use.generate import Generated
    from shoal.use.load import LoadedRun


def load_run(run: Path | str, *, step: int | None = None, device: str = "auto", dtype: str | None = None) -> LoadedRun:
    """Load the model and tokenizer of a run (its newest checkpoint, or that of `step`) or of a Hugging Face folder.

    `dtype` is fp32, bf16 or fp16; by default, that of the saved weights.
    """
    folder = run_folder(run)
    with importing("torch"):
        from shoal.use.load import load_run as load

    return load(folder, step=step, device=device, dtype=dtype)


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
    if isinstance(run, Path | str):
        run_folder(run)
    with importing("torch"):
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
    if isinstance(run, Path | str):
        run_folder(run)
    with importing("torch"):
        from shoal.use.chat import Chat, converse
        from shoal.use.generate import Sampling

    sampling = Sampling(tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    conversation = Chat(load_run(run, step=step, device=device, dtype=dtype), sampling, say)
    converse(conversation, lines, write, say)

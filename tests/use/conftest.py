"""Runs for inference: a small one under three strategies, one trained on instructions, one with a chat template."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.data.tokenizer import ByteTokenizer
from tests.harness import settings, train_again_on

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("use") / "runs"


@pytest.fixture(scope="session")
def instructions(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same examples in the format alpaca, which has a prompt of its own for generation too."""
    path = tmp_path_factory.mktemp("alpaca") / "instructions.jsonl"
    records = map(json.loads, instructions.read_text().splitlines())
    path.write_text(
        "".join(
            json.dumps({"instruction": record["prompt"], "output": record["completion"]}) + "\n" for record in records
        )
    )
    return path


@pytest.fixture(scope="session")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with large random weights: a small, barely trained one would repeat a single letter."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=88,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=256,
        eos_token_id=257,
    )
    folder = tmp_path_factory.mktemp("lively")
    model = LlamaForCausalLM(sizes)
    with torch.no_grad():
        model.lm_head.weight[:32], model.lm_head.weight[127:] = 0, 0  # non-printable and special tokens
    model.save_pretrained(folder)
    return folder


def train(world_size: int, data: Path, runs: Path, model: Path, **changes: Any) -> Path:
    wanted = {"train__steps": 4, "train__lr": 1e-3, "checkpoint__every": 2, "eval__every": 2, "data__validation": 0.05}
    start = {"model__from": str(model), "model__shape": None}
    return train_again_on(world_size, settings(data, **{**wanted, **start, **changes}), runs)


@pytest.fixture(scope="session")
def text_runs(runs: Path, text: Path, lively: Path) -> dict[str, Path]:
    """Strategy → run."""
    return {
        strategy: train(size, text, runs, lively, name=strategy, parallel__strategy=strategy, eval__batches=2)
        for strategy, size in (("single", 1), ("ddp", 2), ("fsdp", 2))
    }


@pytest.fixture(scope="session")
def text_run(text_runs: dict[str, Path]) -> Path:
    return text_runs["single"]


@pytest.fixture(scope="session")
def instruction_run(runs: Path, instructions: Path, lively: Path) -> Path:
    """Packed, in bf16-mixed, on two ranks: typical fine-tuning."""
    return train(
        2,
        instructions,
        runs,
        lively,
        name="instructions",
        parallel__strategy="fsdp",
        data__pack=True,
        data__max_length=256,
        data__validation=0.2,
        train__precision="bf16-mixed",
    )


@pytest.fixture(scope="session")
def chat_run(runs: Path, text: Path, lively: Path) -> Path:
    tokenizer = ByteTokenizer()
    tokenizer.hugging_face.chat_template = CHAT_TEMPLATE
    tokenizer.save(runs.parent / "chat-tokenizer")
    return train(
        1, text, runs, lively, name="chat", train__steps=2, model__tokenizer=str(runs.parent / "chat-tokenizer")
    )


@pytest.fixture(scope="session")
def conversation_run(runs: Path, lively: Path) -> Path:
    """Trained on conversations, with a template by name for a tokenizer that has none."""
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "import this"}]
    chats = runs.parent / "chats.jsonl"
    chats.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns * 2}) + "\n")
    return train(
        1,
        chats,
        runs,
        lively,
        name="conversations",
        train__steps=2,
        data__source="json",
        data__chat_template="chatml",
        data__max_length=256,
        data__validation=0,
    )


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)

    def hold_mistake(self, *parts: str) -> None:
        """Status 2, nothing on standard output, and a sentence with these parts."""
        assert (self.status, self.out) == (2, ""), self
        assert self.err.startswith("shoal: ")
        assert self.err.count("\n") == 1, self.err
        for part in parts:
            assert part in self.err


@pytest.fixture(scope="session", autouse=True)
def _train_before_anything_is_generated(text_runs: object, instruction_run: Path, chat_run: Path) -> None:
    """Ranks are forked, and generation starts threads in this process, which a fork would lose."""


@pytest.fixture
def shoal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command, in this process; `typed` is what comes through its standard input."""
    from shoal.cli import main

    def run(*arguments: object, typed: str = "") -> Ended:
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        capsys.readouterr()
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        return Ended(status, said.out, said.err)

    return run

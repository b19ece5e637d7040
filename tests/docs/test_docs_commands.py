"""The commands of the pages run, in order, in a folder with the files that the page shows."""

import os
import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import COMMANDS, DOCS, PAGES, ROOT, Block, blocks
from tests.docs.running import page_environment, run_page

# Real weights for the pages that fine-tune SmolLM2; without them a tiny model with the same tokenizer interface.
SMOLLM2 = os.environ.get("SHOAL_TEST_SMOLLM2")
# Nothing is trained on these: seconds of one core.
QUICK = {"plan.md", "tutorials/out-of-memory.md"}


def names(*, quick: bool) -> list[str]:
    """Pages with commands that run, relative to docs/."""
    pages = [page for page in [*PAGES, ROOT / "README.md"] if any(is_run(block) for block in blocks(page))]
    found = [Path(os.path.relpath(page, DOCS)).as_posix() for page in pages]
    return [name for name in found if (name in QUICK) == quick]


def is_run(block: Block) -> bool:
    return block.language in COMMANDS and block.not_run is None


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return page_environment(tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("name", names(quick=True))
def test_the_commands_of_the_page_run(name: str, tmp_path: Path, env: dict[str, str]) -> None:
    assert run_page(DOCS / name, tmp_path, env, exact=True) > 0


@pytest.fixture(scope="module")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In place of SmolLM2: its special tokens and template, and hardly any weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shoal.data.formats.chat_template import read_template
    from shoal.data.tokenizer import ByteTokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = ByteTokenizer(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = read_template("chatml")
    tokenizer.save(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    end = tokenizer.hugging_face.eos_token_id
    shape = LlamaConfig(**sizes, vocab_size=264, max_position_embeddings=1024, eos_token_id=end, bos_token_id=None)
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", names(quick=False))
def test_the_commands_of_the_page_train(
    name: str, tmp_path: Path, env: dict[str, str], request: pytest.FixtureRequest
) -> None:
    needs_weights = any("models/smollm2-135m" in one.body and is_run(one) for one in blocks(DOCS / name))
    if needs_weights:
        base = Path(SMOLLM2) if SMOLLM2 else request.getfixturevalue("tiny_chat_model")
        shutil.copytree(base, tmp_path / "models" / "smollm2-135m")
    # A tiny model answers nonsense.
    assert run_page(DOCS / name, tmp_path, env, compared=not needs_weights or SMOLLM2 is not None) > 0

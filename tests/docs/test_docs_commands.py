"""The commands of the pages run, in order, in a folder with the files that the page shows."""

import os
import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import COMMANDS, DOCS, PAGES, blocks
from tests.docs.running import page_environment, run_page

# Real weights for the pages that fine-tune SmolLM2; without them a tiny model with the same tokenizer interface.
SMOLLM2 = os.environ.get("SHOAL_TEST_SMOLLM2")
# Nothing is trained on these: seconds of one core.
QUICK = {"index.md", "tutorials/index.md", "tutorials/out-of-memory.md"}


def names(runs: bool) -> list[str]:
    found = []
    for page in PAGES:
        some = any(one.language in COMMANDS and one.not_run is None for one in blocks(page))
        name = page.relative_to(DOCS).as_posix()
        if some and (name in QUICK) != runs:
            found.append(name)
    return found


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return page_environment(tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("name", names(runs=False))
def test_the_commands_of_the_page_run(name: str, tmp_path: Path, env: dict[str, str]) -> None:
    assert run_page(DOCS / name, tmp_path, env) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", names(runs=True))
def test_the_commands_of_the_page_train(
    name: str, tmp_path: Path, env: dict[str, str], request: pytest.FixtureRequest
) -> None:
    if any("models/smollm2-135m" in one.body for one in blocks(DOCS / name)):
        base = Path(SMOLLM2) if SMOLLM2 else request.getfixturevalue("tiny_chat_model")
        (tmp_path / "models").mkdir()
        shutil.copytree(base, tmp_path / "models" / "smollm2-135m")
    assert run_page(DOCS / name, tmp_path, env) > 0

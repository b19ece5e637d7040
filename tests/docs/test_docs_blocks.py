"""How pages are read and compared: what the other tests here rely on."""

from pathlib import Path

import pytest

from benchmarks import page_blocks as reading
from benchmarks.page_blocks import blocks, commands, missing
from tests.docs.running import is_plain

PAGE = """
<!-- status: 3 -->
<!-- smaller: train.steps=2 -->
```console
$ shoal plan run.yaml \\
    hardware.devices=2
it fits
$ shoal status
```

```yaml title="run.yaml"
name: one
```

<!-- not run: needs a GPU -->
```bash
shoal train run.yaml   # a comment
```
"""


def test_a_page_says_what_is_a_file_what_is_run_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    first, file, marked = blocks(tmp_path / "page.md")
    plan, status = commands(first)
    assert (plan.words, plan.shown, plan.status) == (
        ["shoal", "plan", "run.yaml", "hardware.devices=2"],
        ("it fits",),
        0,
    )
    assert (status.text, status.status, status.smaller) == ("shoal status", 3, "train.steps=2")
    assert (file.title, file.body) == ("run.yaml", "name: one\n")
    assert (marked.not_run, marked.place) == ("needs a GPU", "page.md:16")
    assert commands(marked)[0].words == ["shoal", "train", "run.yaml"]


@pytest.mark.parametrize(
    ("shown", "printed", "lost"),
    [
        (("loss 4.62",), "loss 4.63\n", None),
        (("loss 4.62",), "lost 4.63\n", "loss 4.62"),
        (("a", "…", "c"), "a\nb\nc\n", None),
        (("c", "a"), "a\nb\nc\n", "a"),
        (("saved step-…: done",), "saved step-0007: done\n", None),
        (("shoal: a mistake of one", "sentence."), "shoal: a mistake of one sentence.\n", None),
        (("step 1/6  loss 1", "step 2/6  loss 2"), "step 6/6  loss 3  9 tok/s\n", None),
    ],
)
def test_output_is_compared_in_its_stable_parts(shown: tuple[str, ...], printed: str, lost: str | None) -> None:
    assert missing(shown, printed, exact=False) == lost


def test_numbers_count_where_output_is_exact() -> None:
    assert missing(("needs 86 GiB",), "needs 87 GiB\n", exact=True) == "needs 86 GiB"


@pytest.mark.parametrize(
    ("command", "plain"),
    [
        ("shoal plan run.yaml", True),
        ("shoal generate runs/x 'a | b'", True),
        ("python train.py name=x", True),
        ("shoal plan run.yaml | head", False),
        ("cat run.yaml", False),
    ],
)
def test_what_needs_no_shell_runs_in_a_fork(command: str, plain: bool) -> None:
    assert is_plain(command) is plain

"""Which of several failed ranks the launcher reports: the one that caused the others to fail."""

import json
import signal
from pathlib import Path
from typing import TextIO

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shoal.launch.processes import cause_of, record_errors


def died(exitcode: int, at: int) -> ProcessFailure:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file="")
    failure.timestamp = at
    return failure


@pytest.mark.parametrize(
    ("deaths", "named"),
    [
        # The agent ends the survivors in the same second in which it finds the dead rank.
        ({0: (-signal.SIGTERM, 100), 1: (-signal.SIGKILL, 100)}, 1),
        # A survivor reports its lost connection before the agent finds the dead rank.
        ({0: (1, 100), 1: (-signal.SIGKILL, 101)}, 1),
        ({0: (-signal.SIGABRT, 100), 1: (-signal.SIGSEGV, 101)}, 1),
        # The first of several exceptions.
        ({0: (1, 102), 1: (1, 100), 2: (-signal.SIGTERM, 99)}, 1),
        ({0: (-signal.SIGTERM, 100), 1: (-signal.SIGTERM, 100)}, 0),
    ],
)
def test_the_rank_that_caused_the_failure_is_reported(deaths: dict[int, tuple[int, int]], named: int) -> None:
    rank, failure = cause_of({rank: died(*death) for rank, death in deaths.items()})
    assert (rank, failure.exitcode) == (named, deaths[named][0])


def test_a_rank_killed_while_it_writes_its_error_leaves_no_half_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The agent reads the file of a dead rank, and half a file of JSON would end the agent too."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def killed_while_writing(value: object, file: TextIO) -> None:
        file.write('{"message": ')
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(json, "dump", killed_while_writing)
        with pytest.raises(KeyboardInterrupt):
            _fail()
    assert not (tmp_path / "error.json").exists()
    with pytest.raises(ValueError, match="as planned"):
        _fail()
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    assert "as planned" in str(failure.message)


@record_errors
def _fail() -> None:
    raise ValueError("as planned")

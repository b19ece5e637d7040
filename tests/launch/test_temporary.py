"""Temporary folders of killed processes are removed, and no others."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from shoal.temporary import remove_abandoned, temporary_folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leave_folder() -> None:
    """As a process that is killed while it uses its folder."""
    child = os.fork()
    if child == 0:
        with temporary_folder() as folder:
            (folder / "heartbeats").mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_the_folder_of_a_killed_process_is_removed_and_others_are_not(temporary: Path) -> None:
    (temporary / "shoal-mine").mkdir()
    (temporary / "shoal-mine" / "thesis.tex").touch()
    (temporary / "shoal-file").touch()
    (temporary / "shoal-link").symlink_to(temporary / "shoal-mine")
    others = {path.name for path in temporary.iterdir()}
    leave_folder()
    assert {path.name for path in temporary.iterdir()} != others
    with temporary_folder() as folder:
        assert {path.name for path in temporary.iterdir()} == {*others, folder.name}
        remove_abandoned()  # as another start does while this one runs
        assert folder.is_dir()
    assert {path.name for path in temporary.iterdir()} == others

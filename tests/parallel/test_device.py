"""What is said of the machine."""

import os

import pytest
import torch

from shoal.parallel.device import describe_machine


def test_a_machine_that_does_not_say_which_cores_are_ours_is_described_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS, for one; every training describes its machine."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert describe_machine(torch.device("cpu"))["cores"] == os.cpu_count()

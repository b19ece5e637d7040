"""The description of the machine."""

import os

import pytest
import torch

from shoal.parallel.device import describe_machine


def test_a_system_without_sched_getaffinity_is_described_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as macOS; every training run describes its machine."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert describe_machine(torch.device("cpu"))["cores"] == os.cpu_count()

"""What is costly is done once per process."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.models import prepare
from shoal.train import resolve, setup
from tests.harness import run_ranks, settings


@pytest.mark.parametrize("world_size", [1, 2])
def test_model_and_forecast_are_built_once_per_process(
    world_size: int, instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, counted)

    count(prepare, "_build_on_meta")
    count(prepare, "read_anatomy")
    count(resolve, "choose")
    count(setup, "set_up")
    config = settings(instructions, train__steps=1, parallel__strategy="auto", train__micro_batch="auto")

    def be() -> Counter[str]:
        api.train(api.config_from_mapping(config), runs=tmp_path)
        return calls

    for found in run_ranks(world_size, be):
        assert (found["_build_on_meta"], found["read_anatomy"], found["choose"]) == (1, 1, 1)

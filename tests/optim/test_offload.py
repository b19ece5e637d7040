"""Offloaded optimizer state is in its store, and its files are removed."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.config.schema import TrainConfig
from shoal.optim.offload import BUCKET, Store, buckets
from shoal.optim.optimizer import make_optimizer


class RecordingStore(Store):
    """Records the tensors it has allocated."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder)
        self.given: list[torch.Tensor] = []

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        self.given.append(super().empty_like(tensor))
        return self.given[-1]


@pytest.mark.parametrize(("name", "fields"), [("adamw", 2), ("adamw8bit", 4), ("sgd", 1), ("lion", 1)])
def test_every_moment_of_every_optimizer_is_in_the_store(name, fields, tmp_path):
    store = RecordingStore(tmp_path)
    parameters = {f"weight{index}": torch.nn.Parameter(torch.randn(64, 65)) for index in range(3)}
    train = TrainConfig.model_validate({"optimizer": {"name": name}})
    optimizer = make_optimizer(parameters, train, None, store=store)  # type: ignore[arg-type]
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.randn(64, 65)
        optimizer.step(0.1, torch.tensor(True))
    held = {value.data_ptr() for key, value in optimizer.state().items() if value.dim()}
    assert held == {tensor.data_ptr() for tensor in store.given}
    assert len(held) == 3 * fields
    assert list(tmp_path.iterdir()) == [], "the files are unlinked, so that none is left behind"


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weights_that_a_gpu_keeps_on_the_host_are_clipped_and_updated_in_one_pass(name):
    on_gpu = SimpleNamespace(shapes={}, parallel_dims=SimpleNamespace(device=torch.device("cuda")))
    train = TrainConfig.model_validate({"optimizer": {"name": name}})
    start, found = torch.randn(33, 65), []
    for placement in (on_gpu, None):
        weight = torch.nn.Parameter(start.clone())
        optimizer = make_optimizer({"weight": weight}, train, None, placement=placement)  # type: ignore[arg-type]
        assert optimizer.takes_factor is (placement is on_gpu)
        assert not optimizer.own_kernels, "torch's kernels take no gradients of another dtype"
        for index, usable in enumerate((True, False, True)):
            gradient = torch.sin(torch.arange(33 * 65) + index).view(33, 65)
            weight.grad = gradient if optimizer.takes_factor else gradient * 0.25
            optimizer.step(0.1, torch.tensor(usable), torch.tensor(0.25) if optimizer.takes_factor else None)
        found.append(optimizer.state() | {"weight": weight.detach()})
    for key, value in found[1].items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-5, atol=1e-6)


def test_parameters_are_grouped_into_buckets_of_bounded_size():
    sizes = [BUCKET // 2, BUCKET // 2, 8, 2 * BUCKET, 8]
    parameters = {str(index): torch.nn.Parameter(torch.empty(size, device="meta")) for index, size in enumerate(sizes)}
    assert [list(group) for group in buckets(parameters)] == [["0", "1"], ["2"], ["3"], ["4"]]

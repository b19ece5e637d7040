"""What people bring to a loop of their own trains on two ranks as in one process, or is refused in one sentence."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import shoal
from shoal.launch.custom import explain
from shoal.mistakes import UserMistake
from tests.custom.loops import settings
from tests.harness import lines, run_ranks, slow

WIDTH, BATCH = 6, 8


def data() -> "DataLoader[Any]":
    drawn = torch.Generator().manual_seed(5)
    inputs = torch.randn(32, WIDTH, generator=drawn)
    return DataLoader(TensorDataset(inputs, inputs.abs().sum(1, keepdim=True)), batch_size=BATCH)


def mlp(outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, outputs))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def fit(run: Any, model: nn.Module, loss: Callable[[Any, Tensor, Tensor], Tensor]) -> list[float]:
    """The plainest loop."""
    model, optimizer, loader = run.prepare(model, adam(model), data())
    for inputs, targets in run.steps(loader):
        run.backward(loss(model, inputs, targets))
        run.step(optimizer)
    return sums(model)


def sums(model: nn.Module) -> list[float]:
    """Of each parameter."""
    whole = (one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters())
    return [float(one.detach().double().sum()) for one in whole]


def error(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(model(inputs), targets)


def hugging_face(run: Any) -> list[float]:
    """A model of transformers whose embedding and head are one tensor, and which computes its own loss."""
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, vocab_size=16, tie_word_embeddings=True))
    tokens = torch.randint(0, 16, (32, 6), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens), batch_size=BATCH)
    model, optimizer, loader = run.prepare(model, adam(model), loader)
    for (ids,) in run.steps(loader):
        run.backward(model(input_ids=ids, labels=ids).loss)
        run.step(optimizer)
    return sums(model)


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = mlp(), mlp()

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        return {"mean": self.inner(inputs), "more": (self.other(inputs), "name")}


def dictionary(run: Any) -> list[float]:
    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        found = model(inputs)
        return F.mse_loss(found["mean"] + found["more"][0], targets)

    return fit(run, Outputs(), loss)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.never = mlp(), nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.inner(inputs)
        return found


def unused(run: Any) -> list[float]:
    return fit(run, Unused(), error)


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decode.weight = self.encode.weight

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.decode(torch.tanh(self.encode(inputs)))
        return found


def tied(run: Any) -> list[float]:
    return fit(run, Tied(), lambda model, inputs, targets: F.mse_loss(model(inputs), inputs))


def gradient_penalty(run: Any) -> list[float]:
    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs.requires_grad_()
        outputs = model(inputs)
        (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.mse_loss(outputs, targets) + (slopes.norm(dim=1) - 1).square().mean()

    return fit(run, mlp(), loss)


def plateau(run: Any) -> list[float]:
    model, rates = mlp(), []
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    model, optimizer, loader, schedule = run.prepare(model, optimizer, data(), schedule)
    for inputs, targets in run.steps(loader):
        run.backward(error(model, inputs, targets))
        if run.step(optimizer):
            schedule.step(run.evaluate(lambda batch: error(model, *batch), data()))
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-2, 1e-3, 1e-4])
    return sums(model)


def average_of_weights(run: Any) -> list[float]:
    """Made before the model is prepared, as most scripts do; of whole tensors, as FSDP needs it."""
    model = mlp()
    average = copy.deepcopy(model)
    model, optimizer, loader = run.prepare(model, adam(model), data())
    for inputs, targets in run.steps(loader):
        run.backward(error(model, inputs, targets))
        if run.step(optimizer):
            with torch.no_grad():
                for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(new.full_tensor() if isinstance(new, DTensor) else new, 0.5)
    return sums(average)


def torch_average(run: Any) -> list[float]:
    model = mlp()
    model, optimizer, loader = run.prepare(model, adam(model), data())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for inputs, targets in run.steps(loader):
        run.backward(error(model, inputs, targets))
        if run.step(optimizer):
            average.update_parameters(model)
    return sums(average)


def plain_average(run: Any) -> list[float]:
    model = mlp()
    average = AveragedModel(model)
    average.update_parameters(run.prepare(model, adam(model), data())[0])
    return []


def own_clipping(run: Any) -> list[float]:
    model = mlp()
    model, optimizer, loader = run.prepare(model, adam(model), data())
    for inputs, targets in run.steps(loader):
        run.backward(error(model, inputs, targets))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        run.step(optimizer)
    return sums(model)


def forward_between(run: Any) -> list[float]:
    """A forward pass between the backward pass and the update: FSDP gathers weights that are old after it."""
    model = mlp()
    model, optimizer, loader = run.prepare(model, adam(model), data())
    for inputs, targets in run.steps(loader):
        run.backward(error(model, inputs, targets))
        with torch.no_grad():
            model(inputs)
        run.step(optimizer)
    return sums(model)


def batch_norm(run: Any) -> list[float]:
    """Statistics are those of a micro-batch; an evaluation and a checkpoint have the running ones of rank 0."""
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
    model, optimizer, loader = run.prepare(model, adam(model), data())
    for inputs, targets in run.steps(loader):
        run.backward(error(model, inputs[:, None], targets))
        run.step(optimizer)
    run.evaluate(lambda batch: error(model, batch[0][:, None], batch[1]), data())
    assert [run.mean(one) for one in model[1].running_mean] == pytest.approx(model[1].running_mean.tolist())
    return sums(model)


def synchronized_norm(run: Any) -> list[float]:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return fit(run, nn.SyncBatchNorm.convert_sync_batchnorm(model), error)


def zero_grad(run: Any) -> list[float]:
    model = mlp()
    model, optimizer, loader = run.prepare(model, adam(model), data())
    for inputs, targets in run.steps(loader):
        model.zero_grad()
        run.backward(error(model, inputs, targets))
        run.step(optimizer)
    return sums(model)


QUICK = [("ddp", hugging_face), ("ddp", batch_norm), ("fsdp", average_of_weights), ("zero2", forward_between)]
SLOW = [
    ("fsdp", hugging_face),
    ("fsdp", batch_norm),
    ("ddp", dictionary),
    ("fsdp", tied),
    ("fsdp", plateau),
    ("fsdp", unused),
    ("ddp", gradient_penalty),
    ("ddp", torch_average),
]
REFUSED = [
    ("ddp", unused, "Some trained parameters of the model had no gradient"),
    ("fsdp", gradient_penalty, "needs weights that FSDP has freed, as a gradient of gradients does"),
    ("fsdp", torch_average, "A model that FSDP has sharded cannot be copied; copy it before run.prepare"),
    ("fsdp", plain_average, "A plain tensor was combined with a parameter that FSDP has sharded; take its whole value"),
]

Case = Callable[[Any], list[float]]


def train(case: Case, world_size: int, runs: Path, **changes: Any) -> list[float]:
    """The losses, and the sums of the trained parameters."""
    given = settings(name=case.__name__, checkpoint__at_end=False, checkpoint__every=9, **changes)

    def script() -> list[float]:
        with shoal.init(run_dir=str(runs), **given) as run:
            return case(run)

    found: list[float] = run_ranks(world_size, script)[0]
    return [*(line["loss"] for line in lines(runs / case.__name__)), *found]


@pytest.mark.parametrize(("strategy", "case"), [*QUICK, *(slow(*one) for one in SLOW)])
def test_two_ranks_train_it_as_one_process_does(strategy: str, case: Case, tmp_path: Path) -> None:
    one = train(case, 1, tmp_path / "one", train__micro_batch=BATCH // 2)
    two = train(case, 2, tmp_path / "two", parallel__strategy=strategy)
    assert two == pytest.approx(one, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case", "sentence"), REFUSED, ids=lambda one: getattr(one, "__name__", None))
def test_what_cannot_be_sharded_is_refused_in_one_sentence(
    strategy: str, case: Case, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r".") as refused:
        train(case, 2, tmp_path, parallel__strategy=strategy)
    said = str(explain(refused.value))
    assert sentence in said
    assert "\n" not in said


def test_synchronized_batch_normalization_is_for_gpus(tmp_path: Path) -> None:
    """As torch has it; one process without a group computes as plain batch normalization does."""
    with pytest.raises(UserMistake, match=r"^torch's SyncBatchNorm trains on GPUs only, and this run is on CPUs; "):
        train(synchronized_norm, 2, tmp_path)
    assert train(synchronized_norm, 1, tmp_path / "one")


def test_gradients_that_are_not_complete_are_not_clipped_by_the_loop(tmp_path: Path) -> None:
    train(own_clipping, 1, tmp_path / "complete")
    with pytest.raises(UserMistake, match=r"Gradients were changed .*; to clip them, set train.clip"):
        train(own_clipping, 1, tmp_path / "half", train__micro_batch=BATCH // 2)


def test_a_zero_grad_of_the_model_discards_nothing(tmp_path: Path) -> None:
    given = {"train__micro_batch": BATCH // 2}
    assert train(zero_grad, 1, tmp_path, **given) == train(forward_between, 1, tmp_path, **given)

"""A loop of torch alone, with the names of `shoal.init`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar


class PlainRun:
    """What `shoal.init` returns, as a loop of torch alone on one device: the whole global batch in one forward pass."""

    rank, world_size, first = 0, 1, True
    losses: ClassVar[list[float]] = []

    def __init__(self, *, precision: str, steps: int, clip: float, seed: int, folder: Path) -> None:
        import torch

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.low = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "16-mixed")
        self.total_steps, self.clip, self.seed, self.folder = steps, clip, seed, folder
        torch.manual_seed(seed)

    def prepare(self, model: Any, optimizer: Any, loader: Any, schedule: Any = None) -> tuple[Any, ...]:
        import torch

        from shoal.data.custom_loader import CustomLoader, Share, order_of
        from shoal.parallel.custom import _cast

        self.model, self.optimizer = model.to(self.device), optimizer
        if self.low is not None:
            forward, low = model.forward, self.low

            def autocast(*inputs: Any, **named: Any) -> Any:
                with torch.autocast(self.device.type, low):
                    found = forward(*inputs, **named)
                return _cast(found, torch.float32)

            model.forward = autocast
        # The samples are shoal's: which ones a step has is not what is compared.
        batch = loader.batch_size
        self.loader = CustomLoader(loader, Share(order_of(loader, self.seed), batch, batch, 0, 1, self.seed))
        return (model, optimizer, self.loader) if schedule is None else (model, optimizer, self.loader, schedule)

    def steps(self, loader: Any) -> Iterator[Any]:
        from shoal.train.custom_evaluation import to_device

        for batch in loader.micro_batches(0, self.total_steps):
            yield to_device(batch, self.device)

    def backward(self, loss: Any, weight: Any = None) -> None:
        self.scaler.scale(loss).backward()
        PlainRun.losses.append(float(loss))

    def step(self, optimizer: Any, schedule: Any = None) -> bool:
        import torch

        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        return True

    def evaluate(self, compute: Callable[[Any], Any], loader: Any) -> float:
        import torch

        from shoal.train.custom_evaluation import to_device

        total, count = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for batch in loader:
                total += float(compute(to_device(batch, self.device))) * len(batch[0])
                count += len(batch[0])
        self.model.train()
        return total / count

    def log_evaluation(self, loss: float, **others: float) -> None:
        pass

    def save_weights(self, path: Path) -> None:
        pass

"""Two loops with the parts of the API that the examples do not use. They import torch when they are called."""

from collections.abc import Callable
from typing import Any


def sequences(overrides: list[str], evaluated: list[float]) -> None:
    """A transformer with a frozen embedding, a schedule, workers with pinned memory, and a held-out set."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import shoal

    run = shoal.init(name="sequences", overrides=overrides)
    model = Sequences() if torch.cuda.is_available() else Sequences(32, 2, 64)
    model.embedding.requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4)
    tokens = torch.randint(0, 64, (160, 33), generator=torch.Generator().manual_seed(1))
    tokens[:, 1::2] = (tokens[:, ::2][:, :16] * 7 + 3) % 64  # every second token follows from the one before
    pinned = torch.cuda.is_available()
    loader = DataLoader(TensorDataset(tokens[:128]), batch_size=16, shuffle=True, num_workers=1, pin_memory=pinned)
    held_out = DataLoader(TensorDataset(tokens[128:]), batch_size=10)

    def loss_of(batch: Any) -> Any:
        logits = model(batch[0][:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())

    model, optimizer, loader, schedule = run.prepare(model, optimizer, loader, schedule)
    for batch in run.steps(loader):
        run.backward(loss_of(batch))
        run.step(optimizer, schedule)
    evaluated.append(run.evaluate(loss_of, held_out))
    run.save_weights(run.folder / "weights.safetensors")


def weighted(overrides: list[str], evaluated: list[float]) -> None:
    """A loss that is a mean over what counts in a batch, given with its weight."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import shoal

    run = shoal.init(name="weighted", resume="auto", overrides=overrides)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    points = torch.rand(256, 8, generator=torch.Generator().manual_seed(2))
    counts = (points[:, :1] > 0.4).float()
    data = TensorDataset(points, points.square().sum(1, keepdim=True), counts)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=32, shuffle=True))
    for inputs, targets, counted in run.steps(loader):
        number = counted.sum()
        run.backward((counted * (model(inputs) - targets).square()).sum() / number, weight=number)
        run.step(optimizer)


def Sequences(width: int = 256, layers: int = 4, feed_forward: int = 1024) -> Any:
    """A small causal transformer; a function, so that this file starts without torch."""
    import torch
    from torch import nn

    class Block(nn.TransformerEncoderLayer):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
            self.blocks = nn.ModuleList(
                Block(width, 4, feed_forward, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers)
            )

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens)
            mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
            for block in self.blocks:
                hidden = block(hidden, src_mask=mask)
            return self.head(hidden)

    return Model()


LOOPS: dict[str, Callable[[list[str], list[float]], None]] = {"sequences": sequences, "weighted": weighted}

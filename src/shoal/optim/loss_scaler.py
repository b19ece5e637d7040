"""The loss scale of 16-mixed. It follows the global gradient norm alone, so every rank decides the same."""

import torch
from torch import Tensor

SMALLEST = 2.0**-24


class LossScaler:
    """Doubles after `patience` usable steps in a row, halves after an unusable one. Lives on the device."""

    def __init__(self, device: torch.device, *, enabled: bool, start: float = 2.0**16, patience: int = 2000) -> None:
        self.enabled = enabled
        self.patience = patience
        self.scale = torch.full((), start if enabled else 1.0, device=device)
        self.streak = torch.zeros((), device=device)

    def update(self, usable: Tensor) -> None:
        if not self.enabled:
            return
        self.streak = torch.where(usable, self.streak + 1, 0.0)
        grown = self.streak >= self.patience
        self.scale = torch.where(usable, torch.where(grown, self.scale * 2, self.scale), self.scale / 2)
        self.scale = self.scale.clamp(min=SMALLEST)  # at zero it would stay there
        self.streak = torch.where(grown, 0.0, self.streak)

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "streak": self.streak} if self.enabled else {}

    def load(self, state: dict[str, Tensor]) -> None:
        if self.enabled and state:
            self.scale.copy_(state["scale"])
            self.streak.copy_(state["streak"])

"""Dynamic loss scaling for 16-mixed. It depends on the global gradient norm only, so all ranks decide the same."""

import torch
from torch import Tensor

SMALLEST = 2.0**-24


class LossScaler:
    """The scale doubles after `patience` finite steps in a row and halves after a non-finite one, unless it is `fixed`.
    On the device."""

    def __init__(
        self,
        device: torch.device,
        *,
        enabled: bool,
        start: float = 2.0**16,
        fixed: bool = False,
        patience: int = 2000,
    ) -> None:
        self.enabled = enabled
        self.fixed = fixed
        self.patience = patience
        self.scale = torch.full((), start if enabled else 1.0, device=device)
        self.streak = torch.zeros((), device=device)

    def update(self, usable: Tensor) -> None:
        if not self.enabled or self.fixed:
            return
        self.streak = torch.where(usable, self.streak + 1, 0.0)
        grown = self.streak >= self.patience
        self.scale = torch.where(usable, torch.where(grown, self.scale * 2, self.scale), self.scale / 2)
        self.scale = self.scale.clamp(min=SMALLEST)  # it could not grow again from zero
        self.streak = torch.where(grown, 0.0, self.streak)

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "streak": self.streak} if self.enabled else {}

    def load(self, state: dict[str, Tensor]) -> None:
        if self.enabled and state:
            self.scale.copy_(state["scale"])
            self.streak.copy_(state["streak"])

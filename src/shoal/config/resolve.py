"""Resolve `train.precision: auto` for a device."""

from shoal.config.schema import Config


def auto_precision(*, is_cpu: bool, has_bf16: bool) -> str:
    """bf16-mixed if the tensor cores have bf16, 16-mixed if they have only fp16, 32-true on a CPU."""
    if is_cpu:
        return "32-true"
    return "bf16-mixed" if has_bf16 else "16-mixed"


def with_precision(config: Config, precision: str) -> Config:
    """`config` with `precision`, unless it sets one itself."""
    if config.train.precision != "auto":
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})

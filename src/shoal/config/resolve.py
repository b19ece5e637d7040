"""`train.precision: auto`, replaced by what is fast and safe on a device."""

from shoal.config.schema import Config


def auto_precision(*, is_cpu: bool, has_bf16: bool) -> str:
    """bf16-mixed where the matrix units have bf16, 16-mixed where they have only fp16, 32-true on a CPU."""
    if is_cpu:
        return "32-true"
    return "bf16-mixed" if has_bf16 else "16-mixed"


def with_precision(config: Config, precision: str) -> Config:
    """`config` computed in `precision`, unless it names one itself."""
    if config.train.precision != "auto":
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})

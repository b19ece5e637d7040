"""Resolve what depends on the devices: `train.precision: auto`, and `train.grad_accum` to a global batch."""

from typing import Protocol

from shoal.config.mesh import Mesh, divide_processes
from shoal.config.schema import Config
from shoal.mistakes import UserMistake


class ResolvedConfig(Protocol):
    """How a run is carried out, with no `auto` left: what training needs to know, with a forecast or without."""

    @property
    def requested(self) -> Config:
        """The config as it was given; the run folder keeps it."""

    @property
    def config(self) -> Config:
        """`requested` with every auto filled in."""

    @property
    def strategy(self) -> str: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def world_size(self) -> int: ...

    @property
    def data_parallel(self) -> int: ...

    @property
    def micro_batch(self) -> int: ...

    @property
    def grad_accum_steps(self) -> int: ...

    @property
    def global_batch(self) -> int: ...


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


def with_global_batch(config: Config, world_size: int) -> Config:
    """`config` with the global batch that `train.grad_accum` means on this many devices, and without `grad_accum`."""
    train = config.train
    if train.grad_accum is None:
        return config
    assert isinstance(train.micro_batch, int), "the schema demands it"
    data_parallel = divide_processes(config.parallel, world_size)
    batch = train.micro_batch * train.grad_accum * data_parallel
    if "global_batch" in train.model_fields_set and train.global_batch != batch:
        raise UserMistake(
            f"train.global_batch {train.global_batch} and train.grad_accum {train.grad_accum} disagree: micro_batch "
            f"{train.micro_batch} × grad_accum {train.grad_accum} × {data_parallel} data-parallel "
            f"{'device' if data_parallel == 1 else 'devices'} = {batch}; leave one of them out."
        )
    return config.model_copy(update={"train": train.model_copy(update={"global_batch": batch, "grad_accum": None})})

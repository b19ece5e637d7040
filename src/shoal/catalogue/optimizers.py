"""The optimizers: their state and their options. Data and lookups only; `optim/makers.py` makes them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Optimizer:
    """A value of `train.optimizer.name`."""

    name: str
    # State tensors in the shape of a parameter: moments, or a momentum.
    state_tensors: int
    # Keys of `train.optimizer` that it has, besides name and weight_decay.
    options: tuple[str, ...]
    state_option: str | None = None  # has state only if this option is not zero
    state_bytes: int | None = None  # bytes per element of a state tensor; None: as many as the weight
    scale_bytes: float = 0.0  # per element of a quantized state tensor
    # Our own kernel on GPUs: takes the clipping factor, reads gradients in fp32 or in the compute dtype, and skips a
    # non-finite step on the device.
    own_kernel: bool = False
    # Its kernel moves nothing but long tensors, and so is faster than other elementwise kernels.
    streams: bool = False
    # It updates matrices inside blocks, whole; all other parameters are updated by this optimizer.
    elsewhere: str | None = None
    smaller: str | None = None  # the same optimizer with smaller state
    factored: bool = False  # of a matrix it has a row and a column of state
    normalizes: bool = False  # it scales the update of a tensor by its norm and that of the weights
    built: bool = True  # false: only forecast
    aliases: tuple[str, ...] = ()  # what other tools call it

    @property
    def needs_whole_matrices(self) -> bool:
        """Whether it orthogonalizes the update of each matrix inside a block (Newton-Schulz)."""
        return self.elsewhere is not None

    @property
    def is_quantized(self) -> bool:
        return self.scale_bytes > 0

    def bytes_per_parameter(self, weight_bytes: int) -> float:
        """Bytes of state per parameter that it updates itself."""
        itemsize = weight_bytes if self.state_bytes is None else self.state_bytes
        return self.state_tensors * (itemsize + self.scale_bytes)

    def streamed_bytes(self, weight_bytes: int) -> int:
        """The same without scales, which are read and written in a negligible time."""
        return self.state_tensors * (weight_bytes if self.state_bytes is None else self.state_bytes)


# Elements that a rank orthogonalizes in one batch: enough to occupy a GPU, of which a copy in fp32 is 64 MiB.
ORTHOGONALIZED_ELEMENTS = 2**24


def orthogonalized_together(elements: int) -> int:
    """How many matrices of one shape, with so many elements each, Muon orthogonalizes in one batch."""
    return max(1, ORTHOGONALIZED_ELEMENTS // elements)


OPTIMIZERS = {
    one.name: one
    for one in (
        Optimizer(
            "adamw",
            state_tensors=2,
            options=("betas", "eps", "rounding"),
            own_kernel=True,
            streams=True,
            smaller="adamw8bit",
            aliases=("adam", "adamw_torch", "adamw_torch_fused"),
        ),
        Optimizer(
            "adamw8bit",
            state_tensors=2,
            options=("betas", "eps", "rounding"),
            state_bytes=1,
            scale_bytes=4 / 256,  # an fp32 scale per block of 256 elements
            own_kernel=True,
            aliases=("adamw_8bit", "adamw_bnb_8bit"),
        ),
        Optimizer("lion", state_tensors=1, options=("betas",), own_kernel=True, streams=True),
        Optimizer("sgd", state_tensors=1, options=("momentum",), state_option="momentum"),
        Optimizer("lamb", state_tensors=2, options=("betas", "eps"), normalizes=True, built=False),
        Optimizer("adafactor", state_tensors=0, options=(), factored=True, built=False),
        # Its betas and eps are those of AdamW, elsewhere.
        Optimizer("muon", state_tensors=1, options=("betas", "eps", "momentum"), elsewhere="adamw"),
    )
}

ALIASES = {alias: one.name for one in OPTIMIZERS.values() for alias in one.aliases}


def find_optimizer(name: str) -> Optimizer:
    return OPTIMIZERS[name]

"""Named ranges of the training loop in a trace. Without a profiler they cost nothing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

# What the ranges of the training loop are called in a trace.
STEP = "shoal.step"  # followed by its number: from the end of the previous step
DATA = "shoal.data"  # the loop waits for its batch
OPTIMIZER = "shoal.optimizer"  # gradient norm, clipping, update
EVALUATION = "shoal.evaluation"
SAVE = "shoal.save"

_recorded = False


@contextmanager
def ranges_recorded() -> Iterator[None]:
    """Ranges are recorded meanwhile: a profiler runs."""
    global _recorded
    _recorded = True
    try:
        yield
    finally:
        _recorded = False


def annotated(name: str) -> AbstractContextManager[object]:
    """A range of this name in the trace, if one is being recorded."""
    if not _recorded:
        return nullcontext()
    from torch.profiler import record_function

    return record_function(name)

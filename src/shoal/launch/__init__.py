"""Start processes and initialize process groups."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.launch.submitit import submitit_task

__all__ = ["submitit_task"]


def __getattr__(name: str) -> Any:
    # When it is used: it needs a package that few have.
    if name == "submitit_task":
        from shoal.launch.submitit import submitit_task

        return submitit_task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

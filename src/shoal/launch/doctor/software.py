"""Versions of Python and of the libraries."""

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from shoal import __version__
from shoal.launch.doctor.finding import Finding, failure, ok, warning
from shoal.launch.doctor.setting import Setting

# Whose versions are printed, and compared between nodes.
LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers", "numpy", "triton", "peft", "bitsandbytes")


def versions() -> dict[str, str]:
    """The installed versions, without importing anything."""
    found = {"python": platform.python_version(), "shoal": __version__}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_python(setting: Setting) -> Finding:
    return ok(f"{platform.python_version()} on {platform.system()} {platform.release()} ({platform.machine()})")


def check_libraries(setting: Setting) -> Finding:
    """The libraries are there, in versions that shoal was written for."""
    installed = versions()
    listed = ", ".join(f"{name} {version}" for name, version in installed.items() if name != "python")
    unmet = list(_unmet())
    if unmet:
        wanted = " ".join(f"'{one}'" for one, _ in unmet)
        found = ", ".join(f"{one.name} is {version or 'missing'}" for one, version in unmet)
        return failure(f"{found}; {listed}", f"pip install {wanted}")
    if "torch" not in installed:
        return failure(f"torch is missing; {listed}", "pip install torch")
    return ok(listed)


def check_torch(setting: Setting) -> Finding:
    """torch can be imported, and sees the GPUs that the driver sees."""
    found, gpus = setting.torch, setting.driver.gpus
    if found.error is not None:
        return failure(
            found.error, "python -c 'import torch; torch.cuda.init()' shows where; reinstall torch if it fails"
        )
    built = f"torch {found.version}, built for {f'CUDA {found.cuda}' if found.cuda else 'the CPU'}"
    if gpus and not found.cuda:
        return failure(
            f"{built}, but there {'is a GPU' if len(gpus) == 1 else f'are {len(gpus)} GPUs'}",
            "install a build of torch for CUDA: see https://pytorch.org/get-started/locally",
        )
    if gpus and not found.available:
        said = f": {found.said[0]}" if found.said else ""
        return failure(
            f"{built}, does not see the {len(gpus)} × {gpus[0].name}{said}",
            f"update the driver ({gpus[0].driver}), or install a build of torch for an older CUDA",
        )
    if gpus and len(found.names) != len(gpus):
        return warning(
            f"{built}, sees {len(found.names)} GPUs, but nvidia-smi {len(gpus)}",
            "look at CUDA_VISIBLE_DEVICES, and at dmesg for a GPU that has fallen off the bus",
        )
    if found.said:
        return warning(f"{built}, says: {found.said[0]}", "install a build of torch for this GPU and driver")
    seen = f", sees {len(found.names)} × {found.names[0]}" if found.names else ""
    return ok(f"{built}{seen}; imported in {found.seconds:.1f} s")


def _unmet() -> Iterator[tuple[Requirement, str | None]]:
    """Requirements of shoal that are not installed, each with the version that is."""
    try:
        wanted = metadata.requires("shoal") or []
    except metadata.PackageNotFoundError:  # used without being installed
        return
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield requirement, None
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield requirement, version

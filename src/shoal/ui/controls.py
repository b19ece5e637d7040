"""The planner's controls: which config keys they set, and what they accept."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from shoal.catalogue.gpus import GPUS
from shoal.catalogue.named_shapes import NAMED
from shoal.catalogue.optimizers import OPTIMIZERS
from shoal.catalogue.shapes import parameters
from shoal.catalogue.strategies import STRATEGIES
from shoal.config.schema_run import ParallelConfig
from shoal.mistakes import UserMistake, shortened
from shoal.observe.figures import compact
from shoal.observe.html import Html, tag

Answers = dict[str, str]


@dataclass(frozen=True)
class Control:
    """A config key as a list of choices, or as a number."""

    key: str
    label: str
    default: str
    choices: tuple[tuple[str, str], ...] = ()  # value, what is shown
    kind: type[int] | type[float] = int  # of a number
    optional: bool = False  # the field may be empty: the key is not set
    more: bool = False  # among those that are shown on demand

    def read(self, given: str) -> str:
        """The value, or a UserMistake. Nothing else than numbers and the choices gets into a config."""
        text = given.strip()
        if self.choices:
            if text in {value for value, _ in self.choices}:
                return text
            raise UserMistake(f"{self.label}: {shortened(text)} is not one of the choices.")
        if not text and self.optional:
            return ""
        try:
            number = self.kind(text.replace(",", "").replace("_", ""))
        except (ValueError, OverflowError):
            what = "a whole number" if self.kind is int else "a number"
            raise UserMistake(f"{self.label}: {shortened(text) or 'nothing'} is not {what}.") from None
        return str(number)

    def html(self, value: str) -> Html:
        identifier = f"control-{self.key.replace('.', '-')}"
        if self.choices:
            options = [tag("option", shown, value=one, selected=one == value) for one, shown in self.choices]
            field = tag("select", options, id=identifier, name=self.key)
        else:
            whole = self.kind is int
            limits = {"min": "1" if whole else "0", "step": "1" if whole else "any", "required": not self.optional}
            shown = {"placeholder": "auto" if self.key == "train.micro_batch" else None, "inputmode": "decimal"}
            field = tag("input", id=identifier, name=self.key, value=value, type="number", **limits, **shown)
        return tag("div", tag("label", self.label, for_=identifier), field, class_="control")


def _same(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in names)


def _models() -> tuple[tuple[str, str], ...]:
    return tuple((name, f"{name}  ({compact(parameters(shape))})") for name, shape in sorted(NAMED.items()))


def _gpus() -> tuple[tuple[str, str], ...]:
    return tuple((gpu.name, f"{gpu.name}  ({gpu.memory_gib:.0f} GiB)") for gpu in GPUS.values() if not gpu.is_cpu)


_OFFLOADS = [one for one in get_args(get_args(ParallelConfig.model_fields["offload"].annotation)[0]) if one]

PRECISIONS = ("auto", "bf16-mixed", "bf16-true", "16-mixed", "32-true", "fp8")
RECOMPUTES = ("auto", "none", "cheap", "selective", "full", "offload")

CONTROLS = (
    Control("model.shape", "Model", "llama3-8b", _models()),
    Control("hardware.gpu", "GPU", "h100-80gb", _gpus()),
    Control("hardware.devices", "GPUs per node", "8"),
    Control("hardware.nodes", "Nodes", "1"),
    Control("data.max_length", "Sequence length", "4096"),
    Control("train.global_batch", "Global batch", "64"),
    Control("train.micro_batch", "Micro-batch", "", optional=True),
    Control("train.precision", "Precision", "auto", _same(*PRECISIONS)),
    Control("train.recompute", "Recompute", "auto", _same(*RECOMPUTES)),
    Control("parallel.strategy", "Strategy", "auto", _same("auto", *STRATEGIES)),
    Control("adapter.kind", "Adapter", "none", _same("none", "lora", "qlora")),
    Control("train.optimizer.name", "Optimizer", "adamw", _same(*OPTIMIZERS)),
    Control("parallel.tp", "Tensor parallel", "1", more=True),
    Control("parallel.pp", "Pipeline parallel", "1", more=True),
    Control("parallel.cp", "Context parallel", "1", more=True),
    Control("parallel.offload", "Offload", "none", _same(*_OFFLOADS), more=True),
    Control("train.tokens", "Tokens to train on", "1000000000", more=True),
    Control("hardware.price", "Price per GPU hour", "", kind=float, optional=True, more=True),
)


# Values that a config has without the key.
UNSAID = {
    "train.precision": "auto",
    "train.optimizer.name": "adamw",
    "adapter.kind": "none",
    "parallel.strategy": "auto",
    "parallel.offload": "none",
    "parallel.tp": "1",
    "parallel.pp": "1",
    "parallel.cp": "1",
}


def read_answers(given: Mapping[str, str]) -> Answers:
    """The value of every control, with the default of those that are not given."""
    return {one.key: one.read(given[one.key]) if one.key in given else one.default for one in CONTROLS}


def config_of(answers: Answers) -> dict[str, Any]:
    """The config file that the controls describe, with the keys that differ from shoal's own defaults."""
    found: dict[str, Any] = {"name": f"{answers['model.shape']}-{answers['hardware.gpu']}"}
    for control in CONTROLS:
        value = answers[control.key]
        if UNSAID.get(control.key) == value or (value == "" and control.optional):
            continue
        block = found
        *parents, last = control.key.split(".")
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = value if control.choices else control.kind(value)
    return found

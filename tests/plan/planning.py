"""Helpers of the forecast tests: a plan from overrides, and a `Run` with explicit settings."""

from collections.abc import Sequence
from typing import Any

from shoal import api
from shoal.catalogue.gpus import LINKS, find_gpu
from shoal.catalogue.shapes import find_shape
from shoal.config.mesh import Mesh
from shoal.plan.report import Plan
from shoal.plan.run.run import Run

EIGHT_H100 = ("hardware.gpu=h100-80gb", "hardware.devices=8")


def plan(*overrides: str, system: str = "shoal", traits: Sequence[str] = ()) -> Plan:
    """As `shoal plan OVERRIDES`."""
    return api.plan(api.load_config(None, overrides, planned=True), system=system, traits=traits)


def reserved(*overrides: str) -> float:
    """Reserved GiB per device."""
    found: float = plan(*overrides).as_dict()["memory"]["reserved_gib"]
    return found


def tokens_per_second(*overrides: str) -> float:
    """Tokens per second of one device."""
    return plan(*overrides).choice.speed.tokens_per_second_per_gpu


def make_run(shape: str = "llama3-8b", gpu: str = "h100-80gb", **settings: Any) -> Run:
    """A `Run`, by default of 2048 tokens on one of eight devices."""
    device = find_gpu(gpu)
    settings = {"length": 2048, "devices": 8, "mesh": Mesh(), **settings}
    return Run(
        shape=find_shape(shape),
        gpu=device,
        link=LINKS[device.link],
        network=LINKS["infiniband-ndr"],
        **settings,
    )


def leaves(terms: Any) -> float:
    """The sum of a term tree in its JSON form."""
    return sum(leaves(part) for part in terms.values()) if isinstance(terms, dict) else float(terms)

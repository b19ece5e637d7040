"""The forecasts that pictures and pages show: those of `shoal plan` with the same settings."""

from functools import cache
from pathlib import Path

from shoal import api
from shoal.plan.report import Plan
from shoal.plan.terms import GIB, Term

ROOT = Path(__file__).parents[2]


@cache
def plan(settings: str) -> Plan:
    """What `shoal plan SETTINGS` says; settings are separated by spaces."""
    return api.plan(api.load_config(None, settings.split(), planned=True))


@cache
def plan_file(path: str) -> Plan:
    """What `shoal plan FILE` says."""
    return api.plan(api.load_config(ROOT / path, [], planned=True))


def gib(amount: float) -> float:
    return amount / GIB


def terms(settings: str) -> Term:
    """The memory of a device at its peak, as a tree."""
    return plan(settings).choice.memory.worst.peak.tree

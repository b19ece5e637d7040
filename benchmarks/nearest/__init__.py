"""The traits of systems whose results others published, where `--like` has no name for them, each from its code."""

from nearest.loops import LOOPS
from nearest.megatron import MEGATRONS
from nearest.transformers_models import TRANSFORMERS
from shoal.plan.systems.traits import SystemTraits

# Systems without traits of their own are forecast as the nearest one that has some.
NEAREST: dict[str, SystemTraits] = {**TRANSFORMERS, **MEGATRONS, **LOOPS}

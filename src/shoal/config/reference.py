"""Where preference tuning has its reference log-probabilities from."""

from shoal.catalogue.objectives import objective_facts
from shoal.config.schema import Config


def switches_adapter_off(config: Config) -> bool:
    """Whether each step computes them, without the adapter: the base model is the reference.

    Not in a pipeline, which has one forward pass per micro-batch; nor where parameters of the base are trained too, or
    where the adapter is not a new one: the reference is the model that the run starts from.
    """
    adapter = config.adapter
    switches = adapter.kind != "none" and not (adapter.train_also or adapter.from_) and config.parallel.pp == 1
    return objective_facts(config.train.objective).reference and switches


def computes_before(config: Config) -> bool:
    """Whether they are computed before the first step, with the weights that the run starts from."""
    return objective_facts(config.train.objective).reference and not switches_adapter_off(config)

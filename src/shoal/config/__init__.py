"""The config: the complete description of a run."""

from shoal.config.effect import without_effect
from shoal.config.load import config_from_mapping, config_to_yaml, config_values, json_schema, load_config
from shoal.config.mesh import Mesh, mesh_for
from shoal.config.schema import Config

__all__ = [
    "Config",
    "Mesh",
    "config_from_mapping",
    "config_to_yaml",
    "config_values",
    "json_schema",
    "load_config",
    "mesh_for",
    "without_effect",
]

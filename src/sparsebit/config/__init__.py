"""Typed configs that read and write YAML: sections are pydantic models, keys may be in any letter case."""

from __future__ import annotations

from sparsebit.config.base import Config
from sparsebit.config.messages import did_you_mean
from sparsebit.config.plugins import PluginConfig
from sparsebit.config.values import fold
from sparsebit.config.yaml_io import read_yaml, write_yaml
from sparsebit.errors import ConfigError

__all__ = [
    "Config",
    "ConfigError",
    "PluginConfig",
    "did_you_mean",
    "fold",
    "read_yaml",
    "write_yaml",
]

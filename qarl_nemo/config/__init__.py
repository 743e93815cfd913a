"""The `qarl:` block and how every YAML is read: `defaults:`, `a.b=c` overrides, strict models. Imports no torch."""

from qarl_nemo.config.load import load_config
from qarl_nemo.config.problems import ConfigError, validate
from qarl_nemo.config.qarl import Alignment, QarlConfig, StrictModel, Targets
from qarl_nemo.config.yaml_file import flatten, literal, merge_mappings, plain, read_yaml, write_yaml

__all__ = [
    "Alignment",
    "ConfigError",
    "QarlConfig",
    "StrictModel",
    "Targets",
    "flatten",
    "literal",
    "load_config",
    "merge_mappings",
    "plain",
    "read_yaml",
    "validate",
    "write_yaml",
]

"""The `qarl` command. It parses before it imports torch, so that help and config errors appear at once."""

# Importing a module adds its commands, in the order of `qarl --help`.
from qarl_nemo.cli import train, configs, report, evaluate, export, checkpoints, compare, doctor, memory  # noqa: F401, I001
from qarl_nemo.cli.program import app, main

__all__ = ["app", "main"]

"""Objectives over NeMo-RL's data keys: one file each, on the shared ratios of `ratios.py`."""

"""Refit: names, manifest and publisher of the packed tensors the rollout engine serves."""

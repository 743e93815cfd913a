"""Refit: the packed tensors of the learner's forward into a running rollout engine, whole or not at all."""

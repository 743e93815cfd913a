"""Refit: sends the packed tensors of the learner's forward to a running rollout engine, completely or not at all."""

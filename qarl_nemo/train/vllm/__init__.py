"""vLLM as the embedded engine's rollout: what it serves, how it is started, and its answers as rollouts."""

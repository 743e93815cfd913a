"""vLLM as the rollout engine of `qarl train`: what it serves, how it is started, and its answers as rollouts."""

"""`qarl doctor --rollout`: how fast vLLM samples in each format, measured with dummy weights."""

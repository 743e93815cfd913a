"""NeMo-RL's GRPO loop with an aligned Megatron learner, packed refits and a quantized vLLM: a plug-in, not a fork."""

"""The Megatron learner behind the loop in one process, and the launch of its ranks."""

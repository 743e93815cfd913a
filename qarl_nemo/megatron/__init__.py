"""Megatron-core models whose experts execute what the rollout engine executes, and publish it from their shards.

Needs Megatron-core 0.16 to 0.20 (`pip install 'qarl-nemo[megatron]'`: Transformer-Engine comes with it and needs a GPU;
without it Megatron's local layers run, in tests on a CPU too).
"""

"""The scale-out engine: Megatron-core models whose experts execute what the rollout engine executes, inside NeMo-RL.

Its modules need Megatron-core 0.16 to 0.20 (`pip install 'qarl-nemo[megatron]'`: Transformer-Engine comes with it and
needs a GPU; without it Megatron's local layers run, on a CPU too). `rl` alone is also imported where there is none: by
NeMo-RL's driver and its vLLM workers.
"""

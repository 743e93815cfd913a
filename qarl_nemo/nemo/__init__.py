"""The scale-out engine: Megatron-core models whose experts execute what the rollout engine executes."""

import importlib.util

if importlib.util.find_spec("megatron") is None:
    raise ImportError(
        "qarl_nemo.nemo needs Megatron-core 0.16 to 0.20: pip install 'qarl-nemo[megatron]' (Transformer-Engine comes "
        "with it and needs a GPU; without it Megatron's local layers run, on a CPU too)"
    )

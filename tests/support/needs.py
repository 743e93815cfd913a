"""What tests need of a machine; they are skipped without it."""

from importlib.util import find_spec

import pytest
import torch


def needs(package: str, said: str) -> pytest.MarkDecorator:
    """Skip without a package."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {said}")


MEGATRON = needs("megatron", "megatron-core: pip install megatron-core==0.16.1")
TRANSFORMER_ENGINE = needs("transformer_engine", "Transformer-Engine")
# Programs of four ranks: each on a GPU, or all on the CPU.
FOUR_GPUS_OR_NONE = pytest.mark.skipif(0 < torch.cuda.device_count() < 4, reason="needs four GPUs, or none")

"""What `engine_mends` changes in vLLM 0.25.1, on vLLM's own classes."""

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm", reason="needs vLLM 0.25.1", exc_type=ImportError)

from qarl_nemo.refit.engine_mends import mend_int8_experts  # noqa: E402


def test_int8_experts_are_told_to_quantize_their_activations():
    from vllm.model_executor.layers.fused_moe.oracle import int8 as oracle
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_int8 as method,
    )

    mend_int8_experts()
    mend_int8_experts()
    scale = torch.ones(2, 4, 1)
    asked = {"w1_scale": scale, "w2_scale": scale, "a1_scale": None, "a2_scale": None, "per_act_token_quant": True}
    asked |= {"int8_backend": oracle.Int8MoeBackend.TRITON, "layer": None}
    mended, stock = method.make_int8_moe_quant_config(**asked), oracle.make_int8_moe_quant_config(**asked)
    assert (mended.quant_dtype, mended.per_act_token_quant, mended.use_int8_w8a16) == (torch.int8, True, False)
    # If this fails, vLLM has mended it itself.
    assert (stock.quant_dtype, stock.use_int8_w8a16) == (None, True)

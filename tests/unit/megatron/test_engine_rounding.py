"""Where Megatron's norms and rotation round: as the embedded engine's learner does, bit for bit, in BF16.

On a CPU the squares of a norm are added in torch's order on both sides; GPUs have the engine's order to follow, too.
"""

import pytest
import torch

from support.megatron.results import run_ranks_of
from support.needs import FOUR_GPUS_OR_NONE, MEGATRON

pytestmark = [pytest.mark.slow, MEGATRON, FOUR_GPUS_OR_NONE]

LAYER_OPERATORS = {
    *("input_layernorm", "q_layernorm", "k_layernorm", "rotated_q", "rotated_k", "pre_mlp_layernorm", "residual")
}
# Relative errors of BF16 gradients: FP32 sums on one side; under tensor parallelism another forward, too.
SAME_FORWARD, OTHER_SUMS = 0.04, 0.2


# One test: of several, each worker that gets one would start its own ranks.
def test_a_megatron_learner_rounds_where_the_engine_does(tmp_path):
    ranks = run_ranks_of("run_engine_rounding", tmp_path)
    for rank in ranks:
        for name, case in rank["layouts"].items():
            check_operators(name, case["differing"])
            tensor_parallel = name.startswith("tp2")
            # On a GPU a GEMM of fused q, k and v need not add as three do.
            if not torch.cuda.is_available():
                assert case["same_hidden"] != tensor_parallel, name
                assert case["loss_error"] < (1e-2 if tensor_parallel else 1e-6), name
            errors = case["grad_errors"]
            assert max(errors.values()) < (OTHER_SUMS if tensor_parallel else SAME_FORWARD), (name, errors)
            assert case["after_add"].items() <= rank["after_add"].items(), name
            assert len(case["after_add"]) >= 4, name
        check_megatrons_own_rounding_shows(rank["without"])
        check_packed(rank["packed"])


def check_operators(name, differing):
    """Every operator has the engine's bits, and not those of another rounding."""
    assert differing.keys() - {"final_layernorm"} == LAYER_OPERATORS, name
    for operator, (from_engine, from_other) in differing.items():
        assert from_engine == 0, f"{name}: {operator}"
        assert from_other > 0, f"{name}: {operator}"


def check_megatrons_own_rounding_shows(case):
    assert not case["same_hidden"]
    assert case["loss_error"] > 1e-4
    for operator in ("rotated_q", "rotated_k"):
        assert case["differing"][operator][0] > 0
    assert case["after_add"] == {}


def check_packed(packed):
    """Packed documents are rotated as each by itself, and what cannot be followed is an error."""
    assert torch.equal(packed["together"], packed["alone"])
    assert not torch.equal(packed["together"], packed["as_one"])
    assert "it got angles None" in packed["refused"]

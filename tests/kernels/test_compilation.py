"""On a machine without a GPU, kernels compile down to a Hopper GPU's instructions, as the operators launch them."""

import json

import pytest

from support.programs import run_program

pytestmark = pytest.mark.slow
triton = pytest.importorskip("triton", reason="needs Triton, which exists for Linux only")


def compile_kernels(which, cache):
    try:
        assert triton.knobs.nvidia.ptxas.path
    except RuntimeError as error:
        pytest.skip(f"needs ptxas, which comes with Triton for NVIDIA's GPUs: {error}")
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    printed = run_program("hopper.run_compilation", which, timeout_s=3600, **settings)
    return json.loads(printed.splitlines()[-1])


def test_a_packed_layer_compiles_for_hopper_and_a_wrong_spelling_does_not(tmp_path):
    found = compile_kernels("sample", tmp_path)
    assert found["failed"] == []
    assert "Illegal shared layout" in found["rounded_early"]
    assert "qarl_kernels.ops.swiglu._swiglu_kernel" in found["uncovered"]
    assert "qarl_kernels.ops.nvfp4.grid_values" not in found["uncovered"]


@pytest.mark.parametrize("half", ["even", "odd"])
def test_every_launch_of_every_operator_compiles_for_hopper(half, tmp_path):
    found = compile_kernels(half, tmp_path)
    assert found["uncovered"] == [], "call their operators in tests/support/hopper/operators.py"
    assert found["failed"] == []
    assert [problem for problem in found["too_deep"] if "bytes of shared memory" in problem]

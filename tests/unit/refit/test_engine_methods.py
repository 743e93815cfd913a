"""The kernels vLLM chose are held against the format: whatever differs is named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from qarl_formats import BLOCKS
from qarl_kernels import get_format
from qarl_nemo.refit.engine_methods import (
    ChosenMethod,
    chosen_methods,
    method_label,
    method_problems,
    refit_problems,
    require_methods,
)

W4A16 = get_format("w4a16", group_size=64)
LAYER = "model.layers.0"
CHOSEN = [
    ChosenMethod(f"{LAYER}.self_attn.qkv_proj", "UnquantizedLinearMethod", ""),
    ChosenMethod(f"{LAYER}.self_attn.o_proj", "UnquantizedLinearMethod", ""),
    ChosenMethod(f"{LAYER}.mlp.gate", "UnquantizedLinearMethod", ""),
    ChosenMethod(f"{LAYER}.mlp.experts.routed_experts", "CompressedTensorsWNA16MoEMethod", "WNA16MoEBackend.CPU"),
]


def test_the_formats_own_methods_pass():
    assert method_problems(CHOSEN, W4A16, ["experts"]) == []
    fp8 = [*CHOSEN[:3], replace(CHOSEN[3], method="Fp8MoEMethod")]
    assert method_problems(fp8, get_format("fp8_block"), ["experts"]) == []
    bf16 = [*CHOSEN[:3], replace(CHOSEN[3], method="UnquantizedFusedMoEMethod")]
    assert method_problems(bf16, get_format("bf16"), ["experts"]) == []


def test_blocks_of_other_tools_run_on_another_class_which_rows_do_not_pass_for():
    blocks = get_format("fp8_block")
    other = blocks.other_storage
    chosen = [replace(one, method=other.linear) for one in CHOSEN[:2]]
    chosen += [CHOSEN[2], replace(CHOSEN[3], method=other.experts, backend="Fp8MoeBackend.TRITON")]
    assert method_problems(chosen, blocks, ["experts", "attention"]) == []
    assert len(method_problems(chosen, blocks, ["experts"])) == 2
    assert len(method_problems(chosen, get_format("fp8_channel"), ["experts", "attention"])) == 3
    rows = [replace(one, method=one.method.removesuffix(BLOCKS)) for one in chosen]
    assert len(method_problems(rows, blocks, ["experts", "attention"])) == 3
    backend = [*chosen[:3], replace(chosen[3], backend="Fp8MoeBackend.VLLM_CUTLASS")]
    (problem,) = method_problems(backend, blocks, ["experts", "attention"])
    assert "runs on VLLM_CUTLASS, whose arithmetic the learner does not follow" in problem


class CompressedTensorsW8A8Fp8:
    def __init__(self, weight_block_size):
        self.weight_block_size = weight_block_size


class CompressedTensorsLinearMethod:
    pass


@pytest.mark.parametrize(("blocks", "note"), [([128, 128], BLOCKS), (None, ""), ([64, 64], "")])
def test_blocks_are_told_from_rows(blocks, note):
    layer = SimpleNamespace(quant_method=CompressedTensorsLinearMethod(), scheme=CompressedTensorsW8A8Fp8(blocks))
    assert method_label(layer) == f"CompressedTensorsLinearMethod/CompressedTensorsW8A8Fp8{note}"


class CompressedTensorsWNA16:
    def __init__(self, num_bits):
        self.num_bits = num_bits


@pytest.mark.parametrize(("num_bits", "note"), [(8, " of 8-bit codes"), (3, " of 3-bit codes"), (4, "")])
def test_codes_are_told_from_those_of_4_bits(num_bits, note):
    layer = SimpleNamespace(quant_method=CompressedTensorsLinearMethod(), scheme=CompressedTensorsWNA16(num_bits))
    assert method_label(layer) == f"CompressedTensorsLinearMethod/CompressedTensorsWNA16{note}"


def test_an_engine_of_another_width_passes_for_its_own_and_takes_no_refits():
    fmt, targets = get_format("w5a16"), ["attention"]
    method = "CompressedTensorsLinearMethod/CompressedTensorsWNA16 of 5-bit codes"
    chosen = [replace(one, method=method, backend="HummingLinearKernel") for one in CHOSEN[:2]]
    assert method_problems(chosen, fmt, targets) == []
    assert refit_problems(chosen, fmt, targets) == [
        "vLLM serves codes of 5 bits from checkpoints only, and takes no refits of w5a16"
    ]
    assert len(method_problems(chosen, get_format("w6a16"), targets)) == 2
    # Codes of 2 bits are refitted in the storage of w4a16, which an engine in their own width has not.
    narrow = [replace(one, method=method.replace("5", "2")) for one in chosen]
    assert method_problems(narrow, get_format("w2a16", own_width=True), targets) == []
    assert len(refit_problems(narrow, get_format("w2a16"), targets)) == 2
    (other, _) = method_problems([replace(one, backend="MarlinLinearKernel") for one in chosen], fmt, targets)
    assert "runs on MarlinLinearKernel, whose arithmetic the learner does not follow" in other


def test_a_layer_with_adapters_is_known_by_its_own_method_and_once():
    linear = SimpleNamespace(quant_method=CompressedTensorsLinearMethod())
    wrapped = SimpleNamespace(old_quant_method=CompressedTensorsLinearMethod())
    experts = SimpleNamespace(quant_method=wrapped, lora_base_layer_prefix="base_layer.")
    layers = {
        f"{LAYER}.self_attn.qkv_proj": SimpleNamespace(quant_method=wrapped, base_layer=linear),
        f"{LAYER}.self_attn.qkv_proj.base_layer": linear,
        f"{LAYER}.mlp.experts.base_layer.routed_experts": experts,
        f"{LAYER}.input_layernorm": SimpleNamespace(),
    }
    chosen = chosen_methods(SimpleNamespace(named_modules=layers.items))
    names = [f"{LAYER}.self_attn.qkv_proj", f"{LAYER}.mlp.experts.routed_experts"]
    assert [(one.layer, one.method) for one in chosen] == [(name, "CompressedTensorsLinearMethod") for name in names]


def test_every_fall_back_is_named():
    chosen = [
        *CHOSEN[:2],
        replace(CHOSEN[2], method="CompressedTensorsLinearMethod/CompressedTensorsWNA16"),
        replace(CHOSEN[3], method="UnquantizedFusedMoEMethod", backend="UnquantizedMoeBackend.CPU"),
    ]
    with pytest.raises(ValueError, match="does not serve this model as w4a16") as raised:
        require_methods(chosen, W4A16, ["experts"])
    assert str(raised.value).splitlines()[1:] == [
        f"  {LAYER}.mlp.gate: CompressedTensorsLinearMethod/CompressedTensorsWNA16 in place of UnquantizedLinearMethod",
        f"  {LAYER}.mlp.experts.routed_experts: UnquantizedFusedMoEMethod (UnquantizedMoeBackend.CPU) in place of "
        "CompressedTensorsWNA16MoEMethod",
    ]


def test_what_marlin_refuses_is_named_with_the_reason():
    experts = ChosenMethod(CHOSEN[3].layer, "CompressedTensorsWNA16MarlinMoEMethod", "WNA16MoEBackend.MARLIN")
    assert method_problems([*CHOSEN[:3], experts], W4A16, ["experts"]) == []
    triton = replace(experts, method="CompressedTensorsWNA16MoEMethod", backend="", shape="H=2112, I=128 on a rank")
    assert method_problems([*CHOSEN[:3], triton], W4A16, ["experts"]) == [
        f"{experts.layer}: {triton.method} ({triton.shape}) in place of {experts.method}; "
        "Marlin needs H to be a multiple of 128"
    ]


def test_one_method_for_two_widths_is_told_apart_by_its_width():
    wide, narrow = get_format("w8a16"), W4A16
    for served, other in ((wide, narrow), (narrow, wide)):
        experts = ChosenMethod(CHOSEN[3].layer, served.vllm.experts.method, "WNA16MoEBackend.MARLIN")
        assert method_problems([*CHOSEN[:3], experts], served, ["experts"]) == []
        assert method_problems([*CHOSEN[:3], experts], other, ["experts"]) == [
            f"{experts.layer}: {experts.method} (WNA16MoEBackend.MARLIN) in place of {other.vllm.experts.method}"
        ]
    unfit = ChosenMethod(CHOSEN[3].layer, "CompressedTensorsWNA16MoEMethod of 8-bit codes", "")
    assert method_problems([*CHOSEN[:3], unfit], wide, ["experts"])[0].endswith("H to be a multiple of 128")


def test_int8_experts_on_16_bit_activations_are_named_with_what_quantizes_them():
    fmt = get_format("int8")
    experts = ChosenMethod(CHOSEN[3].layer, fmt.vllm.experts.method, "Int8MoeBackend.TRITON")
    assert method_problems([*CHOSEN[:3], experts], fmt, ["experts"]) == []
    silent = replace(experts, method=f"{experts.method} on 16-bit activations")
    assert method_problems([*CHOSEN[:3], silent], fmt, ["experts"]) == [
        f"{experts.layer}: {silent.method} (Int8MoeBackend.TRITON) in place of {experts.method}; "
        "vLLM 0.25.1 quantizes them with worker_extension_cls='qarl_nemo.refit.load.PackedRefit' only"
    ]


def test_nvfp4_runs_on_marlin_in_dense_layers_too():
    fmt = get_format("nvfp4")
    experts = ChosenMethod(CHOSEN[3].layer, fmt.vllm.experts.method, "NvFp4MoeBackend.MARLIN")
    dense = [replace(one, method=fmt.vllm.linear.method, backend="MarlinNvFp4LinearKernel") for one in CHOSEN[:2]]
    assert method_problems([*dense, CHOSEN[2], experts], fmt, ["experts", "attention"]) == []
    emulated = replace(dense[0], backend="EmulationNvFp4LinearKernel")
    (problem,) = method_problems([emulated, dense[1], CHOSEN[2], experts], fmt, ["experts", "attention"])
    assert problem == (
        f"{LAYER}.self_attn.qkv_proj: {fmt.vllm.linear.method} runs on EmulationNvFp4LinearKernel, whose arithmetic "
        "the learner does not follow; it follows MarlinNvFp4LinearKernel: set vLLM's linear_backend to auto or marlin, "
        "and leave VLLM_BATCH_INVARIANT, VLLM_DISABLED_KERNELS and VLLM_TEST_FORCE_FP8_MARLIN unset"
    )


@pytest.mark.parametrize(
    ("name", "followed", "other"),
    [
        ("w4a16", "MacheteLinearKernel", "ExllamaLinearKernel"),
        ("w4a16", "MarlinLinearKernel", "TritonW4A16LinearKernel"),
        ("w4a16", "CPUWNA16LinearKernel", "ConchLinearKernel"),
        ("w8a16", "MacheteLinearKernel", "HummingLinearKernel"),
        ("w2a16", "MarlinLinearKernel", "HummingLinearKernel"),
        ("w4a8", "CutlassW4A8LinearKernel", "HummingLinearKernel"),
        ("fp8_channel", "CutlassFP8ScaledMMLinearKernel", "MarlinFP8ScaledMMLinearKernel"),
    ],
)
def test_dense_layers_run_on_kernels_that_the_learner_follows(name, followed, other):
    fmt = get_format(name)
    dense = [replace(one, method=fmt.vllm.linear.method, backend=followed) for one in CHOSEN[:2]]
    assert method_problems(dense, fmt, ["attention"]) == []
    (problem,) = method_problems([replace(dense[0], backend=other), dense[1]], fmt, ["attention"])
    assert f"runs on {other}, whose arithmetic the learner does not follow" in problem


class CutlassFP8ScaledMMLinearKernel:
    pass


def test_the_kernel_of_rows_in_fp8_is_found_where_vllm_keeps_it():
    scheme = CompressedTensorsW8A8Fp8(None)
    scheme.fp8_linear = CutlassFP8ScaledMMLinearKernel()
    layer = SimpleNamespace(quant_method=CompressedTensorsLinearMethod(), scheme=scheme)
    (record,) = chosen_methods(SimpleNamespace(named_modules={CHOSEN[0].layer: layer}.items))
    assert record.backend == "CutlassFP8ScaledMMLinearKernel"
    assert method_problems([record], get_format("fp8_channel"), ["attention"]) == []


def test_a_target_without_a_layer_is_named():
    with pytest.raises(ValueError, match="no layer of the engine is one of the target 'experts'"):
        require_methods(CHOSEN[:3], W4A16, ["experts"])


def test_attention_that_stays_unquantized_though_targeted_is_named():
    with pytest.raises(ValueError, match=r"qkv_proj: UnquantizedLinearMethod in place of Compressed.*\n.*o_proj"):
        require_methods(CHOSEN, W4A16, ["experts", "attention"])


def test_a_quantized_head_is_named_and_a_quantized_cache_is_not():
    others = [ChosenMethod("lm_head", "Fp8LinearMethod", ""), ChosenMethod(f"{LAYER}.self_attn.attn", "Fp8KVCache", "")]
    problems = method_problems([*CHOSEN, *others], W4A16, ["experts"])
    assert problems == ["lm_head: Fp8LinearMethod in place of Unquantized.*"]


@pytest.mark.parametrize(
    ("name", "method", "followed", "other"),
    [
        ("fp8_block", "Fp8MoEMethod", "TRITON", "DEEPGEMM"),
        ("fp8_channel", "CompressedTensorsW8A8Fp8MoEMethod", "VLLM_CUTLASS", "FLASHINFER_CUTLASS"),
        ("int8", "CompressedTensorsW8A8Int8MoEMethod", "TRITON", "HUMMING"),
        ("nvfp4", "CompressedTensorsW4A4Nvfp4MoEMethod", "MARLIN", "EMULATION"),
    ],
)
def test_kernels_with_other_arithmetic_are_named(name, method, followed, other):
    experts = ChosenMethod(CHOSEN[3].layer, method, f"Fp8MoeBackend.{followed}")
    fmt = get_format(name)
    assert method_problems([*CHOSEN[:3], experts], fmt, ["experts"]) == []
    (problem,) = method_problems([*CHOSEN[:3], replace(experts, backend=f"Fp8MoeBackend.{other}")], fmt, ["experts"])
    assert problem.startswith(
        f"{experts.layer}: {method} runs on {other}, whose arithmetic the learner does not follow"
    )
    assert followed in problem
    assert f"set vLLM's moe_backend to {' or '.join(fmt.vllm.experts.backends)}, and leave" in problem

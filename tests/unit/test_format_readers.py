"""Whoever asks about a format gets its record's answer: all formats, targets and devices, reader by reader."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qarl_formats import (
    BASELINE,
    DEFAULT_FORMAT,
    FORMAT_NAMES,
    NARROW_NAMES,
    find_format,
    get_format,
    quantization_config,
)
from qarl_kernels import gemm_operand, quantize_weight, stored_layout
from qarl_nemo.architecture import Architecture
from qarl_nemo.checkpoints.shapes import WEIGHT_SHAPE_BYTES, shape_problems, stored_bytes
from qarl_nemo.config import QarlConfig
from qarl_nemo.measure.served import cpu_problems
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.megatron.checks import require_supported
from qarl_nemo.memory import Learner, ModelSize, Parallelism, rank_memory, served_bytes
from qarl_nemo.metrics.report.rollout_speed import _COLORS
from qarl_nemo.names import TARGETS, target_of
from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.checks.conflicts import find_conflicts
from qarl_nemo.nemo_rl.model_shapes import _DEFAULTS
from qarl_nemo.refit.engine_methods import ChosenMethod, method_problems
from qarl_nemo.refit.engine_settings import COMPILATION, WORKER_EXTENSION, kernel_options, serve_command
from qarl_nemo.train.vllm.limits import config_problems
from qarl_nemo.train.vllm.shapes import gpu_problems

# The last is refitted by nobody, and served in dense layers only.
NAMES = (*FORMAT_NAMES, *NARROW_NAMES, "w7a16")
RECORDS = [
    pytest.param(get_format(name, group_size=size), id=name if size is None else f"{name}_g{size}")
    for name in NAMES
    for size in get_format(name).group_sizes or (None,)
]
TARGET_SETS = [subset for size in (1, 2) for subset in itertools.combinations(TARGETS, size)]


def block(fmt, targets=("experts",)) -> QarlConfig:
    return QarlConfig(
        format=fmt.name,
        group_size=fmt.group_size if fmt.group_sizes else None,
        targets=targets,
        alignment="aligned" if fmt.is_quantized else "none",
    )


@pytest.mark.parametrize("fmt", RECORDS)
def test_the_config_knows_it(fmt):
    qarl = block(fmt)
    assert qarl.served_format == qarl.executed_format == fmt
    assert QarlConfig.keys_without_meaning({"format": fmt.name}) == (
        set() if fmt.group_sizes else {"group_size", "scale_convention", "nested_in", "schedule"}
    )
    if fmt.is_quantized:
        assert qarl.model_copy(update={"alignment": "rollout_only"}).executed_format == get_format(BASELINE)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("targets", TARGET_SETS)
@pytest.mark.parametrize("fmt", RECORDS)
def test_what_a_device_serves(fmt, targets, device):
    served = fmt.served_on(device)
    legal = served is not None and served.serves(fmt.group_size, targets)
    rollout, policy = SimpleNamespace(own_gpu=False, top_p=1), SimpleNamespace(precision="bfloat16", lora=None)
    qarl = block(fmt, targets).model_copy(update={"router_replay": False})
    problems = config_problems(SimpleNamespace(qarl=qarl, rollout=rollout, policy=policy), device)
    assert (problems == []) == legal
    if device == "cpu" and fmt.is_quantized:
        assert (cpu_problems(fmt, targets) == []) == legal
    if device == "cuda":
        asked = NemoQarlConfig.model_validate(qarl.model_dump(exclude={"router_replay"}))
        lines = find_conflicts({}, asked)
        assert legal != any(line.startswith(("qarl.format=", "qarl.group_size=")) for line in lines)


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
@pytest.mark.parametrize("targets", TARGET_SETS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_only_its_own_methods_pass(name, targets, device):
    fmt, others = get_format(name), [get_format(other) for other in FORMAT_NAMES if other != name]
    assert method_problems(methods(fmt, targets, device), fmt, targets) == []
    for other in others:
        assert len(method_problems(methods(other, targets, device), fmt, targets)) == len(targets)


def methods(fmt, targets, device) -> list[ChosenMethod]:
    layers = {"experts": "experts", "attention": "self_attn.qkv_proj", "mlp": "gate_up_proj"}
    chosen = []
    for target in targets:
        layer = f"model.layers.0.{'' if target == 'attention' else 'mlp.'}{layers[target]}"
        on_cpu = device == "CPU" and fmt.vllm.cpu and fmt.vllm.cpu.experts_method
        experts = on_cpu or fmt.vllm.experts.method
        chosen.append(ChosenMethod(layer, experts if target == "experts" else fmt.vllm.linear.method, device))
    return chosen


@pytest.mark.parametrize("targets", TARGET_SETS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_kernels_that_are_chosen_are_followed(name, targets):
    fmt = get_format(name)
    options = kernel_options(fmt, targets)
    assert options.get("moe_backend") == (fmt.vllm.experts.backend if "experts" in targets else None)
    assert options.get("linear_backend") == (fmt.vllm.linear.backend if targets != ("experts",) else None)
    for kernel in fmt.vllm.experts.followed:
        backend = f"Backend.{kernel}"
        experts = ChosenMethod("model.layers.0.mlp.experts", fmt.vllm.experts.method, backend)
        assert method_problems([experts], fmt, ["experts"]) == []
    if fmt.vllm.experts.backend and fmt.vllm.experts.followed:
        assert fmt.vllm.experts.backend.upper() in fmt.vllm.experts.followed


@pytest.mark.parametrize("fmt", RECORDS)
def test_bytes_a_weight(fmt):
    shape = (256, 1920)
    layout = stored_layout(shape, fmt)
    stored = sum(torch.Size(part).numel() * dtype.itemsize for part, dtype in layout.values())
    assert stored_bytes(shape, fmt) == stored + WEIGHT_SHAPE_BYTES * fmt.stores_shape
    # A row's own scale counts for nothing in a row of thousands, a whole weight's even less.
    scales = 256 * fmt.weight_kind.endswith("_rows") + fmt.tensor_scaled
    assert stored - 4 * scales == fmt.bits_per_weight / 8 * 256 * 1920
    if not fmt.vllm.refits:
        return
    model = ModelSize(2, 256, 4, 4, 64, 512, 256, num_experts=4, top_k=2)
    kept, dropped = (Learner(fmt.name, fmt.group_size or 128, keep_operand=keep) for keep in (True, False))
    layer = model.num_layers * model.expert_parameters
    packed = {one: rank_memory(model, Parallelism(1), one).parts["packed"] / layer for one in (kept, dropped)}
    assert packed[dropped] == fmt.bits_per_weight / 8
    assert packed[kept] - packed[dropped] == fmt.operand_bytes
    assert served_bytes(model, kept) == 2 * (model.num_parameters - layer) + fmt.bits_per_weight / 8 * layer


@pytest.mark.parametrize("fmt", RECORDS)
def test_operands_are_the_stored_tensors_or_bytes_of_their_own(fmt):
    weight = quantize_weight(torch.randn(256, 256), fmt)
    operand = gemm_operand(weight, torch.bfloat16)
    # The reference holds FP8 operands in FP32; whether it is the stored tensor shows in the values.
    stored = weight.tensors.get("weight")
    is_stored = stored is not None and torch.equal(operand.values.float(), stored.float())
    assert is_stored == (fmt.operand_bytes == 0)
    if fmt.operand_bytes == 2:
        assert operand.values.dtype == torch.bfloat16
    assert (operand.scale is not None) == (fmt.activation_kind != "none")


def test_a_model_may_leave_its_head_dim_to_be_computed():
    config = model_config(SIZES[-1], "qwen3_moe") | {"head_dim": None}
    assert gpu_problems(get_format("w4a16"), ["attention"], SimpleNamespace(**config), (9, 0)) == []


SIZES = [
    {"hidden_size": hidden, "width": width, "num_key_value_heads": heads, "head_dim": head_dim}
    for hidden, width, heads, head_dim in itertools.product((128, 192, 256, 512), (64, 96, 128, 256), (1, 2), (32, 64))
]


@pytest.mark.parametrize("targets", [("experts",), ("experts", "attention"), ("attention",), ("mlp",)])
@pytest.mark.parametrize("fmt", RECORDS)
def test_sizes_that_are_refused_early_are_those_that_quantize_refuses(fmt, targets):
    for sizes in SIZES:
        config = model_config(sizes, "qwen3" if "mlp" in targets else "qwen3_moe")
        late = [
            problem
            for name, shape in Architecture.parse(config, "config.json").parameters()
            if (target := target_of(name)) in targets
            for problem in shape_problems(name, target, shape, fmt)
        ]
        early = gpu_problems(fmt, targets, SimpleNamespace(**config), (9, 0))
        assert bool(early) == bool(late), (sizes, early, late)


def model_config(sizes, model_type) -> dict:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": sizes["width"]}
    return {
        "model_type": model_type,
        "architectures": ["Qwen3ForCausalLM" if model_type == "qwen3" else "Qwen3MoeForCausalLM"],
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "intermediate_size": sizes["width"],
        **{key: sizes[key] for key in ("hidden_size", "num_key_value_heads", "head_dim")},
        **(experts if model_type == "qwen3_moe" else {}),
    }


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_only_its_gpus_serve_it(name):
    fmt, model = get_format(name), SimpleNamespace(**model_config(SIZES[-1], "qwen3_moe"))
    for capability in ((7, 0), (8, 0), (9, 0), (10, 0)):
        problems = gpu_problems(fmt, ["experts"], model, capability)
        first, last = fmt.vllm.capabilities or (capability, capability)
        assert any("this GPU is SM" in problem for problem in problems) != (first <= capability <= last)


@pytest.mark.parametrize("fmt", RECORDS)
def test_what_ranks_of_the_learner_may_cut(fmt):
    shapes = {"hidden_size": 256, "moe_ffn_hidden_size": 512, "expert_tensor_parallel_size": 2}
    problems = supported(fmt, **shapes)
    assert any("scales whole rows" in problem for problem in problems) == fmt.row_scaled
    # A shard of 192 rows of gate would share its second block with up.
    problems = supported(fmt, **shapes | {"moe_ffn_hidden_size": 384})
    assert any("would hold gate and up" in problem for problem in problems) == (fmt.scale_rows == 128)


def supported(fmt, **shapes) -> list[str]:
    try:
        require_supported(SimpleNamespace(**_DEFAULTS | shapes), Alignment(fmt))
    except ValueError as error:
        return str(error).splitlines()[1:]
    return []


@pytest.mark.parametrize("name", [*FORMAT_NAMES, *NARROW_NAMES])
def test_what_vllm_reads_in_config_json(name):
    fmt, found = get_format(name), quantization_config(get_format(name), ignore=[])
    said = None if found is None else found.get("format", found["quant_method"])
    assert said == fmt.storage
    assert (found is None) != fmt.is_quantized


@pytest.mark.parametrize("name", NARROW_NAMES)
def test_a_narrow_grid_is_w4a16_to_whoever_serves_it(name):
    fmt, whole = get_format(name), get_format("w4a16")
    assert (fmt.grid_bits, whole.grid_bits) == (int(name[1]), 4)
    assert dataclasses.replace(fmt, name="w4a16", grid_bits=4) == whole
    assert quantization_config(fmt, ignore=[]) == quantization_config(whole, ignore=[])
    assert method_problems(methods(whole, ["experts"], "CUDA"), fmt, ["experts"]) == []
    assert kernel_options(fmt, TARGETS) == kernel_options(whole, TARGETS)
    assert stored_layout((256, 256), fmt) == stored_layout((256, 256), whole)


def test_every_format_has_a_color_and_the_default_is_served():
    assert set(_COLORS) == set(FORMAT_NAMES)
    assert len(set(_COLORS.values())) == len(FORMAT_NAMES)
    assert QarlConfig().format == DEFAULT_FORMAT == Learner().format
    assert find_format("w4a4") is None


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_command_that_serves_it_extends_workers_that_need_it(name):
    fmt = get_format(name)
    commands = [serve_command(Path("a model"), fmt, targets) for targets in (["experts"], ["attention"])]
    extended = f"vllm serve 'a model' --worker-extension-cls {WORKER_EXTENSION}"
    assert commands == [extended if fmt.vllm.experts.mended else "vllm serve 'a model'", "vllm serve 'a model'"]


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_its_operators_are_among_those_that_every_engine_starts_with(name):
    assert get_format(name).vllm.custom_op in (None, *COMPILATION["custom_ops"])

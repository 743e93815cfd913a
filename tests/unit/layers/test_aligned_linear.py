import pytest
import torch
from torch import nn

from qarl_kernels import gemm, gemm_operand, quantize_weight
from qarl_nemo.layers.linear import AlignedLinear
from qarl_nemo.layers.packed import PackedLinear, PackedWeight
from qarl_nemo.layers.weight import MasterChanges
from support.asserts import assert_bitwise_equal, assert_snr
from support.formats import FORMATS, quantized_activations, uneven_weight
from support.layers import executed

pytestmark = pytest.mark.usefixtures("poisoned_empty")

BACKWARDS = ["dequantized", "high_precision"]
MIN_DB = {torch.float32: 110, torch.bfloat16: 45}
OTHER = {"dequantized": "high_precision", "high_precision": "dequantized"}


def make_linear(fmt, *, dtype=torch.float32, backward="dequantized", bias=False, shape=(192, 256)):
    linear = nn.Linear(shape[1], shape[0], bias=bias).to(dtype)
    with torch.no_grad():
        linear.weight.copy_(uneven_weight(*shape).float() * (1 + 2.0**-10 * torch.randn(shape)))
    return AlignedLinear(linear, fmt, MasterChanges(), name="q_proj", backward=backward)


@pytest.mark.parametrize("dtype", MIN_DB)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_gradients_are_the_straight_through_closed_form(fmt, backward, dtype):
    layer = make_linear(fmt, dtype=dtype, backward=backward, bias=True)
    x = torch.randn(3, 5, 256).to(dtype).requires_grad_()
    grad_out = torch.randn(3, 5, 192).to(dtype)
    layer(x).backward(grad_out)
    rows, grad_rows = x.detach().double().view(15, 256), grad_out.double().view(15, 192)
    master = layer.weight.detach().double()
    grad_x = {"dequantized": grad_rows @ executed(layer.weight, fmt), "high_precision": grad_rows @ master}
    assert (x.grad.dtype, layer.weight.grad.dtype) == (dtype, dtype)
    assert_snr(x.grad.view(15, 256), grad_x[backward], MIN_DB[dtype])
    assert_snr(layer.weight.grad, grad_rows.mT @ rows, MIN_DB[dtype])
    assert_snr(layer.bias.grad, grad_rows.sum(0), MIN_DB[dtype])
    if fmt.is_quantized or dtype == torch.float32:
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(x.grad.view(15, 256), grad_x[OTHER[backward]], MIN_DB[dtype])
    if fmt.activation_kind != "none":
        # The weight's gradient takes the input as it came, not as the GEMM saw it.
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(layer.weight.grad, grad_rows.mT @ quantized_activations(rows, fmt), MIN_DB[dtype])


@pytest.mark.parametrize("key", [key for key, fmt in FORMATS.items() if fmt.activation_kind == "none"])
def test_dequantized_is_the_derivative_of_what_ran(key):
    x = torch.randn(3, 256, dtype=torch.float64, requires_grad=True)
    layer = make_linear(FORMATS[key], dtype=torch.float64, shape=(8, 256))
    assert torch.autograd.gradcheck(layer, x, fast_mode=True)
    if FORMATS[key].weight_kind == "int":
        layer.backward = "high_precision"
        assert not torch.autograd.gradcheck(layer, x, fast_mode=True, raise_exception=False)


def test_a_master_that_changes_between_forward_and_backward_is_noticed(fmt):
    layer = make_linear(fmt)
    out = layer(torch.randn(3, 256))
    layer.aligned["weight"].changes.bump()
    with pytest.raises(AssertionError, match="q_proj changed between forward and backward"):
        out.sum().backward()


def test_a_dropped_straight_through_estimator_is_noticed(fmt):
    layer, x = make_linear(fmt), torch.randn(7, 256)
    grad_out = torch.randn(7, 192)
    layer(x).backward(grad_out)
    expected = grad_out.double().mT @ x.double()
    assert_snr(layer.weight.grad, expected, MIN_DB[torch.float32])
    # Rounding is flat: without the estimator nothing reaches the master.
    leaf = layer.weight.detach().clone().requires_grad_()
    (x @ torch.round(leaf).mT).backward(grad_out)
    with pytest.raises(AssertionError, match="SNR"):
        assert_snr(leaf.grad, expected, MIN_DB[torch.float32])


@pytest.mark.parametrize("dtype", MIN_DB)
def test_the_forward_is_the_quantized_gemm(fmt, dtype):
    layer, x = make_linear(fmt, dtype=dtype, bias=True), torch.randn(2, 3, 256).to(dtype)
    result = layer(x)
    expected = quantized_activations(x.view(6, 256), fmt) @ executed(layer.weight, fmt).mT + layer.bias.double()
    assert (result.shape, result.dtype) == ((2, 3, 192), dtype)
    assert_snr(result.view(6, 192), expected, MIN_DB[dtype])
    if fmt.is_quantized:
        with pytest.raises(AssertionError, match="SNR"):
            assert_snr(result, nn.functional.linear(x, layer.weight, layer.bias), MIN_DB[dtype])


@pytest.mark.parametrize("name", ["int8", "fp8_channel", "bf16"])
def test_learner_and_sampler_add_a_fused_bias_before_the_rounding(name):
    layer, x = make_linear(FORMATS[name], dtype=torch.bfloat16, bias=True), torch.randn(16, 256).bfloat16()
    quantized = quantize_weight(layer.weight, layer.aligned["weight"].format)
    slot = PackedWeight(quantized.format, (192, 256), torch.bfloat16, keep_operand=True)
    slot.fill(quantized, slot.prepare(quantized))
    operand = gemm_operand(quantized, torch.bfloat16)
    expected = gemm(x, operand, bias=layer.bias.detach())
    assert_bitwise_equal(layer(x).detach(), expected)
    assert_bitwise_equal(PackedLinear(slot, layer.bias)(x).detach(), expected)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_equal(gemm(x, operand) + layer.bias.detach(), expected)


def test_training_and_gradients_do_not_change_the_forward(fmt):
    layer, x = make_linear(fmt, dtype=torch.bfloat16), torch.randn(5, 256).bfloat16()
    training = layer.train()(x)
    assert_bitwise_equal(layer.eval()(x), training)
    with torch.no_grad():
        assert_bitwise_equal(layer(x), training)
    with torch.inference_mode():
        assert_bitwise_equal(layer(x).clone(), training)


def test_a_forward_under_inference_mode_leaves_a_cache_that_trains(fmt):
    layer, x = make_linear(fmt), torch.randn(5, 256, requires_grad=True)
    with torch.inference_mode():
        before = layer(x.detach()).clone()
    after = layer(x)
    after.sum().backward()
    assert_bitwise_equal(after.detach(), before.clone())
    assert_snr(x.grad, torch.ones(5, 192).double() @ executed(layer.weight, fmt), MIN_DB[torch.float32])


@pytest.mark.parametrize("backward", BACKWARDS)
def test_bf16_activations_on_fp32_masters(fmt, backward):
    layer, x = make_linear(fmt, backward=backward, bias=True), torch.randn(5, 256).bfloat16().requires_grad_()
    result = layer(x)
    result.backward(torch.ones_like(result))
    assert (result.dtype, x.grad.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert_snr(layer.weight.grad, torch.ones(192, 5).double() @ x.detach().double(), MIN_DB[torch.float32])
    assert_bitwise_equal(layer.bias.grad, torch.full((192,), 5.0))


@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256)])
def test_no_rows(fmt, shape):
    layer, x = make_linear(fmt), torch.zeros(shape, requires_grad=True)
    result = layer(x)
    result.sum().backward()
    assert (result.shape, x.grad.shape) == ((*shape[:-1], 192), shape)
    assert not layer.weight.grad.any()


def test_parameters_stay_the_replaced_layers(fmt):
    linear = nn.Linear(256, 192)
    layer = AlignedLinear(linear, fmt, MasterChanges())
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert dict(layer.named_parameters()).keys() == dict(linear.named_parameters()).keys()
    before = linear.weight.detach().clone()
    layer(torch.randn(2, 256))
    assert_bitwise_equal(linear.weight.detach(), before)


def test_an_unknown_backward_mode_names_the_legal_ones(fmt):
    with pytest.raises(ValueError, match="unknown backward mode 'bf16'; legal: dequantized, high_precision"):
        AlignedLinear(nn.Linear(256, 192), fmt, MasterChanges(), backward="bf16")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_master_is_named_by_the_forward(fmt, bad):
    layer = make_linear(fmt)
    with torch.no_grad():
        layer.weight[3, 7] = bad
    with pytest.raises(ValueError, match=r"q_proj \[192, 256\] \(1, the first at index \[3, 7\]"):
        layer(torch.randn(1, 256))


def test_the_executed_weight_is_the_quantizers(fmt):
    layer = make_linear(fmt)
    for suffix, tensor in quantize_weight(layer.weight, fmt).tensors.items():
        assert_bitwise_equal(layer.aligned["weight"].quantized().tensors[suffix], tensor)

"""The Megatron learner on one GPU with Transformer-Engine, as NeMo-RL wraps and feeds it."""

import importlib.util

import pytest
import torch
import torch.distributed as dist

from qarl_kernels import get_format
from support.asserts import assert_bitwise_equal
from support.needs import TRANSFORMER_ENGINE

pytestmark = [pytest.mark.gpu, TRANSFORMER_ENGINE]

FORMATS = ("w4a16", "w4a8", "fp8_block", "fp8_channel", "int8", "nvfp4", "bf16")
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
BF16_STATES = {
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": torch.bfloat16,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.bfloat16,
}
WRAPPERS = {
    "adam": (OVERLAPPED, {}, False),
    "adam_fused_accumulation": (OVERLAPPED, {}, True),
    "adam_bf16_states": (OVERLAPPED | {"grad_reduce_in_fp32": False}, BF16_STATES, False),
    "muon": ({}, {"optimizer": "muon", "use_distributed_optimizer": False}, False),
    "dist_muon": ({}, {"optimizer": "dist_muon", "use_distributed_optimizer": False}, False),
}


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Megatron's groups of one rank, and the modules that import Megatron."""
    from support.megatron import models as megatron_models
    from support.megatron import training as megatron_training

    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    with megatron_models.parallel(megatron_models.Layout()):
        yield megatron_training
    dist.destroy_process_group()


def small_model(name, **options):
    from qarl_nemo.megatron.alignment import Alignment
    from support.megatron.models import Layout, Shape, megatron_model

    backend = options.pop("backend", "kernels")
    shape = Shape(hidden=256, inner=256, sequence=64, scale=1.0)
    alignment = Alignment(get_format(name), backend=backend)
    return megatron_model(Layout(), alignment, torch.bfloat16, shape, **options), alignment, shape


def grads_of(model, losses):
    model.zero_grad(set_to_none=True)
    losses.mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", FORMATS)
def test_packed_sequences_are_the_sequences(megatron, name):
    from megatron.core.packed_seq_params import PackedSeqParams

    from support.megatron.compare import relative_error

    model, _, shape = small_model(name)
    batch = megatron.tokens(shape)
    inputs, labels = batch[:, :-1], batch[:, 1:]
    positions = torch.arange(shape.sequence, device="cuda").repeat(len(batch)).unsqueeze(0)
    ends = torch.arange(len(batch) + 1, device="cuda", dtype=torch.int32) * shape.sequence
    longest = {"max_seqlen_q": shape.sequence, "max_seqlen_kv": shape.sequence}
    packed = PackedSeqParams("thd", ends, ends, **longest)
    one_row = [tensor.reshape(1, -1) for tensor in (inputs, labels)]
    together = model(one_row[0], positions, None, labels=one_row[1], packed_seq_params=packed)
    packed_grads = grads_of(model, together)
    apart = model(inputs, positions.view(len(batch), -1), None, labels=labels)
    assert_bitwise_equal(together.view_as(apart), apart)
    for key, grad in grads_of(model, apart).items():
        assert relative_error(packed_grads[key], grad) < 1e-3, key
    # A boundary in another place is another loss.
    shifted = PackedSeqParams("thd", (ends + 1).clamp(max=ends[-1]) * (ends > 0), ends, **longest)
    shifted.cu_seqlens_kv = shifted.cu_seqlens_q
    wrong = model(one_row[0], positions, None, labels=one_row[1], packed_seq_params=shifted)
    assert not torch.equal(wrong.view_as(apart), apart)


def test_norms_and_rotation_round_where_the_engine_does(megatron):
    from qarl_nemo.megatron.alignment import Alignment
    from support.megatron import run_engine_rounding as rounding
    from support.megatron.models import Layout

    model = rounding.megatron(Layout(), Alignment(rounding.FORMAT, rounding.TARGETS, engine_rounding=True))
    record = rounding.recorded(model)
    megatron.forward_backward(model)
    differing = rounding.differing(record, *rounding.learners())
    assert len(differing) == 8
    for operator, (from_engine, from_other) in differing.items():
        assert from_engine == 0, operator
        assert from_other > 0, operator


def wrapped(megatron, name, wrapper):
    """A small model as NeMo-RL wraps it, its core, alignment, shape and optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from qarl_nemo.megatron.alignment import bump_on_step
    from qarl_nemo.megatron.stacked_muon import stack_muon

    settings, options, fused = WRAPPERS[wrapper]
    if "muon" in wrapper and importlib.util.find_spec("emerging_optimizers") is None:
        pytest.skip("needs emerging-optimizers")
    core, alignment, shape = small_model(name, moe_router_dtype="fp64")
    for layer in core.decoder.layers:
        layer.mlp.router.weight.requires_grad = False
    if fused:
        megatron.fuse_accumulation([core])
    ddp = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True} | settings)
    model = DistributedDataParallel(core.config, ddp, Float16Module(core.config, core))
    core.config.no_sync_func = model.no_sync
    adam = {"optimizer": "adam", "use_distributed_optimizer": True}
    config = OptimizerConfig(**adam | {"lr": 0.01, "bf16": True, "params_dtype": torch.bfloat16} | options)
    optimizer = get_megatron_optimizer(config, [model])
    assert (stack_muon(optimizer) > 0) == ("muon" in wrapper)
    bump_on_step(optimizer, alignment.changes, [model])
    return model, core, alignment, shape, optimizer


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["w4a16", "fp8_block"])
def test_wrapped_as_nemo_rl_wraps_it_it_learns_and_publishes(megatron, name, wrapper):
    from support.megatron.compare import published
    from support.megatron.whole import requantized

    model, core, alignment, shape, optimizer = wrapped(megatron, name, wrapper)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        losses.append(megatron.forward_backward([model], shape))
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert alignment.changes.count == 6
    tensors = dict(published([model], vocab_size=shape.vocab))
    for key, tensor in requantized([core], alignment.format):
        assert_bitwise_equal(tensors[key], tensor)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_optimizer_that_leaves_between_steps_comes_back_whole_and_learns(megatron, wrapper):
    from qarl_nemo.megatron.offload import Offload, optimizer_tensors, reload_for_update

    model, _, _, shape, optimizer = wrapped(megatron, "w4a16", wrapper)
    carrier = Offload(2**20)
    reload_for_update(optimizer, carrier)
    losses, carried = [], []
    for _ in range(6):
        tensors = optimizer_tensors(optimizer, model)
        expected = [tensor.cpu() for tensor in tensors]
        carrier.start_offload(tensors)
        carrier.finish_offload()
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        carried.append(sum(tensor.nbytes for tensor in tensors))
        optimizer.zero_grad()
        losses.append(megatron.forward_backward([model], shape))
        carrier.finish_reload()
        for tensor, one in zip(tensors, expected, strict=True):
            assert_bitwise_equal(tensor.cpu(), one)
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    # Of each trainable parameter at least what BF16 states take: two moments and the other half of the master.
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    small = sum(parameter.numel() for parameter in model.parameters() if parameter.numel() < 512)
    assert carried[-1] >= (4 if "muon" in wrapper else 6) * (trainable - small)


def test_transformer_engines_block_recipe_is_close_to_the_kernels(megatron):
    from support.megatron.compare import relative_error

    rows = torch.randn(256, 1, 256, generator=torch.Generator().manual_seed(4)).to("cuda", torch.bfloat16)
    found = {}
    for key, name, backend in (
        ("kernels", "fp8_block", "kernels"),
        ("recipe", "fp8_block", "transformer_engine"),
        ("unquantized", "bf16", "kernels"),
    ):
        layer = small_model(name, backend=backend, num_layers=1)[0].decoder.layers[0].mlp
        x = rows.clone().requires_grad_()
        out, _ = layer(x)
        out.backward(torch.ones_like(out))
        masters = layer.experts.linear_fc1.aligned.master
        found[key] = (out, x.grad, torch.stack([master.grad for master in masters]))
    errors = [relative_error(*pair) for pair in zip(found["recipe"], found["kernels"], strict=True)]
    wrong = relative_error(found["unquantized"][0], found["kernels"][0])
    print("block recipe against kernels: output, input and fc1 gradient", errors, "- unquantized output", wrong)
    assert errors[0] < wrong / 3
    # Its gradients are FP8 products.
    assert max(errors[1:]) < 0.1

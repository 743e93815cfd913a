"""Runs Megatron-core on a CPU with gloo by replacing what it needs a GPU for; import before any Megatron module."""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Stream:
    """A stream or event of a device that has none: everything has happened when it returns."""

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, _):
        pass

    def synchronize(self):
        pass

    def record_event(self, *_):
        return self


torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.Stream = torch.cuda.Event = _Stream
torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: _Stream()
torch.cuda.stream = lambda _: contextlib.nullcontext()
torch.cuda.synchronize = lambda *_: None

from megatron.core.tensor_parallel import mappings, random  # noqa: E402
from megatron.core.transformer import torch_norm  # noqa: E402
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: E402

random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
random._set_cuda_rng_state = lambda *_, **__: None
# Megatron-core 0.16 defines this with Transformer-Engine alone.
moe_utils.te_general_gemm = None


def _to_host(tensor, as_numpy=False, record_stream=False):
    # Megatron's converts nothing that is on the host already, and gloo's all-to-all takes no tensors as sizes.
    return tensor.numpy() if as_numpy and tensor is not None else tensor


token_dispatcher.maybe_move_tensor_to_cpu = _to_host


class RMSNorm(torch.nn.RMSNorm):
    """Torch's, where Megatron's refuses sequence parallelism."""

    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self.returns_residual = False


def _norm(cls, config, hidden_size, eps=1e-5, *_, **__):
    return RMSNorm(config, hidden_size, eps)


torch_norm.WrappedTorchNorm.__new__ = _norm


def _gather_uneven(tensor: Tensor, group, output_split_sizes=None, use_global_buffer=False) -> Tensor:
    # gloo gathers shards of one size only.
    if group.size() == 1:
        return tensor
    sizes = output_split_sizes or [len(tensor)] * group.size()
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    shards = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(shards, padded, group=group)
    return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])


def _reduce_uneven(tensor: Tensor, group, input_split_sizes=None, use_global_buffer=False) -> Tensor:
    if group.size() == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    sizes = input_split_sizes or [len(tensor) // group.size()] * group.size()
    return total.split(list(sizes))[group.rank()].contiguous()


mappings._gather_along_first_dim = _gather_uneven
mappings._reduce_scatter_along_first_dim = _reduce_uneven


class CudaMeansCpu(TorchFunctionMode):
    """Within it, tensors that Megatron makes on device "cuda" are made on the CPU, and say that they are on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        # Megatron's optimizers sort parameters by the names of GPU tensor types.
        return result.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else result

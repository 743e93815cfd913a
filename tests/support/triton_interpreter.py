"""Triton's interpreter with IEEE rounding: runs the kernels on a CPU where there is no CUDA device.

The interpreter of Triton 3.6 to 3.9 truncates when it casts down, multiplies the raw bits of BF16 operands and rounds
twice in a fused multiply-add; torch rounds as the hardware does. Import this module before the first kernel is defined.
"""

import os
from types import SimpleNamespace

import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

# Triton type -> (torch dtype, the numpy dtype that the interpreter stores its bits in)
_TYPES = {
    tl.float32: (torch.float32, np.float32),
    tl.float16: (torch.float16, np.float16),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
}


def _to_torch(data, dtype):
    torch_dtype, numpy_dtype = _TYPES[dtype]
    bits = np.ascontiguousarray(data).view(f"i{np.dtype(numpy_dtype).itemsize}")
    return torch.from_numpy(bits).view(torch_dtype)


def _to_numpy(tensor, dtype):
    numpy_dtype = np.dtype(_TYPES[dtype][1])
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[numpy_dtype.itemsize]
    return tensor.contiguous().view(bits).numpy().view(numpy_dtype)


def _cast(self, src, dst_type, rounding_mode=None):
    source, target = src.dtype.scalar, dst_type.scalar
    if source in _TYPES and target in _TYPES:
        values = _to_torch(src.data, source).float()
        if target == tl.float8e4nv:
            values = values.clamp(-448.0, 448.0)  # the hardware's cast saturates
        return interpreter.TensorHandle(_to_numpy(values.to(_TYPES[target][0]), target), target)
    # A GPU turns NaN into an integer without a word.
    with np.errstate(invalid="ignore"):
        return interpreter.TensorHandle(src.data.astype(interpreter._get_np_dtype(dst_type)), target)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    if a.dtype.scalar == tl.int8:
        product = np.matmul(a.data.astype(np.int32), b.data.astype(np.int32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
    left, right = (_to_torch(operand.data, operand.dtype.scalar).float().numpy() for operand in (a, b))
    return interpreter.TensorHandle(np.matmul(left, right, dtype=np.float32) + d.data, d.dtype.scalar)


def _fma(self, x, y, z):
    exact = x.data.astype(np.float64) * y.data.astype(np.float64)
    return interpreter.TensorHandle((exact + z.data).astype(z.data.dtype), z.dtype.scalar)


_patch_lang, _patch_lang_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor


def _patch_language(_):
    # All that a device function may call, so that it need not be patched once more for each call of one.
    return _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _call_device_function(self, *args, **kwargs):
    # The interpreter's patches the language again, which takes nine tenths of the time of these kernels.
    return self.rewrite()(*args, **kwargs)


def _patch_tensor(tensor, scope):
    # A loaded scalar is an array of one element, which numpy 2.4 and later do not turn into an integer by themselves.
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


if INTERPRETED:
    interpreter._patch_lang, interpreter._patch_lang_tensor = _patch_language, _patch_tensor
    interpreter.InterpretedFunction.__call__ = _call_device_function
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(interpreter.InterpreterBuilder, name, _cast)
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_fma = _fma

"""Checks the kernels that vLLM chose for each layer against those that the format requires: no silent fallback."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qarl_formats import BASELINE, BLOCKS, FP8_BLOCK, QuantFormat, codes_of, get_format
from qarl_nemo.names import TARGETS
from qarl_nemo.refit.engine_layout import plain_name

_BACKEND = re.compile(r"Backend\.(\w+)")
_KERNEL = re.compile(r"(\w+Kernel)\b")
_WIDE_ROWS = " on 16-bit activations"
# method -> why vLLM falls back to it on a GPU, silently
_FALL_BACKS = {
    "CompressedTensorsWNA16MoEMethod": "; Marlin needs H to be a multiple of 128",
    f"CompressedTensorsW8A8Int8MoEMethod{_WIDE_ROWS}": "; vLLM 0.25.1 quantizes them with "
    "worker_extension_cls='qarl_nemo.refit.load.PackedRefit' only",
}
# Variables by which vLLM takes other kernels than its arguments say.
_FORCING = "VLLM_BATCH_INVARIANT, VLLM_DISABLED_KERNELS and VLLM_TEST_FORCE_FP8_MARLIN"
# Where a scheme of vLLM keeps its kernel: those of rows in FP8 the second.
_SCHEME_KERNELS = ("kernel", "fp8_linear")
_CACHE = re.compile(r".*\.self_attn\.attn")
# vLLM fuses q, k and v, and a dense MLP's gate and up.
_KINDS = (
    ("experts", re.compile(r".*\.mlp\.experts(\.routed_experts)?")),
    ("attention", re.compile(r".*\.self_attn\.(qkv|o)_proj")),
    ("mlp", re.compile(r".*\.mlp\.(gate_up|down)_proj")),
    ("router", re.compile(r".*\.mlp\.gate")),
)


@dataclass(frozen=True, slots=True)
class ChosenMethod:
    """How vLLM runs one layer.

    Attributes:
        layer: module name in vLLM.
        method: `method_label` of its quantization method.
        backend: vLLM's name for the method's kernels, of a scheme with a kernel its class; empty if it has none.
        shape: shape of a rank's experts; empty for other layers.
    """

    layer: str
    method: str
    backend: str
    shape: str = ""


def chosen_methods(model: Any) -> list[ChosenMethod]:
    """Return how a model that vLLM has loaded runs each linear, router and expert block."""
    found = []
    for wrapped, module in model.named_modules():
        name, method = plain_name(wrapped), own_method(module)
        if method is None or _kind(name) is None or hasattr(module, "base_layer"):
            continue
        backends = [str(value) for key, value in vars(method).items() if key.endswith("_backend")]
        scheme = getattr(module, "scheme", None)
        kernels = (getattr(scheme, attribute, None) for attribute in _SCHEME_KERNELS)
        backends += [type(kernel).__name__ for kernel in kernels if kernel is not None]
        shape = ""
        if _kind(name) == "experts" and hasattr(module, "intermediate_size_per_partition"):
            shape = f"H={module.hidden_size}, I={module.intermediate_size_per_partition} on a rank"
        found.append(ChosenMethod(name, method_label(module), ", ".join(backends), shape))
    return found


def own_method(module: Any) -> Any:
    """Return a layer's quantization method; of experts with adapters the one that vLLM has wrapped, None if none."""
    method = getattr(module, "quant_method", None)
    adapted = getattr(module, "lora_base_layer_prefix", "")
    return getattr(method, "old_quant_method", method) if adapted else method


def method_label(module: Any) -> str:
    """Name what multiplies a layer's weights.

    Args:
        module: a layer of vLLM's model that has a quantization method.

    Returns:
        The method's class, `/` and its scheme's class if there is one, and a note where a method that says W8A8 leaves
        activations as they are, or one that serves several widths or scales has other codes than of 4 bits, or blocks.
    """
    method, scheme = own_method(module), getattr(module, "scheme", None)
    label = type(method).__name__ + ("" if scheme is None else f"/{type(scheme).__name__}")
    owner = method if scheme is None else scheme
    if "WNA16" in label:
        return label + codes_of(getattr(owner, "num_bits", 4))
    if "W8A8Fp8" in label and getattr(owner, "weight_block_size", None) == [FP8_BLOCK, FP8_BLOCK]:
        return label + BLOCKS
    weight_only = getattr(getattr(method, "moe_quant_config", None), "use_int8_w8a16", False)
    return label + (_WIDE_ROWS if weight_only and "W8A8" in label else "")


def method_problems(chosen: Iterable[ChosenMethod], fmt: QuantFormat, targets: Sequence[str]) -> list[str]:
    """Say where an engine runs a layer with another method than its format's.

    Args:
        chosen: what vLLM chose.
        fmt: format of the targeted layers; all others, except the cache, must be unquantized.
        targets: which layers are quantized.

    Returns:
        One sentence for each such layer, and for each target without a layer in the engine.
    """
    problems, seen = [], set()
    for record in chosen:
        kind = _kind(record.layer)
        seen.add(kind)
        wanted = fmt if kind in targets else get_format(BASELINE)
        expected = "Unquantized.*" if kind is None else _method(record, wanted)
        same = re.fullmatch(expected, record.method) or record.method == _other(record, wanted)
        if not same and not _CACHE.fullmatch(record.layer):
            facts = ", ".join(fact for fact in (record.backend, record.shape) if fact)
            method = record.method + (f" ({facts})" if facts else "")
            reason = _FALL_BACKS.get(record.method.removesuffix(codes_of(8)), "")
            problems.append(f"{record.layer}: {method} in place of {expected}{reason}")
        elif kind in targets:
            problems += _kernel_problems(record, fmt)
    absent = [target for target in targets if target not in seen]
    return problems + [f"no layer of the engine is one of the target {target!r}" for target in absent]


def refit_problems(chosen: Iterable[ChosenMethod], fmt: QuantFormat, targets: Sequence[str]) -> list[str]:
    """Say why an engine takes no new weights in a format.

    Args:
        chosen: what vLLM chose.
        fmt: format of the update.
        targets: which of its layers are quantized.

    Returns:
        One sentence if vLLM serves the format from checkpoints only; else `method_problems`.
    """
    if fmt.vllm.refits:
        return method_problems(chosen, fmt, targets)
    return [f"vLLM serves codes of {fmt.num_bits} bits from checkpoints only, and takes no refits of {fmt.name}"]


def quantized_targets(chosen: Iterable[ChosenMethod]) -> list[str]:
    """Return the targets of which the engine runs layers quantized."""
    kinds = {_kind(record.layer) for record in chosen if not record.method.startswith("Unquantized")}
    return [target for target in TARGETS if target in kinds]


def require_methods(chosen: Iterable[ChosenMethod], fmt: QuantFormat, targets: Sequence[str]) -> None:
    """Refuse an engine that runs a layer with another method than its format's.

    Raises:
        ValueError: there are `method_problems`; all are listed.
    """
    problems = method_problems(chosen, fmt, targets)
    if problems:
        raise ValueError(
            f"vLLM does not serve this model as {fmt.name} with targets {list(targets)}:\n  " + "\n  ".join(problems)
        )


def _method(record: ChosenMethod, fmt: QuantFormat) -> str:
    if _kind(record.layer) != "experts":
        return fmt.vllm.linear.method
    on_cpu = fmt.vllm.cpu.experts_method if fmt.vllm.cpu and "CPU" in record.backend else None
    return on_cpu or fmt.vllm.experts.method


def _other(record: ChosenMethod, fmt: QuantFormat) -> str | None:
    """Return the method for a checkpoint of other tools, on which an engine beside adapters may have started."""
    if fmt.other_storage is None:
        return None
    return fmt.other_storage.experts if _kind(record.layer) == "experts" else fmt.other_storage.linear


def _kernel_problems(record: ChosenMethod, fmt: QuantFormat) -> list[str]:
    experts = _kind(record.layer) == "experts"
    kernel = fmt.vllm.experts if experts else fmt.vllm.linear
    found = _BACKEND.search(record.backend) if experts else _KERNEL.search(record.backend)
    if not kernel.followed or found is None or found[1].startswith("CPU") or found[1] in kernel.followed:
        return []
    argument, legal = "moe_backend" if experts else "linear_backend", " or ".join(kernel.backends or ("auto",))
    return [
        f"{record.layer}: {record.method} runs on {found[1]}, whose arithmetic the learner does not follow; it follows "
        f"{' and '.join(kernel.followed)}: set vLLM's {argument} to {legal}, and leave {_FORCING} unset"
    ]


def _kind(layer: str) -> str | None:
    return next((kind for kind, pattern in _KINDS if pattern.fullmatch(layer)), None)

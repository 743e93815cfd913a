"""Compare config.json's list of BF16 modules with the tensors that were written, the way the engine will read both."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from qarl_nemo.names import summarize_names

_SCALES = (".weight_scale", ".weight_scale_inv")
_EXPERTS = ".mlp.experts"
_SHOWN = 8


def require_listed(quantization: Mapping[str, Any], written: Iterable[str], linears: Iterable[str]) -> None:
    """Require that the list names every linear that was copied, and none that is quantized.

    Args:
        quantization: config.json's `quantization_config`.
        written: every tensor of the output.
        linears: modules whose `weight` is a matrix that the engine multiplies by.

    Raises:
        ValueError: the engine would look for scales that are not there, or read codes as weights; all are named.
    """
    quantized = {name.removesuffix(suffix) for name in written for suffix in _SCALES if name.endswith(suffix)}
    kept = _fp8_rule(quantization) if quantization["quant_method"] == "fp8" else _compressed_tensors_rule(quantization)
    linears = list(linears)
    unlisted = [module for module in linears if module not in quantized and not kept(module)]
    listed = [module for module in quantized if kept(module)]
    odd = quantized.difference(linears)
    problems = [
        f"{len(modules)} {what}: {summarize_names(modules, _SHOWN)}"
        for what, modules in (
            ("BF16 modules that it calls quantized", unlisted),
            ("quantized modules that it calls BF16", listed),
            ("quantized modules that are no linears", odd),
        )
        if modules
    ]
    if problems:
        raise ValueError(
            "the quantization_config of this output does not fit its tensors, please report this model: "
            + "; ".join(problems)
        )


def _compressed_tensors_rule(quantization: Mapping[str, Any]) -> Callable[[str], bool]:
    # compressed-tensors' match_name and vLLM's should_ignore_layer: `re:` patterns from the start, else equal names.
    ignore = quantization["ignore"]
    exact = {entry for entry in ignore if not entry.startswith("re:")}
    patterns = [re.compile(entry.removeprefix("re:")) for entry in ignore if entry.startswith("re:")]
    return lambda module: module in exact or any(pattern.match(module) for pattern in patterns)


def _fp8_rule(quantization: Mapping[str, Any]) -> Callable[[str], bool]:
    # vLLM's is_layer_skipped: equal names; it looks up a layer's block of experts as a whole, never a single expert.
    listed = set(quantization["modules_to_not_convert"])

    def kept(module: str) -> bool:
        block, found, _ = module.partition(_EXPERTS)
        return block + found in listed

    return kept

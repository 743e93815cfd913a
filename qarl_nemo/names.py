"""Parameter names: which target a tensor belongs to, and how stacked refit names and checkpoint names correspond.

Strings only. Names are Hugging Face's for the models of `architecture.FAMILIES`, which vLLM reads too.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

TARGETS = ("experts", "attention", "mlp")
# NVFP4's scale of a whole weight: one for weights that engines fuse.
GLOBAL_SCALE = "weight_global_scale"
# The weight W of dX = dY @ W: the one that ran, or the master; Transformer-Engine's own words.
Backward = Literal["dequantized", "high_precision"]

_LAYER = r"(?:.*\.)?layers\.\d+\."
_KIND_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("experts", _LAYER + r"mlp\.experts(?:\.\d+\.(?:gate|up|down)_proj|\.(?:gate_up|down)_proj)?"),
        ("attention", _LAYER + r"self_attn\.[qkvo]_proj"),
        ("mlp", _LAYER + r"mlp\.(?:gate|up|down)_proj"),
        ("router", _LAYER + r"mlp\.gate"),
        ("shared_experts", _LAYER + r"mlp\.shared_experts?(?:_gate|\..+)?"),
        ("norm", r"(?:.*\.)?(?:\w+_)?(?:layer)?norm"),
        ("embedding", r"(?:.*\.)?embed_tokens"),
        ("lm_head", r"(?:.*\.)?lm_head"),
    )
)
_STACKED = re.compile(rf"(?P<block>{_LAYER}mlp\.experts)\.(?P<projection>gate_up|down)_proj\.(?P<suffix>.+)")
_STACKED_PARAMETER = re.compile(rf"{_LAYER}mlp\.experts\.(?:gate_up|down)_proj")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
_AFTER_NORM = tuple(f".{name}_proj" for name in ("q", "k", "v", "gate", "up", "gate_up"))
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def split_targets(text: str) -> list[str]:
    """Return the names in `experts,attention`, as users write targets on a command line; none between two commas."""
    return [target.strip() for target in text.split(",") if target.strip()]


def check_targets(targets: Sequence[str]) -> tuple[str, ...]:
    """Return `targets` without duplicates, in the order of `TARGETS`.

    Args:
        targets: names out of `TARGETS`.

    Raises:
        ValueError: `targets` is empty or holds unknown names; every one is listed.
    """
    if isinstance(targets, str):
        raise ValueError(f"targets must be a list, got the string {targets!r}; write [{targets}]")
    unknown = [str(target) for target in targets if target not in TARGETS]
    if unknown or not targets:
        # An empty name would be seen without its quotes only as a comma too many.
        shown = ", ".join(target if target.strip() else repr(target) for target in unknown)
        given = f"unknown targets: {shown}" if unknown else "no target given"
        raise ValueError(f"{given}; legal: {', '.join(TARGETS)}")
    return tuple(target for target in TARGETS if target in targets)


def module_kind(module: str) -> str:
    """Return what a module is.

    Args:
        module: module name, e.g. `model.layers.3.mlp.gate`.

    Returns:
        A target, or one of `router`, `shared_experts`, `norm`, `embedding`, `lm_head`, `other`.
    """
    return next((kind for kind, pattern in _KIND_PATTERNS if pattern.fullmatch(module)), "other")


def tensor_kind(name: str) -> str:
    """Return the `module_kind` of the module that owns a parameter."""
    return module_kind(name.rpartition(".")[0])


def target_of(name: str) -> str | None:
    """Return the target whose weight matrix a checkpoint parameter is; None for biases, norms, routers and the rest.

    Args:
        name: parameter name, e.g. `model.layers.3.mlp.experts.7.gate_proj.weight`.

    Returns:
        A name out of `TARGETS`, or None.
    """
    module, _, suffix = name.rpartition(".")
    kind = module_kind(module)
    return kind if suffix == "weight" and kind in TARGETS else None


def reads_norm(module: str) -> bool:
    """Return whether a projection multiplies a norm's output: q, k, v, gate and up; o and down do not."""
    return module.endswith(_AFTER_NORM)


def fused_groups(weights: Iterable[str]) -> list[list[str]]:
    """Return groups of weights that engines multiply as one: q, k and v of a layer, gate and up of an MLP or expert."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        module, _, suffix = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        if leaf in _FUSED and target_of(name):
            groups.setdefault(f"{parent}.{_FUSED[leaf]}.{suffix}", []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def layer_of(name: str) -> str:
    """Return the decoder layer of a parameter or published tensor, e.g. `model.layers.3`; empty outside the layers."""
    match = re.match(_LAYER, name)
    return match[0].removesuffix(".") if match else ""


def published_name(parameter: str) -> str:
    """Return the name under which a refit publishes an unquantized parameter.

    Returns:
        The same name; stacked experts, whose parameters have no suffix, get `.weight`, and an adapter's loses `.lora`.
    """
    if ".lora." in parameter:
        return parameter.replace(".lora.", ".")
    return f"{parameter}.weight" if _STACKED_PARAMETER.fullmatch(parameter) else parameter


def parameter_name(published: str) -> str:
    """Return the model's name of an unquantized parameter: the inverse of `published_name`."""
    stem = published.removesuffix(".weight")
    return stem if _STACKED_PARAMETER.fullmatch(stem) else published


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts layer 2 before layer 10."""
    return tuple((0, int(part), "") if _is_number(part) else (1, 0, part) for part in name.split("."))


def is_stacked_expert(published: str) -> bool:
    """Tell whether a refit tensor holds one projection of all experts of a layer."""
    return _STACKED.fullmatch(published) is not None


def expert_names(stacked: str, num_experts: int) -> list[list[str]]:
    """Return the checkpoint names held by a stacked refit tensor: `[expert][part]`, gate before up.

    Args:
        stacked: e.g. `model.layers.3.mlp.experts.gate_up_proj.weight_packed`.
        num_experts: size of the first dimension.

    Returns:
        One list of 2 (gate_up_proj) or 1 (down_proj) names for each expert.

    Raises:
        ValueError: the name is not a stacked expert name.
    """
    match = _STACKED.fullmatch(stacked)
    if match is None:
        raise ValueError(
            f"{stacked!r} is not a stacked expert name; legal: <layer>.mlp.experts.gate_up_proj.<suffix> and "
            "<layer>.mlp.experts.down_proj.<suffix>"
        )
    parts = _PARTS[match["projection"]]
    return [
        [f"{match['block']}.{expert}.{part}_proj.{match['suffix']}" for part in parts] for expert in range(num_experts)
    ]


def compressed_tensors_ignore(names: Iterable[str], targets: Sequence[str]) -> list[str]:
    """Return the `ignore` list of a compressed-tensors config: routers by name, whole families by pattern.

    Args:
        names: every parameter name of the model.
        targets: what is quantized.

    Returns:
        Exact names first, then `re:` patterns for the families of linears that stay BF16.

    Raises:
        ValueError: a target is unknown.
    """
    targets = check_targets(targets)
    modules = _modules_by_kind(names)
    patterns = {
        "experts": r"re:.*\.mlp\.experts(\..*)?$",
        "attention": r"re:.*\.self_attn\..*",
        "mlp": r"re:.*\.mlp\.(gate|up|gate_up|down)_proj$",
        "shared_experts": r"re:.*\.mlp\.shared_experts?(_gate|\..*)?$",
    }
    untouched = [pattern for kind, pattern in patterns.items() if kind in modules and kind not in targets]
    return ["lm_head", *modules.get("router", []), *untouched]


def fp8_modules_to_not_convert(names: Iterable[str], targets: Sequence[str]) -> list[str]:
    """Return `modules_to_not_convert` for vLLM's `fp8` method, which compares exact names, fused ones included.

    Args:
        names: every parameter name of the model.
        targets: what is quantized.

    Returns:
        Exact module names: lm_head, every router, and the linears of every kind that stays BF16.

    Raises:
        ValueError: a target is unknown.
    """
    targets = check_targets(targets)
    modules = _modules_by_kind(names)
    kept = ["lm_head", *modules.get("router", [])]
    for kind in ("attention", "mlp", "shared_experts"):
        if kind not in targets:
            kept += [name for module in modules.get(kind, []) for name in _with_fused(module)]
    if "experts" not in targets:
        # vLLM asks for the whole block `...mlp.experts`, never for one expert.
        kept += [module.partition(".mlp.experts")[0] + ".mlp.experts" for module in modules.get("experts", [])]
    return list(dict.fromkeys(kept))


def summarize_names(names: Iterable[str], most: int | None = None) -> str:
    """Return every name in one line, numbers that form a full grid written as `{0..47}`.

    Args:
        names: dotted names.
        most: how many names and grids are written out; the others are counted. None writes all.

    Returns:
        E.g. `model.layers.{0..47}.mlp.experts.{0..127}.up_proj.weight`; unprintable names are escaped.
    """
    grids: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name in sorted(set(names), key=natural_key):
        parts = name.split(".")
        template = tuple("#" if _is_number(part) else part for part in parts)
        grids.setdefault(template, []).append(tuple(int(part) for part in parts if _is_number(part)))
    texts = [text for template, grid in grids.items() for text in _grid_texts(template, grid)]
    left_out = f" and {len(texts) - most} more" if most is not None and len(texts) > most else ""
    return ", ".join(text if text.isprintable() else ascii(text) for text in texts[:most]) + left_out


def _is_number(part: str) -> bool:
    # Only numbers as Python writes them: names from a file may hold 007, or more digits than `int` accepts.
    return part.isdecimal() and part.isascii() and len(part) < 10 and (part == "0" or part[0] != "0")


def _grid_texts(template: tuple[str, ...], grid: list[tuple[int, ...]]) -> list[str]:
    axes = [sorted(set(axis)) for axis in zip(*grid, strict=True)]
    cells = 1
    for axis in axes:
        cells *= len(axis)
    dense = all(axis[-1] - axis[0] + 1 == len(axis) for axis in axes)
    if cells == len(grid) and dense:
        ranges = iter(str(axis[0]) if len(axis) == 1 else f"{{{axis[0]}..{axis[-1]}}}" for axis in axes)
        return [".".join(next(ranges) if part == "#" else part for part in template)]
    rows = (iter(map(str, row)) for row in grid)
    return [".".join(next(row) if part == "#" else part for part in template) for row in rows]


def _modules_by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for module in sorted({name.rpartition(".")[0] for name in names}, key=natural_key):
        modules.setdefault(module_kind(module), []).append(module)
    return modules


def _with_fused(module: str) -> list[str]:
    parent, _, leaf = module.rpartition(".")
    return [module, f"{parent}.{_FUSED[leaf]}"] if leaf in _FUSED else [module]

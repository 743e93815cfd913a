"""Swap a model's linears and experts for aligned ones, in place, and report what was quantized and what was not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from qarl_formats import BASELINE, get_format
from qarl_kernels import QuantFormat, weight_problems
from qarl_nemo.layers.experts import AlignedExperts
from qarl_nemo.layers.linear import AlignedLinear
from qarl_nemo.layers.router import AlignedRouter, RouteControl
from qarl_nemo.layers.weight import AlignedWeight, MasterChanges
from qarl_nemo.names import TARGETS, Backward, check_targets, fused_groups, module_kind


@dataclass(frozen=True, slots=True)
class InstallRow:
    """One line of the install table.

    Attributes:
        name: module name.
        kind: `experts`, `attention`, `mlp`, `router`, or the class name of a module that stays as it is.
        shape: shape of its weights, one entry each.
        format: format its forward executes.
        quantized: whether that is a low-bit format.
        reason: why it is not.
    """

    name: str
    kind: str
    shape: str
    format: str
    quantized: bool
    reason: str


@dataclass(slots=True)
class InstallReport:
    """What `install` did.

    Attributes:
        format: what the aligned layers execute.
        targets: what was asked for.
        rows: one line for each module with weights.
        weights: every aligned weight with a master, by parameter name.
        routes: shared by all routers.
        num_routers: L, how many routers the model has.
        changes: counts the changes of the masters; shared by all aligned weights.
    """

    format: QuantFormat
    targets: tuple[str, ...]
    rows: list[InstallRow] = field(default_factory=list)
    weights: dict[str, AlignedWeight] = field(default_factory=dict)
    routes: RouteControl = field(default_factory=RouteControl)
    num_routers: int = 0
    changes: MasterChanges = field(default_factory=MasterChanges)


def install(
    model: nn.Module,
    targets: Sequence[str],
    fmt: QuantFormat,
    *,
    backward: Backward = "dequantized",
    keep_operand: bool = True,
    plain: Sequence[str] = (),
) -> InstallReport:
    """Replace the targeted layers of a Hugging Face Qwen model by aligned ones and its routers by FP32-weight routers.

    Args:
        model: changed in place; parameters and their names stay.
        targets: `experts`, `attention`, `mlp`.
        fmt: format the replaced layers execute; bf16 runs the same code path unquantized.
        backward: which weight the input gradient uses.
        keep_operand: keep what the GEMMs multiply between uses; False keeps only the packed tensors.
        plain: further targets, whose layers are replaced, too, and execute BF16.

    Returns:
        The table and the handles to weights, routes and changes.

    Raises:
        ValueError: unknown target, a target that matches nothing, or shapes the format cannot store; all listed.
    """
    targets = check_targets(targets)
    report = InstallReport(fmt, targets)
    found = {name: module_kind(name) for name, module in model.named_modules() if _holds_weights(module)}
    executed = dict.fromkeys(plain, get_format(BASELINE)) | dict.fromkeys(targets, fmt)
    _require_present(targets, plain, {kind for kind in found.values() if kind in TARGETS})
    _require_shapes(model, found, targets, fmt)
    for name, module in list(model.named_modules()):
        if found.get(name) in executed:
            own = executed[found[name]]
            model.set_submodule(name, _aligned(name, module, report, own, backward=backward, keep_operand=keep_operand))
        elif found.get(name) == "router":
            model.set_submodule(name, AlignedRouter(module, report.routes, report.num_routers))
            report.num_routers += 1
    _fuse(report.weights)
    _fill_table(model, found, report)
    return report


def _aligned(name: str, module: nn.Module, report: InstallReport, fmt: QuantFormat, **options: Any) -> nn.Module:
    common = (fmt, report.changes)
    if isinstance(module, nn.Linear):
        aligned = AlignedLinear(module, *common, name=name, **options)
    else:
        aligned = AlignedExperts(module, *common, name=name, **options)
    weights = {f"{name}.{key}": weight for key, weight in aligned.aligned.items()}
    report.weights.update((key, weight) for key, weight in weights.items() if isinstance(weight, AlignedWeight))
    return aligned


def _fuse(weights: Mapping[str, AlignedWeight]) -> None:
    for group in fused_groups(weights):
        for name in group:
            weights[name].fused = [weights[other].masters[0] for other in group if other != name]


def _holds_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _require_present(targets: Sequence[str], plain: Sequence[str], present: set[str]) -> None:
    asked = {"targets": targets, "targets of adapters": plain}
    absent = {whose: [target for target in names if target not in present] for whose, names in asked.items()}
    if any(absent.values()):
        said = " and ".join(f"{whose} {names}" for whose, names in absent.items() if names)
        raise ValueError(
            f"{said} match no module of this model, which has {sorted(present)}. Dense models have `mlp` in place of "
            "`experts`"
        )


def _require_shapes(model: nn.Module, found: dict[str, str], targets: Sequence[str], fmt: QuantFormat) -> None:
    problems = []
    for name, module in model.named_modules():
        if found.get(name) not in targets:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if key == "bias":
                continue
            reasons = weight_problems(tuple(parameter.shape), fmt)
            inner = parameter.shape[-2] // 2 if key == "gate_up_proj" else 0
            if inner % fmt.scale_rows:
                reasons.append(f"I={inner} is not a multiple of {fmt.scale_rows}: a block would hold gate and up")
            if reasons:
                problems.append(f"{name}.{key} {list(parameter.shape)}: {'; '.join(reasons)}")
    if problems:
        raise ValueError(f"{len(problems)} weights cannot be stored as {fmt.name}:\n  " + "\n  ".join(problems))


def _fill_table(model: nn.Module, found: dict[str, str], report: InstallReport) -> None:
    for name, kind in found.items():
        module, reason = model.get_submodule(name), ""
        if kind in report.targets:
            reason = "" if report.format.is_quantized else f"format {report.format.name}"
        elif kind in TARGETS:
            reason = f"not targeted: add {kind!r} to targets to quantize it"
        else:
            reason = f"{kind}: never quantized"
        shapes = " ".join(str(list(parameter.shape)) for parameter in module.parameters(recurse=False))
        executed = BASELINE if reason else report.format.name
        report.rows.append(InstallRow(name, kind, shapes, executed, not reason, reason))

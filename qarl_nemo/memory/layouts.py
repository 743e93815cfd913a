"""Layouts of a learner: those to choose from, and whether one splits a model evenly."""

from collections.abc import Sequence

from qarl_nemo.memory.model_size import ModelSize
from qarl_nemo.parallelism import Parallelism, divisors, either

_LOOKED_AT = 1025


def layouts(model: ModelSize, num_gpus: int) -> list[Parallelism]:
    """Return layouts to choose from: one to four tensor-parallel ranks, and experts over as many ranks as possible.

    Returns:
        Layouts without pipeline, context or expert tensor parallelism.

    Raises:
        ValueError: there is none; names the nearest numbers of GPUs that have one.
    """
    Parallelism(num_gpus)  # refuses numbers that are none
    found = _layouts(model, num_gpus)
    if not found:
        counts = [count for count in range(1, _LOOKED_AT) if _layouts(model, count)]
        near = sorted(sorted(counts, key=lambda count: abs(count - num_gpus))[:3])
        raise ValueError(
            f"num_gpus={num_gpus}: no layout puts {model.num_experts} experts on 4, 8, 16, 32 or {num_gpus} ranks that "
            f"divide them and the GPUs; numbers of GPUs that have layouts: {', '.join(map(str, near))}. Others are "
            "named with a layout: dp, or tp, pp, cp, ep and etp with their sizes, e.g. tp2_ep8"
        )
    return found


def require_layout(model: ModelSize, ranks: Parallelism) -> None:
    """Require that a layout splits a model evenly.

    Raises:
        ValueError: it does not; names every wrong size and what it has to divide.
    """
    needed = [
        ("tp", ranks.tp, "attention heads", model.num_heads),
        ("tp", ranks.tp, "key-value heads", model.num_kv_heads),
        ("pp", ranks.pp, "layers", model.num_layers),
    ]
    if model.num_experts:
        needed += [("ep", ranks.ep, "experts", model.num_experts), ("etp", ranks.etp, "rows of an expert", model.inner)]
    else:
        needed += [("tp", ranks.tp, "rows of the MLP", model.inner)]
    problems = [
        f"{name}={size} does not divide {count} {what}; it may be {either(divisors(ranks.num_gpus, *counts))}"
        for name, size, what, count in needed
        if count % size and (counts := [each for other, _, _, each in needed if other == name])
    ]
    if not model.num_experts and ranks.ep * ranks.etp > 1:
        problems.append("ep and etp share experts, which this model does not have")
    if problems:
        raise ValueError(f"layout {ranks.name}: " + "; ".join(problems))


def require_targets(model: ModelSize, targets: Sequence[str]) -> None:
    """Require that a model has what is to be quantized.

    Args:
        model: its sizes.
        targets: names out of `names.TARGETS`.

    Raises:
        ValueError: it lacks some; names those it has.
    """
    legal = ("experts", "attention") if model.num_experts else ("mlp", "attention")
    wrong = [target for target in targets if target not in legal]
    if wrong or not targets:
        raise ValueError(f"targets {', '.join(wrong) or '(none)'}: this model has {', '.join(legal)}")


def _layouts(model: ModelSize, num_gpus: int) -> list[Parallelism]:
    found = []
    for tp in (1, 2, 4):
        if num_gpus % tp or model.num_heads % tp or model.num_kv_heads % tp:
            continue
        sizes = [size for size in (4, 8, 16, 32, num_gpus) if num_gpus % size == 0 and not model.num_experts % size]
        found += [Parallelism(num_gpus, tp=tp, ep=ep) for ep in sorted(set(sizes))] if model.num_experts else []
        found += [] if model.num_experts else [Parallelism(num_gpus, tp=tp)]
    return found

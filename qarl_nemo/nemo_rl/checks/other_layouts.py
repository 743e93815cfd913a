"""Finds layouts of a learner in which a run's longest response fits, where it does not fit in the run's own."""

from collections.abc import Mapping
from typing import Any

from qarl_nemo.memory import Parallelism, layouts
from qarl_nemo.nemo_rl.budgets import token_budgets
from qarl_nemo.nemo_rl.checks.layout import layout_conflicts
from qarl_nemo.nemo_rl.layout import MEGATRON, SIZES, read_layout
from qarl_nemo.nemo_rl.lookup import look_up
from qarl_nemo.nemo_rl.model_shapes import read_model, read_model_size, shape_conflicts


def layouts_that_fit(config: Mapping[str, Any], qarl: Any, *, optimizer_stays: bool) -> list[str]:
    """Name the layouts without pipeline and context parallelism in which the longest response fits.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries, without `layout_conflicts`.
        qarl: its checked `NemoQarlConfig`.
        optimizer_stays: whether the optimizer stays on the GPU while engines generate and until the update.

    Returns:
        Names such as `tp2_ep8`, for the same GPUs and batches.
    """
    layout, model, size = read_layout(config), read_model(config), read_model_size(config)
    if layout is None or model is None or size is None:
        return []
    try:
        candidates = layouts(size, layout.learner_gpus)
    except ValueError:
        return []
    found = []
    for ranks in candidates:
        changed = _with_layout(config, ranks)
        if layout_conflicts(changed, qarl, model) or shape_conflicts(changed, qarl, model):
            continue
        if all(budget.most for budget in token_budgets(changed, qarl, optimizer_stays=optimizer_stays)):
            found.append(ranks.name)
    return found


def _with_layout(config: Mapping[str, Any], ranks: Parallelism) -> dict[str, Any]:
    policy, megatron = dict(config.get("policy") or {}), dict(look_up(config, MEGATRON, None) or {})
    megatron |= {key: getattr(ranks, short) for short, key in SIZES.items()}
    megatron |= {f"num_layers_in_{end}_pipeline_stage": None for end in ("first", "last")}
    # Megatron trains experts with tensor parallelism only so.
    megatron["sequence_parallel"] = ranks.tp > 1 or megatron.get("sequence_parallel", False)
    return dict(config) | {"policy": policy | {"megatron_cfg": megatron}}

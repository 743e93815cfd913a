"""Says which layouts NeMo-RL, Megatron or vLLM would refuse once all workers have started, and which they take."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from qarl_nemo.architecture import Architecture
from qarl_nemo.nemo_rl.checks.batches import batch_problems, count_problems
from qarl_nemo.nemo_rl.checks.lines import problem_line
from qarl_nemo.nemo_rl.layout import (
    ENGINE,
    MEGATRON,
    RESOURCES,
    REWARD_MODEL,
    SIZES,
    Layout,
    divided_counts,
    read_layout,
    uses_reward_model,
)
from qarl_nemo.nemo_rl.lookup import look_up, with_value
from qarl_nemo.nemo_rl.model_shapes import shape_conflicts
from qarl_nemo.parallelism import divisors, either, shares_kv_heads

_LEARNER_KEYS = {short: f"{MEGATRON}.{name}" for short, name in SIZES.items()}
_ENGINE_KEYS = {"tp": f"{ENGINE}.tensor_parallel_size", "ep": f"{ENGINE}.expert_parallel_size"}


@dataclass(frozen=True)
class _Side:
    """What decides the legal parallel sizes of learner or engines.

    Attributes:
        config: the whole config.
        qarl: its checked `NemoQarlConfig`.
        model: the run's; None if its config.json is not at hand.
        keys: the config's keys of parallel sizes, by our short names.
        divided: what each size divides of the model, and the names of that; nothing if it is not known.
    """

    config: Mapping[str, Any]
    qarl: Any
    model: Architecture | None
    keys: Mapping[str, str]
    divided: Mapping[str, Mapping[str, int]]

    def legal(self, name: str, gpus: int, *, of: int = 1) -> str:
        """Name the sizes that divide some GPUs and the model, and cut no weight as its format or kernel forbids.

        Args:
            name: one of `SIZES`.
            gpus: how many GPUs share the model.
            of: what each but 1 must be a multiple of.
        """
        counts = [count for count in self.divided.get(name, {}).values() if count]
        sizes = [size for size in divisors(gpus, *counts) if size == 1 or size % of == 0]
        if self.keys[name] == _ENGINE_KEYS["tp"] and self.model is not None:
            sizes = [size for size in sizes if shares_kv_heads(size, self.model.num_key_value_heads)]
        refused = {
            size: len(shape_conflicts(with_value(self.config, self.keys[name], size), self.qarl, self.model))
            for size in sizes
        }
        # What is refused with any size is another setting's fault.
        return either(size for size in sizes if refused[size] == min(refused.values()))


def layout_conflicts(config: Mapping[str, Any], qarl: Any, model: Architecture | None) -> list[str]:
    """Say what NeMo-RL, Megatron or vLLM would refuse once all workers have started.

    Args:
        config: the whole config, as nested dictionaries.
        qarl: its checked `NemoQarlConfig`.
        model: the run's; None if its config.json is not at hand.

    Returns:
        One line each: keys, values, and what is needed.
    """
    if problems := count_problems(config):
        return problems
    layout = read_layout(config)
    if layout is None:
        return []
    learner = _Side(config, qarl, model, _LEARNER_KEYS, divided_counts(model, qarl.targets))
    engine = _Side(config, qarl, model, _ENGINE_KEYS, divided_counts(model))
    problems = _resource_problems(config, layout) or [
        *_learner_problems(layout, learner),
        *_engine_problems(layout, engine),
    ]
    if not problems:
        problems += batch_problems(config, layout)
    return problems + (_model_problems(layout, model, learner, engine) if model else [])


def _resource_problems(config: Mapping[str, Any], layout: Layout) -> list[str]:
    if uses_reward_model(config) and (problems := _reward_problems(config, layout)):
        return problems
    if layout.colocated:
        return []
    nodes, per_node = (look_up(config, f"{RESOURCES}.{key}", None) for key in ("num_nodes", "gpus_per_node"))
    problems, said = [], ["null" if value is None else value for value in (nodes, per_node)]
    if layout.nodes == 1:
        if nodes not in (None, 1):
            problems.append(f"{RESOURCES}.num_nodes={nodes}: learner and engines share one node; set null or 1")
        if not 1 <= (per_node or 0) < layout.gpus_per_node:
            legal = f"1 to {layout.gpus_per_node - 1}"
            problems.append(
                f"{RESOURCES}.gpus_per_node={said[1]}: learner and engines share {layout.gpus_per_node} GPUs "
                f"({_cluster(layout)}); set {legal}"
            )
        return problems
    if not 1 <= (nodes or 0) < layout.nodes:
        problems.append(f"{RESOURCES}.num_nodes={said[0]}: of {layout.nodes} nodes; set 1 to {layout.nodes - 1}")
    if per_node != layout.gpus_per_node:
        problems.append(f"{RESOURCES}.gpus_per_node={said[1]}: engines take whole nodes; set {layout.gpus_per_node}")
    return problems


def _reward_problems(config: Mapping[str, Any], layout: Layout) -> list[str]:
    # Of one node a reward model takes some GPUs, and of several whole nodes, whatever it uses there.
    nodes, per_node = layout.nodes + layout.reward_nodes, layout.gpus_per_node + layout.reward_gpus
    most = {"num_nodes": max(nodes - 1, 1), "gpus_per_node": per_node - 1 if nodes == 1 else per_node}
    why = f"a reward model has GPUs of its own, and learner and engines the others ({_cluster(layout)})"
    return [
        problem_line(f"{REWARD_MODEL}.{key}", value, why, f"1 to {largest}" if largest > 1 else "1")
        for key, largest in most.items()
        if type(value := look_up(config, f"{REWARD_MODEL}.{key}", None)) is not int or not 1 <= value <= largest
    ]


def _learner_problems(layout: Layout, learner: _Side) -> list[str]:
    sizes, gpus, problems = layout.sizes, layout.learner_gpus, []
    for factors in (("tp", "pp", "cp"), ("etp", "ep", "pp")):
        product = sizes[factors[0]] * sizes[factors[1]] * sizes[factors[2]]
        if gpus % product:
            said = ", ".join(f"{SIZES[name]}={sizes[name]}" for name in factors)
            problems.append(
                f"{MEGATRON}: {said}: their product {product} does not divide the learner's {gpus} GPUs "
                f"({_cluster(layout)}); {_other_sizes(layout, factors, learner)}"
            )
    has_experts = sizes["ep"] > 1 if learner.model is None else learner.model.num_experts > 0
    if sizes["tp"] > 1 and has_experts and not look_up(learner.config, f"{MEGATRON}.sequence_parallel", False):
        problems.append(
            f"{MEGATRON}.sequence_parallel=false: Megatron needs it for experts with tensor parallelism; set true"
        )
    return problems


def _engine_problems(layout: Layout, engine: _Side) -> list[str]:
    tp, ep, gpus, problems = layout.engine_tp, layout.engine_ep, layout.engine_gpus, []
    if gpus % tp:
        problems.append(
            f"{ENGINE}.tensor_parallel_size={tp}: does not divide the engines' {gpus} GPUs ({_cluster(layout)}); set "
            f"{engine.legal('tp', gpus)}"
        )
    # With 1, an engine's GPUs share experts as they share layers.
    if ep > 1 and ep % tp:
        problems.append(
            f"{ENGINE}.expert_parallel_size={ep}: must be a multiple of tensor_parallel_size={tp}; set "
            f"{engine.legal('ep', gpus, of=tp)}"
        )
    elif ep > tp:
        if gpus % ep:
            problems.append(
                f"{ENGINE}.expert_parallel_size={ep}: does not divide the engines' {gpus} GPUs; set "
                f"{engine.legal('ep', gpus, of=tp)}"
            )
        if look_up(engine.config, f"{ENGINE}.async_engine", False):
            problems.append(
                f"{ENGINE}.expert_parallel_size={ep}: NeMo-RL's async_engine takes no more than "
                f"tensor_parallel_size={tp}; set {tp}, or async_engine=false"
            )
    return problems


def _model_problems(layout: Layout, model: Architecture, learner: _Side, engine: _Side) -> list[str]:
    sizes, problems = layout.sizes, []
    for name, size, gpus, side, of in (
        ("ep", sizes["ep"], layout.learner_gpus, learner, 1),
        ("ep", layout.engine_ep, layout.engine_gpus, engine, layout.engine_tp),
        ("tp", sizes["tp"], layout.learner_gpus, learner, 1),
        ("tp", layout.engine_tp, layout.engine_gpus, engine, 1),
    ):
        key, counts = side.keys[name], side.divided[name]
        undivided = [f"{count} {what}" for what, count in counts.items() if count % size]
        if size > 1 and not all(counts.values()):
            problems.append(f"{key}={size}: the model has no {' or '.join(counts)}; set 1")
        elif undivided:
            legal = side.legal(name, gpus, of=of)
            problems.append(f"{key}={size}: does not divide the {' and '.join(undivided)}; set {legal}")
        elif key == _ENGINE_KEYS["tp"] and not shares_kv_heads(size, model.num_key_value_heads):
            problems.append(
                f"{key}={size}: neither divides the {model.num_key_value_heads} key-value heads nor is a multiple of "
                f"them, as vLLM needs it; set {side.legal(name, gpus)}"
            )
    return problems + _stage_problems(layout, model.num_hidden_layers)


def _stage_problems(layout: Layout, layers: int) -> list[str]:
    stages, ends = layout.sizes["pp"], layout.end_layers
    left, inner = layers - sum(ends), stages - len(ends)
    if inner >= 0 and left >= 0 and (left % inner == 0 if inner else left == 0):
        return []
    beside = f" left beside stages of {' and '.join(map(str, ends))}" if ends else ""
    counts = [len(ends) + size for size in divisors(left)] if left > 0 else []
    legal = [count for count in counts if layout.learner_gpus % count == 0]
    fix = f"set {either(legal)}" if legal else f"set other {MEGATRON}.num_layers_in_{{first,last}}_pipeline_stage"
    return [f"{MEGATRON}.{SIZES['pp']}={stages}: does not divide the {left} layers{beside}; {fix}"]


def _other_sizes(layout: Layout, factors: tuple[str, ...], learner: _Side) -> str:
    """Say which values each of three sizes may have beside the other two, or else what their product may be."""
    found = []
    for name in factors:
        others = prod(layout.sizes[other] for other in factors if other != name)
        if layout.sizes[name] > 1 and layout.learner_gpus % others == 0:
            found.append(f"{SIZES[name]} may be {learner.legal(name, layout.learner_gpus // others)}")
    product = f"the product may be {either(divisors(layout.learner_gpus))}"
    return f"beside the others, {', or '.join(found)}" if found else product


def _cluster(layout: Layout) -> str:
    nodes, per_node = layout.nodes + layout.reward_nodes, layout.gpus_per_node + layout.reward_gpus
    apart = "" if layout.colocated else ", engines apart"
    apart += ", a reward model apart" if layout.reward_nodes or layout.reward_gpus else ""
    return f"cluster.num_nodes={nodes}, cluster.gpus_per_node={per_node}{apart}"

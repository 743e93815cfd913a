"""How a NeMo-RL run divides its GPUs among learner ranks and engines, and why that may be impossible."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qarl_nemo.architecture import Architecture
from qarl_nemo.memory import Parallelism
from qarl_nemo.nemo_rl.lookup import look_up

_MEGATRON = "policy.megatron_cfg"
_ENGINE = "policy.generation.vllm_cfg"
_SHARE = f"{_ENGINE}.gpu_memory_utilization"
_RESOURCES = "policy.generation.colocated.resources"
# Our short names of parallel sizes -> Megatron's.
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}

# What there is at least one of.
_COUNTS = (
    "cluster.num_nodes",
    "cluster.gpus_per_node",
    *(f"{_MEGATRON}.{name}" for name in _SIZES.values()),
    f"{_ENGINE}.tensor_parallel_size",
    f"{_ENGINE}.expert_parallel_size",
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.logprob_batch_size",
    "policy.generation.max_new_tokens",
    "policy.max_total_sequence_length",
    "checkpointing.save_period",
)
_TOKENS = ("train_mb_tokens", "logprob_mb_tokens")


@dataclass(frozen=True)
class Layout:
    """What runs where, according to a config.

    Attributes:
        nodes: the cluster's number of nodes.
        gpus_per_node: GPUs on each node.
        colocated: whether engines share the learner's GPUs.
        learner_gpus: GPUs of the learner.
        engine_gpus: GPUs of all engines together.
        sizes: Megatron's parallel sizes: tp, pp, cp, ep and etp.
        end_layers: layers of the first and the last pipeline stage, where a config says so.
        engine_tp: GPUs that share one engine's layers.
        engine_ep: GPUs that share one engine's experts.
    """

    nodes: int
    gpus_per_node: int
    colocated: bool
    learner_gpus: int
    engine_gpus: int
    sizes: Mapping[str, int]
    end_layers: tuple[int, ...]
    engine_tp: int
    engine_ep: int

    @property
    def ranks(self) -> Parallelism:
        """The learner's layout; ValueError if it is impossible."""
        return Parallelism(self.learner_gpus, **self.sizes, end_layers=self.end_layers)

    @property
    def data_parallel(self) -> int:
        """Learner ranks that see different responses."""
        return self.learner_gpus // (self.sizes["tp"] * self.sizes["pp"] * self.sizes["cp"])

    @property
    def engines(self) -> int:
        """The number of engines."""
        return self.engine_gpus // self.engine_tp


def read_layout(config: Mapping[str, Any]) -> Layout | None:
    """Read the layout from a config.

    Args:
        config: the whole NeMo-RL config, as nested dictionaries.

    Returns:
        The layout, possible or not; None without a `cluster` block.
    """
    nodes, per_node = (look_up(config, f"cluster.{key}", None) for key in ("num_nodes", "gpus_per_node"))
    if not nodes or not per_node:
        return None
    colocated = bool(look_up(config, "policy.generation.colocated.enabled", True))
    total, taken = nodes * per_node, 0
    if not colocated:
        # For generation NeMo-RL takes some GPUs of a single node, but whole nodes of several.
        own = _count(config, f"{_RESOURCES}.{'gpus_per_node' if nodes == 1 else 'num_nodes'}", 0)
        taken = own if nodes == 1 else own * per_node
    return Layout(
        nodes,
        per_node,
        colocated,
        learner_gpus=total - taken,
        engine_gpus=total if colocated else taken,
        sizes={short: _count(config, f"{_MEGATRON}.{name}") for short, name in _SIZES.items()},
        end_layers=_end_layers(config),
        engine_tp=_count(config, f"{_ENGINE}.tensor_parallel_size"),
        engine_ep=_count(config, f"{_ENGINE}.expert_parallel_size"),
    )


def responses_per_step(config: Mapping[str, Any]) -> int:
    """Return how many responses a step of a config asks for; 0 if it does not say."""
    return _count(config, "grpo.num_prompts_per_step", 0) * _count(config, "grpo.num_generations_per_prompt", 0)


def layout_conflicts(config: Mapping[str, Any], model: Architecture | None) -> list[str]:
    """Say what NeMo-RL, Megatron or vLLM would refuse once all workers have started.

    Args:
        config: the whole config, as nested dictionaries.
        model: the run's; None if its config.json is not at hand.

    Returns:
        One line each: keys, values, and what is needed.
    """
    if problems := count_problems(config):
        return problems
    layout = read_layout(config)
    if layout is None:
        return []
    problems = _resource_problems(config, layout) or [
        *_learner_problems(config, layout, model),
        *_engine_problems(config, layout),
    ]
    if not problems:
        problems += _batch_problems(config, layout)
    return problems + (_model_problems(layout, model) if model else [])


def count_problems(config: Mapping[str, Any]) -> list[str]:
    """Say which of the sizes that everything else is computed from are no numbers, or too small ones."""
    keys, problems = list(_COUNTS), []
    for kind in ("sequence_packing", "dynamic_batching"):
        if look_up(config, f"policy.{kind}.enabled", False):
            keys += [f"policy.{kind}.{name}" for name in _TOKENS]
    for key in keys:
        value = look_up(config, key, None)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            problems.append(f"{key}={value}: not a whole number; set 1 or more")
        elif value is not None and value < 1:
            problems.append(f"{key}={value}: set 1 or more")
    share = look_up(config, _SHARE, None)
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
        problems.append(f"{_SHARE}={share}: not a number; set a GPU's share, more than 0 and less than 1")
    return problems


def _resource_problems(config: Mapping[str, Any], layout: Layout) -> list[str]:
    if layout.colocated:
        return []
    nodes, per_node = (look_up(config, f"{_RESOURCES}.{key}", None) for key in ("num_nodes", "gpus_per_node"))
    problems = []
    if layout.nodes == 1:
        if nodes not in (None, 1):
            problems.append(f"{_RESOURCES}.num_nodes={nodes}: cluster.num_nodes=1; set null or 1")
        if not 1 <= (per_node or 0) < layout.gpus_per_node:
            legal = f"1 to {layout.gpus_per_node - 1}"
            problems.append(
                f"{_RESOURCES}.gpus_per_node={per_node}: learner and engines share the {layout.gpus_per_node} GPUs of "
                f"cluster.gpus_per_node; set {legal}"
            )
        return problems
    if not 1 <= (nodes or 0) < layout.nodes:
        problems.append(f"{_RESOURCES}.num_nodes={nodes}: of {layout.nodes} nodes; set 1 to {layout.nodes - 1}")
    if per_node != layout.gpus_per_node:
        problems.append(f"{_RESOURCES}.gpus_per_node={per_node}: engines take whole nodes; set {layout.gpus_per_node}")
    return problems


def _learner_problems(config: Mapping[str, Any], layout: Layout, model: Architecture | None) -> list[str]:
    sizes, gpus, problems = layout.sizes, layout.learner_gpus, []
    for factors in (("tp", "pp", "cp"), ("etp", "ep", "pp")):
        product = sizes[factors[0]] * sizes[factors[1]] * sizes[factors[2]]
        if gpus % product:
            said = ", ".join(f"{_SIZES[name]}={sizes[name]}" for name in factors)
            problems.append(
                f"{_MEGATRON}: {said}: their product {product} does not divide the learner's {gpus} GPUs "
                f"({_cluster(layout)})"
            )
    has_experts = sizes["ep"] > 1 if model is None else model.num_experts > 0
    if sizes["tp"] > 1 and has_experts and not look_up(config, f"{_MEGATRON}.sequence_parallel", False):
        problems.append(
            f"{_MEGATRON}.sequence_parallel=false: Megatron trains experts with tensor parallelism only with it"
        )
    return problems


def _engine_problems(config: Mapping[str, Any], layout: Layout) -> list[str]:
    tp, ep, gpus, problems = layout.engine_tp, layout.engine_ep, layout.engine_gpus, []
    if gpus % tp:
        problems.append(
            f"{_ENGINE}.tensor_parallel_size={tp}: does not divide the engines' {gpus} GPUs ({_cluster(layout)})"
        )
    if ep > 1 and ep % tp:
        problems.append(f"{_ENGINE}.expert_parallel_size={ep}: must be a multiple of tensor_parallel_size={tp}")
    elif ep > tp:
        if gpus % ep:
            problems.append(f"{_ENGINE}.expert_parallel_size={ep}: does not divide the engines' {gpus} GPUs")
        if look_up(config, f"{_ENGINE}.async_engine", False):
            problems.append(
                f"{_ENGINE}.expert_parallel_size={ep}: NeMo-RL's async_engine takes no more than "
                f"tensor_parallel_size={tp}; set {tp}, or async_engine=false"
            )
    return problems


def _batch_problems(config: Mapping[str, Any], layout: Layout) -> list[str]:
    policy, ranks = config.get("policy") or {}, layout.data_parallel
    batch, responses = policy.get("train_global_batch_size"), responses_per_step(config)
    problems = [
        f"{key}={size}: is not a multiple of the {ranks} data parallel learner ranks"
        for key, size in (
            ("policy.train_global_batch_size", batch),
            ("grpo.num_prompts_per_step * grpo.num_generations_per_prompt", responses),
        )
        if size and size % ranks
    ]
    packed = look_up(policy, "sequence_packing.enabled", False)
    even = not packed and not look_up(policy, "dynamic_batching.enabled", False)
    if even and not problems:
        problems += [
            f"policy.{key}={size}: does not divide the {whole // ranks} of a rank"
            for key, whole in (("train_micro_batch_size", batch), ("logprob_batch_size", responses))
            if whole and (size := policy.get(key)) and whole // ranks % size
        ]
    chunk = policy.get("logprob_chunk_size") or 0
    if chunk < 0:
        problems.append(f"policy.logprob_chunk_size={chunk}: set 1 or more, or null")
    elif chunk and not look_up(policy, "megatron_cfg.defer_fp32_logits", False):
        problems.append(
            f"{_MEGATRON}.defer_fp32_logits=false: policy.logprob_chunk_size={chunk} needs it; set true, or no chunks"
        )
    prompt, served = (look_up(config, key, None) for key in ("data.max_input_seq_length", f"{_ENGINE}.max_model_len"))
    if isinstance(prompt, int) and isinstance(served, int) and served < prompt:
        problems.append(
            f"{_ENGINE}.max_model_len={served}: a prompt of data.max_input_seq_length={prompt} tokens does not "
            "fit; set room for it and its response"
        )
    longest = policy.get("max_total_sequence_length")
    for key in _TOKENS if packed else ():
        room = look_up(policy, f"sequence_packing.{key}", None)
        if room and longest and room < longest:
            problems.append(
                f"policy.sequence_packing.{key}={room}: a response of policy.max_total_sequence_length={longest} does "
                f"not fit; set at least {longest}"
            )
    return problems


def _model_problems(layout: Layout, model: Architecture) -> list[str]:
    sizes, engine_ep = layout.sizes, layout.engine_ep
    experts, heads, layers = model.num_experts, model.num_attention_heads, model.num_hidden_layers
    problems = []
    for key, size in ((f"{_MEGATRON}.{_SIZES['ep']}", sizes["ep"]), (f"{_ENGINE}.expert_parallel_size", engine_ep)):
        if size > 1 and not experts:
            problems.append(f"{key}={size}: the model has no experts; set 1")
        elif size > 1 and experts % size:
            problems.append(f"{key}={size}: does not divide the {experts} experts")
    for key, size in (
        (f"{_MEGATRON}.{_SIZES['tp']}", sizes["tp"]),
        (f"{_ENGINE}.tensor_parallel_size", layout.engine_tp),
    ):
        if heads % size:
            problems.append(f"{key}={size}: does not divide the {heads} attention heads")
    return problems + _stage_problems(layout, layers)


def _stage_problems(layout: Layout, layers: int) -> list[str]:
    stages, ends = layout.sizes["pp"], layout.end_layers
    left, inner = layers - sum(ends), stages - len(ends)
    if inner >= 0 and left >= 0 and (left % inner == 0 if inner else left == 0):
        return []
    beside = f" left beside stages of {' and '.join(map(str, ends))}" if ends else ""
    return [f"{_MEGATRON}.{_SIZES['pp']}={stages}: does not divide the {left} layers{beside}"]


def _end_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    counts = (_count(config, f"{_MEGATRON}.num_layers_in_{end}_pipeline_stage", 0) for end in ("first", "last"))
    return tuple(count for count in counts if count)


def _cluster(layout: Layout) -> str:
    apart = "" if layout.colocated else ", engines apart"
    return f"cluster.num_nodes={layout.nodes}, cluster.gpus_per_node={layout.gpus_per_node}{apart}"


def _count(config: Mapping[str, Any], dotted: str, default: int = 1) -> int:
    value = look_up(config, dotted, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

"""How a NeMo-RL run divides its GPUs among learner ranks and engines."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from qarl_nemo.architecture import Architecture
from qarl_nemo.memory import Parallelism
from qarl_nemo.nemo_rl.data_sets import starts_environment
from qarl_nemo.nemo_rl.lookup import look_up

MEGATRON = "policy.megatron_cfg"
ENGINE = "policy.generation.vllm_cfg"
RESOURCES = "policy.generation.colocated.resources"
REWARD_MODEL = "env.reward_model.resources"
"""GPUs of a reward model, which are the learner's and the engines' no more."""
# Our short names of parallel sizes -> Megatron's.
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


@dataclass(frozen=True)
class Layout:
    """What runs where, according to a config.

    Attributes:
        nodes: number of nodes of learner and engines.
        gpus_per_node: their GPUs on each of these.
        colocated: whether engines share the learner's GPUs.
        learner_gpus: GPUs of the learner.
        engine_gpus: GPUs of all engines together.
        sizes: Megatron's parallel sizes: tp, pp, cp, ep and etp.
        end_layers: layers of the first and the last pipeline stage, where a config says so.
        engine_tp: GPUs that share one engine's layers.
        engine_ep: GPUs that share one engine's experts.
        reward_nodes: nodes of a reward model, in a cluster of several.
        reward_gpus: GPUs of a reward model, in a cluster of one node.
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
    reward_nodes: int = 0
    reward_gpus: int = 0

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
    reward_nodes, reward_gpus = _reward_model(config, nodes, per_node)
    nodes, per_node = nodes - reward_nodes, per_node - reward_gpus
    colocated = bool(look_up(config, "policy.generation.colocated.enabled", True))
    total, taken = nodes * per_node, 0
    if not colocated:
        # For generation NeMo-RL takes some GPUs of a single node, but whole nodes of several.
        own = _count(config, f"{RESOURCES}.{'gpus_per_node' if nodes == 1 else 'num_nodes'}", 0)
        taken = own if nodes == 1 else own * per_node
    return Layout(
        nodes,
        per_node,
        colocated,
        learner_gpus=total - taken,
        engine_gpus=total if colocated else taken,
        sizes={short: _count(config, f"{MEGATRON}.{name}") for short, name in SIZES.items()},
        end_layers=_end_layers(config),
        engine_tp=_count(config, f"{ENGINE}.tensor_parallel_size"),
        engine_ep=_count(config, f"{ENGINE}.expert_parallel_size"),
        reward_nodes=reward_nodes,
        reward_gpus=reward_gpus,
    )


def uses_reward_model(config: Mapping[str, Any]) -> bool:
    """Return whether NeMo-RL starts a reward model of a config, on GPUs of its own."""
    return starts_environment(config.get("data") or {}, "reward_model")


def divided_counts(model: Architecture | None, targets: Collection[str] = ()) -> dict[str, dict[str, int]]:
    """Return what the legal values of each parallel size divide of a model: counts, and their names.

    Args:
        model: the run's; None if it is not known, of which nothing is divided.
        targets: what a learner quantizes; none for an engine, whose ranks may share KV heads.
    """
    if model is None:
        return {}
    heads = {"attention heads": model.num_attention_heads}
    if "attention" in targets:
        # The aligned attention has whole heads on each rank.
        heads["KV heads"] = model.num_key_value_heads
    if "mlp" in targets and model.intermediate_size:
        heads["columns of an MLP"] = model.intermediate_size
    return {"tp": heads, "pp": {"layers": model.num_hidden_layers}, "ep": {"experts": model.num_experts}}


def responses_per_step(config: Mapping[str, Any]) -> int:
    """Return how many responses a step of a config asks for; 0 if it does not say."""
    return _count(config, "grpo.num_prompts_per_step", 0) * _count(config, "grpo.num_generations_per_prompt", 0)


def _reward_model(config: Mapping[str, Any], nodes: int, per_node: int) -> tuple[int, int]:
    """Return a reward model's whole nodes of several, or its GPUs of a single node; none where they cannot be."""
    if not uses_reward_model(config):
        return 0, 0
    key, there = ("gpus_per_node", per_node) if nodes == 1 else ("num_nodes", nodes)
    own = _count(config, f"{REWARD_MODEL}.{key}", 0)
    own = own if own < there else 0
    return (0, own) if nodes == 1 else (own, 0)


def _end_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    counts = (_count(config, f"{MEGATRON}.num_layers_in_{end}_pipeline_stage", 0) for end in ("first", "last"))
    return tuple(count for count in counts if count)


def _count(config: Mapping[str, Any], dotted: str, default: int = 1) -> int:
    value = look_up(config, dotted, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

"""How a NeMo-RL run divides its GPUs among learner ranks and engines."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from qarl_nemo.architecture import Architecture
from qarl_nemo.memory import Parallelism
from qarl_nemo.nemo_rl.lookup import look_up

MEGATRON = "policy.megatron_cfg"
ENGINE = "policy.generation.vllm_cfg"
RESOURCES = "policy.generation.colocated.resources"
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
    )


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


def _end_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    counts = (_count(config, f"{MEGATRON}.num_layers_in_{end}_pipeline_stage", 0) for end in ("first", "last"))
    return tuple(count for count in counts if count)


def _count(config: Mapping[str, Any], dotted: str, default: int = 1) -> int:
    value = look_up(config, dotted, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

"""Who is timed, and on which GPUs learner and engines are: settings over a recipe of ours or of NeMo-RL."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads import ANSWERS_PER_PROMPT, WHOLE_LAYERS, Workload

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
_CONFIGS = REPOSITORY / "examples" / "configs"
# NeMo-RL's own, below its folder.
OWN_RECIPE = "examples/configs/grpo_math_qwen30ba3b_megatron.yaml"
_ENGINE = "policy.generation.vllm_cfg"
_LEARNER = "policy.megatron_cfg"
_OFFLOAD = "policy.offload_optimizer_for_refit"
SHARE = f"{_ENGINE}.gpu_memory_utilization"
# An engine's share of a GPU that no learner is on, beside which an update arrives; recorded runs had 0.85.
_APART_SHARE = 0.78
IN_FLIGHT = "grpo.async_grpo.in_flight_weight_updates"
_PLACEMENT = re.compile(r"(separate|asynchronous)_([1-9]\d*)_([1-9]\d*)")
_SEQUENCE_MULTIPLE = 512
# NeMo-RL cuts prompts that are longer than it is told.
_PROMPT_ROOM = 512


@dataclass(frozen=True)
class Arm:
    """A launcher with its recipe.

    Attributes:
        recipe: the end of its name in examples/configs; None: NeMo-RL's own launcher and recipe.
        share: what an engine takes of a GPU that it shares with the learner.
        wide: engines beside the learner have two GPUs each where they hold the whole model.
        tuned: runs with the settings that suit the host best, unless the workload is of recipes as shipped.
        changes: further settings, by dotted key.
    """

    recipe: str | None
    share: float
    wide: bool = False
    tuned: bool = True
    changes: Mapping[str, Any] | None = None


ARMS = {
    "w4a16": Arm("w4a16", 0.3),
    # As on GPUs that the optimizer does not fit beside an engine.
    "w4a16_offloaded": Arm("w4a16", 0.3, changes={_OFFLOAD: True}),
    "w4a16_experts": Arm("w4a16", 0.3, changes={"qarl.targets": ["experts"]}),
    "w4a8": Arm("w4a8", 0.3),
    "nvfp4": Arm("nvfp4", 0.3),
    "fp8_block": Arm("fp8-block", 0.4),
    "fp8_channel": Arm("fp8-channel", 0.4),
    "int8": Arm("int8", 0.4),
    "bf16": Arm("bf16", 0.4, wide=True),
    "nemo_rl_best": Arm(None, 0.4, wide=True),
    # NeMo-RL's published recipe, adapted to this host: experts over its GPUs, engines that fit its memory. That the
    # optimizer leaves is its default, which our check would decide for itself.
    "nemo_rl": Arm(None, 0.6, tuned=False, changes={f"{_ENGINE}.tensor_parallel_size": 2, _OFFLOAD: True}),
}


@dataclass(frozen=True)
class Placement:
    """Which GPUs learner and engines have.

    Attributes:
        engines: GPUs of the engines; 0: they share the learner's.
        learners: GPUs of the learner.
        asynchronous: engines answer while the learner updates.
    """

    engines: int
    learners: int
    asynchronous: bool = False

    @classmethod
    def parse(cls, name: str, gpus: int) -> "Placement":
        """Read `colocated`, `separate_E_L` or `asynchronous_E_L`: E GPUs for engines of one GPU, L for the learner.

        Raises:
            ValueError: it is none of these, or has another number of GPUs.
        """
        found = _PLACEMENT.fullmatch(name)
        if name == "colocated":
            return cls(0, gpus)
        if found is None:
            raise ValueError(f"placement {name!r}; legal: colocated, separate_E_L, asynchronous_E_L, E and L 1 or more")
        engines, learners = int(found[2]), int(found[3])
        if engines + learners != gpus:
            raise ValueError(f"placement {name}: {engines + learners} GPUs, where the workload has {gpus}")
        return cls(engines, learners, found[1] == "asynchronous")


def row_name(arm: str, placement: str, label: str = "") -> str:
    """Return what rows call an arm, whose label says what else was set."""
    return "_".join(word for word in (arm, "" if placement == "colocated" else placement, label) if word)


def settings(arm: str, placement: str, work: Workload, nemo_rl: Path | str) -> dict[str, Any]:
    """Compose an arm's config: what `--config` reads.

    Args:
        arm: one of `ARMS`.
        placement: as `Placement.parse` reads it.
        work: what a step asks of the host.
        nemo_rl: NeMo-RL's folder.

    Returns:
        `defaults`, a list of files, and the settings over them, nested.

    Raises:
        ValueError: the placement does not go with the workload.
    """
    chosen, place = ARMS[arm], Placement.parse(placement, work.gpus)
    parts = ["common.yaml"]
    if not (work.shipped and chosen.recipe):
        parts += ["host.yaml", "tuned.yaml"] if chosen.tuned else ["host.yaml"]
    recipe = (
        str(Path(nemo_rl) / OWN_RECIPE)
        if chosen.recipe is None
        else str(_CONFIGS / f"qarl-qwen3-30ba3b-1n8g-megatron-{chosen.recipe}.yaml")
    )
    dotted = work_settings(work) | _sizes(chosen, place, work) | _place(chosen, place) | dict(chosen.changes or {})
    return {"defaults": [recipe, *(str(HERE / part) for part in parts)], **nested(dotted)}


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key as nested blocks."""
    found: dict[str, Any] = {}
    for key, value in dotted.items():
        *parents, last = key.split(".")
        block = found
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = value
    return found


def work_settings(work: Workload) -> dict[str, Any]:
    """Return what a workload sets, from which rows are computed, by dotted key."""
    return {
        "cluster.gpus_per_node": work.gpus,
        "grpo.num_prompts_per_step": work.prompts,
        "grpo.num_generations_per_prompt": ANSWERS_PER_PROMPT,
        "policy.train_global_batch_size": work.answers // work.updates,
        "policy.generation.max_new_tokens": work.longest,
        "data.max_input_seq_length": max(_PROMPT_ROOM, work.prompt_tokens),
    }


def _sizes(arm: Arm, place: Placement, work: Workload) -> dict[str, Any]:
    """Return the learner's and the engines' shares of the host, of which recipes as shipped have their own."""
    # Where the experts cannot be shared out evenly, the layers can.
    even = place.learners & (place.learners - 1) == 0
    ranks = {
        f"{_LEARNER}.expert_model_parallel_size": place.learners if even else 1,
        f"{_LEARNER}.pipeline_model_parallel_size": 1 if even else place.learners,
    }
    if work.shipped and arm.recipe:
        return {SHARE: _APART_SHARE} | ranks if place.engines else ranks
    longest = -(-(work.prompt_tokens + work.longest) // _SEQUENCE_MULTIPLE) * _SEQUENCE_MULTIPLE
    found = {"policy.max_total_sequence_length": longest, SHARE: _APART_SHARE if place.engines else arm.share}
    if arm.wide and work.layers == WHOLE_LAYERS and not place.engines:
        found[f"{_ENGINE}.tensor_parallel_size"] = 2
    return found | ranks


def _place(arm: Arm, place: Placement) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if place.engines:
        where = "policy.generation.colocated"
        found = {f"{where}.enabled": False, f"{where}.resources": {"gpus_per_node": place.engines, "num_nodes": None}}
    if place.asynchronous:
        found |= {
            "grpo.async_grpo.enabled": True,
            f"{_ENGINE}.async_engine": True,
            f"{_ENGINE}.enable_vllm_metrics_logger": False,
            "loss_fn.use_importance_sampling_correction": True,
        }
        # NeMo-RL's own asynchronous recipes do not wait for answers before a refit; a learner that is aligned with its
        # engines does, and its objective corrects for older weights.
        found |= {"qarl.objective": {"objective": "tbpo"}} if arm.recipe else {IN_FLIGHT: True}
    return found

"""The runs on NeMo-RL's own GRPO loop: each case is overrides of the one-GPU recipe, and what must hold."""

from dataclasses import dataclass
from pathlib import Path

from qarl_nemo.muon import MEGATRON

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "examples" / "configs" / "qarl-tiny-moe-1n1g-megatron-w4a16.yaml"
# Mean |prev - generation| in nats. An aligned run of the tiny model had 8e-4 on an H200; rounding its experts and
# attention to w4a16 under a BF16 learner moves the log-probabilities by 8e-3 (on a CPU), its experts alone by 2e-3.
ALIGNED_GAP = 4e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a launcher.

    Attributes:
        steps: `grpo.max_num_steps`: the last step, counted over all starts of the case.
        overrides: changes to the recipe, in Hydra's words.
        executes: what every learner rank says of itself; None for NeMo-RL's own launcher.
        rollouts: the format of the rollouts.
        gap: smallest and largest legal mean of |prev - generation| over the steps, nats.
        kills: the Ray actor, one of its kind, that dies in the middle of the step after `kills_after`; empty for none.
        kills_after: how many steps this start finishes before.
        learns: the mean reward of the last ten steps exceeds that of the case's first ten by this much.
        says: what every learner rank says when it shares its GPU with an engine.
    """

    steps: int
    overrides: tuple[str, ...] = ()
    executes: str | None = "w4a16 in experts"
    rollouts: str = "w4a16"
    gap: tuple[float, float] = (0.0, ALIGNED_GAP)
    kills: str = ""
    kills_after: int = 0
    learns: float | None = None
    says: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run of one or several starts, each going on where the last one ended.

    Attributes:
        starts: in their order.
        gpus: that the case takes.
        learners: how many of them hold a learner rank; None is all.
        model: which model `tools/make/arithmetic_model.py` makes.
        needs: packages beyond NeMo-RL's.
        validates: steps between two validations; each is a refit of its own.
    """

    starts: tuple[Start, ...]
    gpus: int = 1
    learners: int | None = None
    model: str = "tiny"
    needs: tuple[str, ...] = ()
    validates: int | None = None

    @property
    def num_learners(self) -> int:
        """How many learner ranks there are."""
        return self.gpus if self.learners is None else self.learners


def _format(name: str, **changes: float | tuple[float, float]) -> Case:
    settings = {"steps": 12, "overrides": (f"qarl.format={name}",), "executes": f"{name} in experts", "rollouts": name}
    return Case(starts=(Start(**settings | changes),))


def _parallel(gpus: int, *overrides: str) -> Case:
    return Case(gpus=gpus, starts=(Start(steps=4, overrides=overrides),))


def _dense(gpus: int) -> Case:
    changes = ("++qarl.targets=[mlp,attention]", *_OUR_DATA)
    return Case(
        gpus=gpus,
        model="dense",
        starts=(Start(steps=6, overrides=changes, executes="w4a16 in attention of 4 layers, mlp of 4 layers"),),
    )


def _large(*overrides: str, **changes: str | None) -> Case:
    settings = {"steps": 12, "overrides": (*_LARGE, *overrides), "gap": (0.0, 0.02)}
    return Case(starts=(Start(**settings | changes),), model="1b")


def _large_format(name: str) -> Case:
    return _large(f"qarl.format={name}", *_ROUNDING, executes=f"{name} in experts", rollouts=name)


def _checkpoints(period: int) -> tuple[str, ...]:
    # The weight-decay schedule ends at the last step, which differs between starts.
    schedule = "++policy.megatron_cfg.scheduler.override_opt_param_scheduler=true"
    return ("checkpointing.enabled=true", f"checkpointing.save_period={period}", schedule)


def _residency(resident: str, says: str) -> Case:
    # Killed and resumed in between, it must learn like the run that nobody kills.
    again = (f"++qarl.resident={resident}", *_checkpoints(30))
    killed = Start(steps=100, overrides=again, kills="QarlMegatronPolicyWorker", kills_after=60, says=says)
    return Case(starts=(killed, Start(steps=100, overrides=again, learns=0.1, says=says)))


def _killed(gpus: int, *overrides: str) -> Case:
    again = (*overrides, *_checkpoints(2))
    kills = ("QarlGenerationWorker", "QarlMegatronPolicyWorker")
    starts = (Start(steps=6, overrides=again, kills=actor, kills_after=2) for actor in kills)
    return Case(gpus=gpus, starts=(*starts, Start(steps=6, overrides=again)))


_MEGATRON, _VLLM = "policy.megatron_cfg", "policy.generation.vllm_cfg"
_ATTENTION = "++qarl.targets=[experts,attention]"
_BF16 = ("qarl.format=bf16", "++qarl.alignment=none")
_RUNS_BF16 = {"executes": "bf16 in experts", "rollouts": "bf16"}
_OFFLOADED = "++qarl.resident=false"
_ROUNDING = ("++qarl.engine_rounding=true",)
_GRAPHS = (f"{_VLLM}.enforce_eager=false",)
_LARGE = ("policy.train_micro_batch_size=32", *_GRAPHS)
_SEPARATE = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1")
_ASYNCHRONOUS = (
    "grpo.async_grpo.enabled=true",
    f"{_VLLM}.async_engine=true",
    "loss_fn.use_importance_sampling_correction=true",
)
_MUON = (
    f"{_MEGATRON}.optimizer.optimizer=dist_muon",
    f"{_MEGATRON}.optimizer.use_distributed_optimizer=false",
    f"{_MEGATRON}.distributed_data_parallel_config.overlap_param_gather=false",
    *(f"++{_MEGATRON}.optimizer.{key}={str(value).lower()}" for key, value in MEGATRON.items()),
)
_FROM_8_BITS = (
    "qarl.format=w8a16",
    "++qarl.group_size=32",
    "++qarl.schedule=[{from_step:3,bits:4},{from_step:5,bits:2}]",
)
_STAGES = (
    "++qarl.group_size=32",
    "++qarl.schedule=[{from_step:3,bits:3},{from_step:5,bits:2,reset_moments:true}]",
)
_OUR_DATA = (
    "data.train.dataset_name=qarl_nemo.nemo_rl.problems.Problems",
    "++data.train.reward_function=qarl_nemo.verify:reward",
    "++env.reward_function.num_workers=2",
)
_TRITON = "policy.generation.vllm_kwargs.moe_backend=triton"
_REPLAY = (
    "++policy.router_replay.enabled=true",
    f"++{_VLLM}.enable_prefix_caching=false",
    "++policy.generation.vllm_kwargs.enable_chunked_prefill=false",
)

CASES = {
    "w4a16": Case(starts=(Start(steps=100, learns=0.1),)),
    "resident": _residency("true", "parameters stay while the engine runs"),
    "offloaded": _residency("false", "the optimizer leaves beside the refit"),
    "bf16": Case(starts=(Start(steps=30, overrides=_BF16, **_RUNS_BF16),)),
    "engine_rounding": Case(starts=(Start(steps=12, overrides=_ROUNDING),)),
    "engine_rounding_bf16": Case(starts=(Start(steps=8, overrides=(*_BF16, *_ROUNDING), **_RUNS_BF16),)),
    "resume": Case(
        starts=(
            Start(steps=8, overrides=(*_BF16, *_checkpoints(4)), **_RUNS_BF16),
            Start(steps=11, overrides=_checkpoints(4)),
            Start(steps=13, overrides=(*_BF16, *_checkpoints(4)), **_RUNS_BF16),
        )
    ),
    "fp8_block": _format("fp8_block"),
    "fp8_channel": _format("fp8_channel"),
    "int8": _format("int8"),
    "nvfp4": _format("nvfp4"),
    "w4a8": _format("w4a8"),
    "w2a16": _format("w2a16"),
    # The published 8-bit codes are rounded by the engine's worker.
    "nested": Case(starts=(Start(steps=12, overrides=("++qarl.nested_in=w8a16",)),)),
    # Killed in its last stage, which it goes on in.
    "progressive": Case(
        starts=(
            Start(steps=9, overrides=(*_STAGES, *_checkpoints(2)), kills="QarlGenerationWorker", kills_after=6),
            Start(steps=9, overrides=(*_STAGES, *_checkpoints(2)), says="step 7: codes of 2 bits from here on"),
        )
    ),
    "progressive_w8a16": Case(
        starts=(Start(steps=7, overrides=_FROM_8_BITS, executes="w8a16 in experts", rollouts="w8a16"),)
    ),
    "update_aware": Case(
        starts=(
            Start(
                steps=8,
                overrides=("++qarl.update_aware_scale=1.5", _ATTENTION),
                executes="w4a16 in experts of 4 layers, attention",
            ),
        )
    ),
    # The learner's forward is BF16, so a gap as small as an aligned one would mean that nothing was quantized.
    "rollout_only": Case(
        starts=(
            Start(
                steps=5,
                overrides=("++qarl.alignment=rollout_only", _ATTENTION),
                executes="bf16 in experts of 4 layers, attention",
                gap=(ALIGNED_GAP, 10.0),
            ),
        )
    ),
    "attention_muon": Case(
        starts=(
            Start(
                steps=5,
                overrides=(_ATTENTION, *_MUON, _OFFLOADED),
                executes="w4a16 in experts of 4 layers, attention",
            ),
        ),
        needs=("emerging_optimizers",),
    ),
    "replay": Case(
        starts=(
            Start(
                steps=4,
                overrides=(*_REPLAY, _OFFLOADED, "loss_fn.reference_policy_kl_penalty=0.01", "grpo.val_period=2"),
            ),
        ),
        validates=2,
    ),
    # Half of the checkpoint's four layers, which nobody trained to answer without the others.
    "fewer_layers": Case(
        starts=(
            Start(
                steps=2,
                overrides=("++policy.hf_config_overrides.num_hidden_layers=2",),
                executes="w4a16 in experts of 2 layers",
                gap=(0.0, 0.3),
            ),
        )
    ),
    "layerwise": Case(starts=(Start(steps=4, overrides=("++qarl.layerwise_refit=true",)),)),
    "ep2_layerwise": _parallel(
        2,
        f"{_MEGATRON}.expert_model_parallel_size=2",
        f"{_VLLM}.tensor_parallel_size=2",
        "++qarl.group_size=64",
        "++qarl.layerwise_refit=true",
    ),
    "tp2": _parallel(
        2,
        f"{_MEGATRON}.tensor_model_parallel_size=2",
        f"{_MEGATRON}.sequence_parallel=true",
        f"{_VLLM}.tensor_parallel_size=2",
        "++qarl.group_size=64",
    ),
    "ep2": _parallel(
        2,
        f"{_MEGATRON}.expert_model_parallel_size=2",
        f"{_VLLM}.tensor_parallel_size=2",
        f"{_VLLM}.expert_parallel_size=2",
    ),
    # Two engines of one rank each, whose experts are vLLM's data parallel ranks'.
    "ep2_engines": _parallel(2, f"{_MEGATRON}.expert_model_parallel_size=2", f"{_VLLM}.expert_parallel_size=2"),
    "separate": Case(gpus=2, learners=1, starts=(Start(steps=4, overrides=_SEPARATE),)),
    "asynchronous": Case(
        gpus=2,
        learners=1,
        # Responses may be of older weights, which is a gap, too.
        starts=(Start(steps=6, overrides=(*_SEPARATE, *_ASYNCHRONOUS), gap=(0.0, 0.3)),),
    ),
    "cp2": _parallel(2, f"{_MEGATRON}.context_parallel_size=2", "policy.make_sequence_length_divisible_by=4"),
    "ep4": _parallel(
        4,
        f"{_MEGATRON}.expert_model_parallel_size=4",
        f"{_VLLM}.tensor_parallel_size=2",
        "policy.train_micro_batch_size=32",
        "++qarl.group_size=64",
    ),
    # A Qwen2 with biases and a tied head, our data set and `qarl train`'s verifier; on two data parallel ranks, too.
    "dense": _dense(2),
    "dense_one_gpu": _dense(1),
    # CUDA graphs for decoding, as the large recipes have them.
    "graphs": Case(starts=(Start(steps=4, overrides=_GRAPHS),)),
    # 0.83 B parameters: large enough that a step's time is not all the host's.
    "one_billion": _large(*_ROUNDING),
    "one_billion_bf16": _large(*_BF16, *_ROUNDING, **_RUNS_BF16),
    "one_billion_w4a8": _large_format("w4a8"),
    "one_billion_fp8_block": _large_format("fp8_block"),
    "one_billion_fp8_channel": _large_format("fp8_channel"),
    "one_billion_nemo_rl": _large(_TRITON, executes=None, rollouts="bf16"),
    "killed": _killed(1),
    # One of several engines, then one of as many learner ranks.
    "killed_ep2": _killed(2, f"{_MEGATRON}.expert_model_parallel_size=2"),
    "killed_ep8": _killed(8, f"{_MEGATRON}.expert_model_parallel_size=8", "policy.train_micro_batch_size=16"),
    # NeMo-RL's own launcher, workers and loss, at the same sizes.
    "nemo_rl_bf16": Case(
        starts=(
            Start(
                steps=10,
                overrides=(_TRITON,),
                executes=None,
                rollouts="bf16",
            ),
        )
    ),
}


def overrides(case: Case, start: Start, model: Path, folder: Path) -> list[str]:
    """Return all overrides of one start.

    Args:
        case: one of `CASES`.
        start: one of its.
        model: folder with model/, train.jsonl and val.jsonl.
        folder: where logs and checkpoints go.
    """
    return [
        f"grpo.max_num_steps={start.steps}",
        f"cluster.gpus_per_node={case.gpus}",
        f"policy.model_name={model / 'model'}",
        f"data.train.data_path={model / 'train.jsonl'}",
        f"data.validation.data_path={model / 'val.jsonl'}",
        f"logger.log_dir={folder / 'logs'}",
        f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
        *start.overrides,
    ]

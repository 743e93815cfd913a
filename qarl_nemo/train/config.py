"""The embedded engine's config; block and key names follow NeMo-RL's where both have them. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from qarl_nemo.config import QarlConfig, StrictModel
from qarl_nemo.config.strict import InHome, not_null
from qarl_nemo.data.config import DatasetsData
from qarl_nemo.losses.config import LossConfig
from qarl_nemo.muon import MOMENTUM
from qarl_nemo.train.checkpointing_config import CheckpointingConfig
from qarl_nemo.train.lora import LoraConfig, lora_problems
from qarl_nemo.train.rollout_config import LOWEST_TEMPERATURE, PackedRolloutConfig, RolloutConfig
from qarl_nemo.train.vllm.limits import config_problems
from qarl_nemo.update_aware import UpdateAwareScale

# The largest random model; in FP32 it takes 400 GB.
_MAX_BILLIONS = 100
_MAX_RESPONSES = 1 << 20
_Beta = Annotated[float, Field(ge=0, lt=1)]
MAX_SEED = 2**32 - 1
_Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
_Chunk = Annotated[int, not_null("logits are always made in chunks here: set 1 or more positions, not null")]


class ModelInit(StrictModel):
    """A randomly initialized Qwen3-MoE with a character tokenizer, for models that know nothing yet."""

    hidden_size: int = Field(128, ge=32, le=65_536)
    num_hidden_layers: int = Field(2, ge=1, le=1024)
    num_attention_heads: int = Field(4, ge=1, le=1024)
    num_key_value_heads: int = Field(2, ge=1, le=1024)
    head_dim: int = Field(32, ge=8, le=4096)
    num_experts: int = Field(8, ge=1, le=4096)
    num_experts_per_tok: int = Field(2, ge=1, le=4096)
    moe_intermediate_size: int = Field(128, ge=32, le=131_072)
    max_position_embeddings: int = Field(256, ge=16, le=1_048_576)

    @model_validator(mode="after")
    def sizes_agree(self) -> "ModelInit":
        """Require whole groups of heads, an even head dimension, and as many experts as a token is sent to."""
        problems = []
        if self.num_experts_per_tok > self.num_experts:
            problems.append(f"num_experts_per_tok={self.num_experts_per_tok} is above num_experts={self.num_experts}")
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} is odd, and rotary positions turn pairs")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def fits_a_machine(self) -> "ModelInit":
        """Bound the parameters, so that a typo is an error and does not exhaust the machine's memory."""
        attention = 2 * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        experts = 3 * self.num_experts * self.moe_intermediate_size
        billions = self.num_hidden_layers * self.hidden_size * (attention + experts) / 1e9
        if billions > _MAX_BILLIONS:
            raise ValueError(
                f"these sizes make {billions:,.0f} billion parameters; legal: up to {_MAX_BILLIONS} billion"
            )
        return self


class WarmStart(StrictModel):
    """Supervised warm start on the training tasks' answers, before RL begins."""

    steps: int = Field(0, ge=0, le=1_000_000, description="At most this many; 0 skips the warm start.")
    batch_size: int = Field(256, ge=1, le=65_536)
    lr: float = Field(1e-3, gt=0, le=10)
    target_reward: float | None = Field(None, gt=0, le=1)
    """Stop once greedy answers to the validation tasks reach this reward, so that all seeds start RL alike."""
    check_period: int = Field(10, ge=1, le=1_000_000, description="Steps between looks at the greedy reward.")


class AdamWConfig(StrictModel):
    """torch.optim.AdamW."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(5e-4, gt=0, le=10)
    weight_decay: float = Field(0.0, ge=0, le=10)
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    warmup_steps: int = Field(0, ge=0, le=1_000_000, description="Optimizer steps of linear warm-up.")
    update_aware_scale: UpdateAwareScale | None = None


class MuonConfig(StrictModel):
    """torch.optim.Muon on hidden matrices (each expert its own), AdamW on embeddings, head, routers, norms, biases."""

    name: Literal["muon"] = "muon"
    lr: float = Field(1e-3, gt=0, le=10)
    weight_decay: float = Field(0.01, ge=0, le=10)
    momentum: float = Field(MOMENTUM, ge=0, lt=1)
    warmup_steps: int = Field(0, ge=0, le=1_000_000, description="Optimizer steps of linear warm-up.")
    update_aware_scale: UpdateAwareScale | None = None


class MegatronConfig(StrictModel):
    """Megatron-core as the learner, with Transformer-Engine on GPUs."""

    num_gpus: int = Field(1, ge=1, le=1024, description="Ranks, one GPU each.")
    tensor_model_parallel_size: int = Field(1, ge=1, le=1024)
    expert_model_parallel_size: int = Field(1, ge=1, le=1024)
    expert_tensor_parallel_size: int = Field(1, ge=1, le=1024)
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    use_distributed_optimizer: bool = True
    """Shard masters and moments over data parallel ranks."""

    @property
    def data_parallel_size(self) -> int:
        """How many ranks share the rows of a batch."""
        return self.num_gpus // self.tensor_model_parallel_size

    @model_validator(mode="after")
    def parts_divide_the_ranks(self) -> "MegatronConfig":
        """Require whole groups of ranks."""
        experts = self.expert_model_parallel_size * self.expert_tensor_parallel_size
        if self.num_gpus % self.tensor_model_parallel_size or self.num_gpus % experts:
            raise ValueError(
                f"tensor_model_parallel_size={self.tensor_model_parallel_size} and expert_model_parallel_size * "
                f"expert_tensor_parallel_size={experts} must both divide num_gpus={self.num_gpus}"
            )
        return self


class SequencePackingConfig(StrictModel):
    """Micro-batches of as many responses as a budget of tokens holds, the longest together."""

    enabled: bool = False
    """Split by these budgets in place of `train_micro_batch_size` and `logprob_batch_size`."""
    train_mb_tokens: int = Field(16_384, ge=1, le=2**31 - 1, description="Most tokens of one forward and backward.")
    logprob_mb_tokens: int = Field(32_768, ge=1, le=2**31 - 1, description="Most tokens of one without gradient.")


class TokenizerConfig(StrictModel):
    """How a prompt is written for the model; keys are NeMo-RL's."""

    chat_template: str | None = "default"
    """`default` = the tokenizer's, if it has one; null = none; else Jinja, or a file that ends in .jinja."""
    chat_template_kwargs: dict[str, Any] = Field({}, description="The template's own options: enable_thinking: false.")

    @field_validator("chat_template")
    @classmethod
    def is_a_template(cls, template: str | None) -> str | None:
        """Refuse a text in which no message would stand, such as the name of a template."""
        if template in (None, "default") or template.endswith(".jinja") or "{" in template:
            return template
        raise ValueError(f"{template!r} is neither default, null, a file that ends in .jinja, nor a template's text")


class PolicyConfig(StrictModel):
    """The learner: which model, in which precision, trained how."""

    model_path: Annotated[Path | None, InHome] = Field(
        None, description="Local checkpoint directory; if quantized, a frozen base."
    )
    model_init: ModelInit | None = Field(None, description="A tiny random model instead of a checkpoint.")
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and activations; bfloat16 keeps FP32 masters in the optimizer."""
    attention: Literal["torch", "engine"] = "torch"
    """The learner's kernel; `engine` is vLLM's own, forward bit for bit, on a Hopper GPU with vLLM installed."""
    megatron_cfg: MegatronConfig | None = Field(None, description="Train in Megatron; None = in transformers.")
    lora: LoraConfig | None = Field(None, description="Train adapters on a frozen base; None = all weights.")
    warm_start: WarmStart = WarmStart()
    train_micro_batch_size: int = Field(256, ge=1, le=65_536, description="Sequences of one forward and backward.")
    logprob_batch_size: int = Field(512, ge=1, le=65_536, description="Sequences of one forward without gradient.")
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward, which runs its forward once more."""
    logprob_chunk_size: _Chunk = Field(1024, ge=1, le=2**31 - 1, description="Positions whose logits exist at a time.")
    max_grad_norm: float = Field(1.0, gt=0, le=1e6)
    max_skipped_steps: int = Field(3, ge=1, le=1000, description="Non-finite steps in a row before the run stops.")
    optimizer: Annotated[AdamWConfig | MuonConfig, Field(discriminator="name")] = AdamWConfig()

    @model_validator(mode="after")
    def one_model_source(self) -> "PolicyConfig":
        """Require exactly one of model_path and model_init."""
        if (self.model_path is None) == (self.model_init is None):
            raise ValueError(
                "set exactly one of model_path (a checkpoint's folder) and model_init (a random model), the other null"
            )
        return self

    @model_validator(mode="after")
    def megatron_has_its_own(self) -> "PolicyConfig":
        """Reject settings of memory, optimizer and attention that `megatron_cfg` does not support."""
        if self.megatron_cfg is None:
            return self
        if self.sequence_packing.enabled or self.activation_checkpointing:
            raise ValueError(
                "sequence_packing and activation_checkpointing are the transformers learner's: leave both off with "
                "megatron_cfg, and set train_micro_batch_size and logprob_batch_size"
            )
        if self.attention != "torch":
            raise ValueError(f"attention={self.attention}: Megatron attends with its own kernels; leave it at torch")
        if self.optimizer.name == "muon" and self.megatron_cfg.use_distributed_optimizer:
            raise ValueError("optimizer.name=muon: set megatron_cfg.use_distributed_optimizer=false")
        return self


class GrpoConfig(StrictModel):
    """The RL loop."""

    num_prompts_per_step: int = Field(64, ge=1, le=65_536)
    num_generations_per_prompt: int = Field(8, ge=2, le=4_096)
    train_global_batch_size: int = Field(
        256, ge=1, le=1_048_576, description="Sequences of one optimizer step (a minibatch)."
    )
    max_num_steps: int = Field(200, ge=1, le=10_000_000)
    normalize_rewards: bool = True
    """Divide group-centred rewards by the group's standard deviation."""
    val_period: int = Field(50, ge=0, le=10_000_000, description="Steps between validations; 0 turns validation off.")
    val_at_end: bool = False
    """Validate after the last step, too, whatever its number."""
    val_num_prompts: int = Field(256, ge=1, le=1_000_000)
    val_temperature: float = Field(0.0, ge=0, le=100, description="0 decodes greedily.")
    val_top_p: float = Field(1.0, gt=0, le=1)

    @field_validator("val_temperature")
    @classmethod
    def sampled_as_set(cls, value: float) -> float:
        """Require a temperature that vLLM takes as it is."""
        if 0 < value < LOWEST_TEMPERATURE:
            lowest = LOWEST_TEMPERATURE
            raise ValueError(f"vLLM samples at {lowest} where less is set; set 0, which is greedy, or {lowest} or more")
        return value

    @model_validator(mode="after")
    def validation_is_on_where_it_ends_a_run(self) -> "GrpoConfig":
        """Require a validation that `val_at_end` can ask for."""
        if self.val_at_end and not self.val_period:
            raise ValueError("val_at_end=true: val_period=0 turns validation off; set another val_period")
        return self

    @model_validator(mode="after")
    def minibatches_divide_the_batch(self) -> "GrpoConfig":
        """Require whole minibatches."""
        total = self.num_prompts_per_step * self.num_generations_per_prompt
        if total > _MAX_RESPONSES:
            raise ValueError(
                f"num_prompts_per_step * num_generations_per_prompt is {total}; a step has at most {_MAX_RESPONSES}"
            )
        if total % self.train_global_batch_size:
            legal = [total // n for n in range(1, 17) if total % n == 0]
            raise ValueError(
                f"train_global_batch_size={self.train_global_batch_size} does not divide the {total} responses of a "
                f"step (num_prompts_per_step * num_generations_per_prompt); legal: {', '.join(map(str, legal))}"
            )
        return self


class ArithmeticData(StrictModel):
    """Seeded tasks such as `12+34=`, answers verified like any other."""

    source: Literal["arithmetic"] = "arithmetic"
    digits: int = Field(2, ge=1, le=6)
    num_terms: int = Field(2, ge=2, le=16)
    operators: str = "+"
    answer_digits: int = Field(1, ge=1, le=12, description="Answers are zero-padded to this many digits.")
    running_totals: bool = False
    """Answers list the total after each operator, `1+2+3=` -> `3 6`: longer responses that depend on themselves."""

    @field_validator("operators")
    @classmethod
    def are_known(cls, operators: str) -> str:
        """Require one or more of the three operators."""
        if not operators or set(operators) - set("+-*"):
            raise ValueError(f"{operators!r} is not made of +, - and *")
        return operators

    @model_validator(mode="after")
    def totals_run_from_left_to_right(self) -> "ArithmeticData":
        """Reject products in running totals, because they are evaluated before sums."""
        if self.running_totals and "*" in self.operators:
            raise ValueError("running_totals adds from left to right; legal operators with it: + and -")
        return self


class WandbConfig(StrictModel):
    """Weights & Biases, beside TensorBoard."""

    project: str


class LoggerConfig(StrictModel):
    """Event files: metrics.jsonl and TensorBoard always."""

    wandb: WandbConfig | None = None
    diagnostics_period: int = Field(
        20, ge=1, le=10_000_000, description="Steps between dumps of ratios, scatter and examples."
    )
    validation_answers: bool = True
    """Keep every answer of a validation in validation/, so that reports compare arms problem by problem."""


class RunLabels(StrictModel):
    """How reports call this run."""

    name: str | None = None
    arm: str | None = None


class CompareConfig(StrictModel):
    """Several arms and seeds from one file: each arm's blocks are merged over the rest."""

    arms: dict[str, dict[str, Any]] = Field(..., min_length=1, max_length=1000)
    seeds: list[_Seed] = Field(..., min_length=1, max_length=1000)

    @field_validator("arms", mode="before")
    @classmethod
    def arms_have_names_and_blocks(cls, value: Any) -> Any:
        """Refuse names that YAML reads as something else, and arms that say nothing."""
        if not isinstance(value, dict):
            return value
        problems = [f"{name!r} is no text; put the arm's name in quotes" for name in value if not isinstance(name, str)]
        problems += [
            f"arm {name!r} is null; write {{}} for the rest as it is" for name, arm in value.items() if arm is None
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return value


class LocalConfig(StrictModel):
    """Everything one `qarl train` needs."""

    run: RunLabels = RunLabels()
    run_dir: Annotated[Path, InHome]
    seed: int = Field(0, ge=0, lt=2**32)
    device: Literal["cpu", "cuda", "auto"] = "auto"
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads; None = torch's choice, and 1 in a comparison."
    )
    qarl: QarlConfig = QarlConfig()
    policy: PolicyConfig
    rollout: RolloutConfig = PackedRolloutConfig()
    loss_fn: LossConfig
    grpo: GrpoConfig = GrpoConfig()
    data: Annotated[ArithmeticData | DatasetsData, Field(discriminator="source")] = ArithmeticData()
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logger: LoggerConfig = LoggerConfig()
    compare: CompareConfig | None = None

    @property
    def name(self) -> str:
        """What reports call this run: after its folder where it has no name."""
        return self.run.name or self.run_dir.resolve().name

    @field_validator("run_dir", mode="before")
    @classmethod
    def run_dir_has_a_name(cls, value: Any) -> Any:
        """Refuse an empty name, which would be the current folder."""
        if value == "":
            raise ValueError("a run's folder needs a name; run_dir=. is the current one")
        return value

    @model_validator(mode="after")
    def blocks_fit_together(self) -> "LocalConfig":
        """Reject what each block allows and cannot be combined; every conflict is listed."""
        if problems := _conflicts(self):
            raise ValueError("; ".join(problems))
        return self


def _conflicts(config: LocalConfig) -> list[str]:
    grpo, policy = config.grpo, config.policy
    size, total = grpo.train_global_batch_size, grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    ranks = policy.megatron_cfg.data_parallel_size if policy.megatron_cfg else 1
    problems = []
    if config.loss_fn.objective == "on_policy_grpo" and size != total:
        problems.append(
            "loss_fn.objective=on_policy_grpo is right for one optimizer step a rollout batch only; set "
            f"grpo.train_global_batch_size={total}"
        )
    if size % ranks:
        problems.append(
            f"grpo.train_global_batch_size={size} is not a multiple of the {ranks} data parallel ranks of "
            "policy.megatron_cfg"
        )
    if adapted := lora_problems(config):
        problems.append("policy.lora: " + "; ".join(adapted))
    if config.qarl.alignment == "none" and policy.optimizer.update_aware_scale is not None:
        problems.append(
            "policy.optimizer.update_aware_scale speeds up quantized weights, and with qarl.alignment=none there are "
            "none; set it to null"
        )
    # With device=auto the device is known, and this is checked, when the run starts.
    known = config.rollout.engine == "vllm" and config.device != "auto"
    if known and (unserved := config_problems(config, config.device)):
        problems.append("rollout.engine=vllm: " + "; ".join(unserved))
    return problems

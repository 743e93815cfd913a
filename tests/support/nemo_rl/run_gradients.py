"""One batch trained by NeMo-RL's policy with our worker, under TBPO and under NeMo-RL's own clipped loss: how far apart
their gradients are, as JSON. A program of its own, for Ray: `python -m support.nemo_rl.run_gradients <folder>`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.distributed import ray_actor_environment_registry as registry
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from qarl_nemo.losses.config import TBPOConfig
from qarl_nemo.nemo_rl import plugin
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.loss import PREFIX, QarlLossFn
from qarl_nemo.nemo_rl.policy import QarlPolicy
from qarl_nemo.nemo_rl.policy_worker import QarlMegatronPolicyWorkerImpl
from qarl_nemo.nemo_rl.token_metrics import token_metrics
from qarl_nemo.train.tokenizer import character_tokenizer

RECIPE = Path(__file__).parents[3] / "examples" / "configs" / "qarl-tiny-moe-1n1g-megatron-w4a16.yaml"
VOCABULARY, PROMPT, LONGEST, BATCH = 19, 8, 48, 32
BANDS = {"positive_clip_high": 0.004, "negative_clip_low": 0.003, "negative_clip_high": 0.007}


class GradientWorkerImpl(QarlMegatronPolicyWorkerImpl):
    """Our worker, which also shows the gradients of the latest step."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """By parameter, FP32 on the host."""
        named = self.model.named_parameters()
        return {name: one.main_grad.float().cpu() for name, one in named if getattr(one, "main_grad", None) is not None}


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class GradientWorker(GradientWorkerImpl):
    """What Ray starts."""


def make_model(folder: Path) -> None:
    """A random model and a real tokenizer."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    # Spelled for every version of transformers that reads it.
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts": 8, "rope_theta": 10000.0}))


def make_config(folder: Path) -> Any:
    """The one-GPU recipe, with gradients in FP32, unclipped, and steps that move nothing."""
    register_omegaconf_resolvers()
    still = {"lr": 1e-30, "min_lr": 1e-30}
    changes = {
        "model_name": str(folder),
        "train_global_batch_size": BATCH,
        "train_micro_batch_size": 4,
        "max_grad_norm": 1e9,
        "megatron_cfg": {
            "train_iters": 10,
            "optimizer": still,
            "scheduler": {"lr_warmup_iters": 0, "lr_warmup_init": 1e-30},
            "distributed_data_parallel_config": {"grad_reduce_in_fp32": True},
        },
    }
    recipe = OmegaConf.merge(load_config(RECIPE), {"policy": changes})
    recipe.grpo.num_prompts_per_step = BATCH // recipe.grpo.num_generations_per_prompt
    config = MasterConfig(**OmegaConf.to_container(recipe, resolve=True))
    apply_qarl(config)
    return config


def make_batch() -> BatchedDataDict:
    """Responses of many lengths; logprobs are added once the policy has given them."""
    lengths = torch.randint(PROMPT + 4, LONGEST + 1, (BATCH,))
    positions = torch.arange(LONGEST)
    mask = ((positions >= PROMPT) & (positions < lengths[:, None])).float()
    return BatchedDataDict(
        input_ids=torch.where(positions < lengths[:, None], torch.randint(4, VOCABULARY, (BATCH, LONGEST)), 0),
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=torch.ones(BATCH),
        advantages=torch.randn(BATCH, 1).expand(BATCH, LONGEST).clone(),
    )


def losses() -> dict[str, Any]:
    """TBPO, the same loss in NeMo-RL's words twice, and one without its upper band."""

    def clipped(**changes: Any) -> ClippedPGLossFn:
        settings = {
            "reference_policy_kl_penalty": 0.0,
            "sequence_level_importance_ratios": True,
            "token_level_loss": False,
            "ratio_clip_min": BANDS["negative_clip_low"],
            "ratio_clip_max": BANDS["positive_clip_high"],
            "ratio_clip_c": 1 + BANDS["negative_clip_high"],
        }
        return ClippedPGLossFn(ClippedPGLossConfig(**settings | changes))

    plain = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
    return {
        "tbpo": QarlLossFn(TBPOConfig(**BANDS), plain, token_metrics),
        "clipped": clipped(),
        "again": clipped(),
        "wrong": clipped(ratio_clip_c=None),
    }


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, all parameters together."""
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    return (difference / sum(float(grad.double().square().sum()) for grad in other.values())) ** 0.5


def main(folder: Path) -> None:
    """Write `gradients.json`."""
    model = folder / "model"
    make_model(model)
    config = make_config(model)
    init_ray()
    worker = f"{__spec__.name}.GradientWorker"
    plugin.register()
    registry.ACTOR_ENVIRONMENT_REGISTRY[worker] = registry.MCORE_EXECUTABLE
    policy = QarlPolicy(
        cluster=RayVirtualCluster(name="gradients", bundle_ct_per_node_list=[1], use_gpus=True, num_gpus_per_node=1),
        config=config.policy,
        tokenizer=get_tokenizer(config.policy["tokenizer"] | {"name": str(model)}),
        init_reference_model=False,
        worker_extension_cls_fqn=worker,
    )
    torch.manual_seed(1)
    batch = make_batch()
    policy.prepare_for_lp_inference()
    scored = policy.get_logprobs(batch)["logprobs"].float().cpu()
    # The learner has moved since, by a little or too much, and the sampler agreed with it.
    drift = 0.02 * torch.randn(BATCH, 1)
    batch["prev_logprobs"] = scored - drift * batch["token_mask"]
    batch["generation_logprobs"] = batch["prev_logprobs"].clone()
    batch["reference_policy_logprobs"] = torch.zeros_like(scored)
    policy.prepare_for_training()
    gradients, metrics = {}, {}
    for name, loss_fn in losses().items():
        result = policy.train(batch, loss_fn)
        metrics[name] = {key: sum(values) for key, values in result["all_mb_metrics"].items()}
        (gradients[name],) = ray.get(policy.worker_group.run_all_workers_single_data("gradients"))
    figures = {name: distance(gradients[name], gradients["clipped"]) for name in ("tbpo", "again", "wrong")}
    figures |= {"kept": metrics["tbpo"][PREFIX + "kept_fraction"], "num_gradients": len(gradients["tbpo"])}
    figures |= {f"loss_{name}": metrics[name]["loss"] for name in ("tbpo", "clipped")}
    broken = batch.copy()
    broken["prev_logprobs"] = batch["prev_logprobs"].clone()
    broken["prev_logprobs"][5, PROMPT] = torch.nan
    for name, data in (("skipped", broken), ("skipped_after", batch)):
        result = policy.train(data, losses()["tbpo"])
        figures[name] = sum(result["all_mb_metrics"][PREFIX + "skipped_steps"])
    (folder / "gradients.json").write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

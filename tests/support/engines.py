"""A tiny Qwen3-MoE with its learner and its packed sampler, joined by one refit."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from qarl_kernels import QuantFormat, get_format
from qarl_nemo.layers.install import InstallReport, install
from qarl_nemo.layers.router import NO_ROUTE
from qarl_nemo.losses.build import build_loss
from qarl_nemo.losses.config import GRPOTISConfig
from qarl_nemo.refit.publish import RefitUpdate, publish
from qarl_nemo.train.config import AdamWConfig, ModelInit, SequencePackingConfig
from qarl_nemo.train.engine_forward import follow_engine
from qarl_nemo.train.learner import Learner
from qarl_nemo.train.model import tiny_config
from qarl_nemo.train.optimizer import MasterOptimizer
from qarl_nemo.train.policy import TransformersPolicy
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.sampler import PackedSampler
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()
PAD, EOS = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
# lengths 5, 2, 7 and 1: left padding of 2, 5, 0 and 6 columns
PROMPTS = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in ("12+34", "7=", "890*12=", "5")]
W4A16_G32 = get_format("w4a16", group_size=32)
BF16 = get_format("bf16")


def tiny_model(*, dtype=torch.float32, seed=0, **sizes) -> PreTrainedModel:
    """A random model; its weights are five times the usual size, so that logits differ and mistakes show."""
    init = ModelInit(**{"num_experts": 4, "moe_intermediate_size": 128} | sizes)
    config = tiny_config(init, TOKENIZER)
    config.initializer_range = 0.1
    torch.manual_seed(seed)
    return follow_engine(AutoModelForCausalLM.from_config(config, dtype=dtype)).eval()


@dataclass
class Engine:
    model: PreTrainedModel
    report: InstallReport
    optimizer: MasterOptimizer
    learner: Learner
    sampler: PackedSampler
    format: QuantFormat

    def publish(self, fmt=None) -> RefitUpdate:
        parameters = self.model.named_parameters()
        fmt = self.format if fmt is None else fmt
        return publish(self.report.weights, parameters, fmt, version=self.report.changes.count)

    def refit(self) -> None:
        self.sampler.load(self.publish())


def make_sampler(engine_model, fmt, targets=("experts",), *, stop_ids=(EOS,), keep_operand=True) -> PackedSampler:
    return PackedSampler(
        engine_model.config,
        fmt,
        targets,
        dtype=engine_model.dtype,
        device=torch.device("cpu"),
        stop_ids=list(stop_ids),
        pad_id=PAD,
        keep_operand=keep_operand,
    )


def make_engine(
    fmt=W4A16_G32,
    targets=("experts",),
    *,
    executed=None,
    model=None,
    optimizer=None,
    loss=None,
    temperature=1.0,
    replay_routes=True,
    micro_batch_size=64,
    max_grad_norm=1e9,
    keep_operand=True,
    **policy_options,
) -> Engine:
    """Build both sides; `executed` is the learner's format where it differs from the sampler's (rollout_only)."""
    model = tiny_model() if model is None else model
    report = install(model, targets, fmt if executed is None else executed)
    sampler = make_sampler(model, fmt, targets, keep_operand=keep_operand)
    masters = MasterOptimizer(model.named_parameters(), optimizer or AdamWConfig(lr=1e-3), max_grad_norm)
    learner = Learner(
        TransformersPolicy(model, report, masters, **policy_options),
        build_loss(loss or GRPOTISConfig()),
        temperature=temperature,
        replay_routes=replay_routes,
        micro_batch_size=micro_batch_size,
        logprob_batch_size=64,
        packing=SequencePackingConfig(),
    )
    engine = Engine(model, report, masters, learner, sampler, fmt)
    engine.refit()
    return engine


def sample(engine: Engine, *, prompts=PROMPTS, seed=0, tokens=6, temperature=None, top_p=1.0) -> Rollouts:
    temperature = engine.learner.temperature if temperature is None else temperature
    generator = torch.Generator().manual_seed(seed)
    return engine.sampler.generate(prompts, SamplingParams(tokens, temperature, top_p), generator)


def gaps(engine: Engine, rollouts: Rollouts) -> Tensor:
    """|learner's logprob - sampler's logprob| of every response token."""
    gap = engine.learner.prev_logprobs(rollouts) - rollouts.generation_logprobs
    return gap.abs()[rollouts.response_mask]


def chosen_routes(learner: Learner, rollouts: Rollouts) -> Tensor:
    """[B, S, L, k] experts that the learner runs, `NO_ROUTE` on padding, which it does not read."""
    with learner.policy.report.routes.record() as chosen, torch.no_grad():
        learner.token_logprobs(rollouts)
    routes = torch.full(
        (*rollouts.input_ids.shape, len(chosen), chosen[0].shape[-1]), NO_ROUTE, device=chosen[0].device
    )
    routes[rollouts.attention_mask] = torch.stack(chosen, dim=1)
    return routes


def responses(rollouts: Rollouts) -> list[list[int]]:
    tokens = rollouts.input_ids[:, rollouts.num_prompt_columns :]
    return [row[mask].tolist() for row, mask in zip(tokens, rollouts.response_mask, strict=True)]


def weights_of(model) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

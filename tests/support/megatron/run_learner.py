"""A Megatron learner beside the transformers one, on the same weights: `... CONFIG.yaml FACTS.pt`.

A program of its own, as run_rank.py; it writes what both gave.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    from support.megatron import on_cpu

# isort: split
from qarl_nemo.config import load_config
from qarl_nemo.layers.router import NO_ROUTE
from qarl_nemo.train.config import LocalConfig
from qarl_nemo.train.learner import Learner
from qarl_nemo.train.megatron.launch import megatron_learner
from qarl_nemo.train.megatron.ranks import start_ranks
from qarl_nemo.train.model import load_model
from qarl_nemo.train.rollouts import Rollouts
from qarl_nemo.train.setup import transformers_learner

NUM, PROMPT, RESPONSE = 8, 6, 5


def made_up(config: LocalConfig) -> Rollouts:
    """Responses of all lengths, and experts that no router would choose."""
    init, generator = config.policy.model_init, torch.Generator().manual_seed(7)
    width = PROMPT + RESPONSE
    attention = torch.ones(NUM, width, dtype=torch.bool)
    for row in range(NUM):
        attention[row, : row % PROMPT] = False
        attention[row, PROMPT + 1 + row % RESPONSE :] = False
    shape = (NUM, width, init.num_hidden_layers, init.num_experts)
    routes = torch.rand(shape, generator=generator).argsort(-1)[..., : init.num_experts_per_tok].short()
    routes[~attention] = NO_ROUTE
    response = attention[:, PROMPT:]
    return Rollouts(
        # A policy may draw the padding token, too.
        input_ids=torch.randint(0, 16, (NUM, width), generator=generator),
        attention_mask=attention,
        response_mask=response,
        generation_logprobs=-torch.rand(NUM, RESPONSE, generator=generator) * response,
        routes=routes,
        truncated=torch.zeros(NUM, dtype=torch.bool),
        weight_version=0,
    )


def facts_of(learner: Learner, config: LocalConfig, rollouts: Rollouts) -> dict[str, Any]:
    """What a learner gives: logprobs on the engine's routes and on its own, an update, and a step that is skipped."""
    fmt = config.qarl.served_format
    rows, advantages = torch.arange(NUM), torch.linspace(-1.0, 1.0, NUM)
    facts: dict[str, Any] = {"replayed": learner.prev_logprobs(rollouts)}
    facts["chosen"] = learner.prev_logprobs(replace(rollouts, routes=None))
    prev = facts["replayed"].clone()
    broken = rollouts.generation_logprobs.clone()
    broken[0, 0] = float("nan")
    skipped = learner.update(replace(rollouts, generation_logprobs=broken), prev, advantages, [rows])
    facts["skipped"] = (skipped.metrics["optim/skipped_steps"], learner.skipped_in_a_row, learner.weight_version)
    facts["causes"] = skipped.skipped
    facts["unchanged"] = learner.prev_logprobs(rollouts)
    result = learner.update(rollouts, prev, advantages, list(rows.split(4)))
    facts["metrics"], facts["sequences"] = result.metrics, result.sequences
    facts["applied"] = (learner.skipped_in_a_row, learner.weight_version)
    facts["updated"] = learner.prev_logprobs(rollouts)
    update = learner.publish(fmt)
    facts["published"] = {name: (tuple(one.shape), str(one.dtype)) for name, one in update.tensors.items()}
    facts["version"] = update.manifest.version
    return facts


def main(config_path: str, facts_path: str) -> None:
    """Ask both learners the same."""
    config = load_config(Path(config_path), [], LocalConfig)
    device, rollouts = torch.device("cpu"), made_up(config)
    start_ranks(device, tensor_model_parallel_size=1, expert_model_parallel_size=1, expert_tensor_parallel_size=1)
    models = [load_model(config.policy, device, config.seed)[0] for _ in range(2)]
    learners = {
        "transformers": transformers_learner(config, models[0]),
        "megatron": megatron_learner(config, models[1], device),
    }
    torch.save({name: facts_of(learner, config, rollouts) for name, learner in learners.items()}, facts_path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with on_cpu.CudaMeansCpu():
        main(*sys.argv[1:])

"""Count the experts that a batch's tokens reach in each layer of a model with random weights.

    python tools/bench/full_size/experts_reached.py [--record docs/results/full_size.json]

An engine reads the weights of the experts that its tokens reach, so this decides how long a decoding step takes. The
model has Qwen3-30B-A3B's experts and a quarter of its width, drawn so that every layer changes tokens as much as one of
full width does; the batch is an engine's of `a24`, 32 answers to four prompts.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from workloads import ANSWERS_PER_PROMPT, WORKLOADS

from qarl_nemo.metrics.machine import facts
from qarl_nemo.metrics.results import Figure, record_figures

_NARROWER, _WIDTH, _VOCABULARY, _STD = 4, 512, 20000, 0.02
_EXPERTS, _TOP_K, _ANSWERS, _PROMPT, _ANSWERED = 128, 8, 32, 120, 40
_COMMAND = "python tools/bench/full_size/experts_reached.py --record docs/results/full_size.json"


def main() -> None:
    """Print the mean of both draws, and each layer's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="FILE", help="file of docs/results")
    arguments = parser.parse_args()
    found = []
    for name in ("a24", "a24_even"):
        reached = experts_reached(WORKLOADS[name].layers, embedding_std=1.0 if WORKLOADS[name].even_routers else _STD)
        print(name, *(f"{count:.0f}" for count in reached))
        found.append(Figure(f"full_experts_reached_{name}", sum(reached) / len(reached), "experts", ">="))
    record_figures(arguments.record, found, command=_COMMAND, **facts("cpu"))


@torch.no_grad()
def experts_reached(layers: int, *, embedding_std: float) -> list[float]:
    """Return how many experts of a layer the 32 tokens of a decoding step reach, averaged over steps.

    Args:
        layers: how many the model has.
        embedding_std: standard deviation of the embeddings; Megatron's is 0.02, like that of all other weights.

    Returns:
        One count a layer, of 128; even routers would reach 112.
    """
    torch.manual_seed(0)
    model = _draw(layers, embedding_std)
    chosen: list[Tensor] = []

    def keep(gate: nn.Module, given: tuple[Tensor, ...], _: object) -> None:
        logits = given[0].reshape(-1, _WIDTH) @ gate.get_parameter("weight").mT
        chosen.append(logits.topk(_TOP_K).indices.view(_ANSWERS, -1, _TOP_K))

    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(keep)
    prompts = torch.randint(_VOCABULARY, (_ANSWERS // ANSWERS_PER_PROMPT, _PROMPT)).repeat_interleave(
        ANSWERS_PER_PROMPT, 0
    )
    model.model(torch.cat([prompts, torch.randint(_VOCABULARY, (_ANSWERS, _ANSWERED))], 1))
    return [sum(len(step.unique()) for step in layer[:, _PROMPT:].unbind(1)) / _ANSWERED for layer in chosen]


def _draw(layers: int, embedding_std: float) -> Qwen3MoeForCausalLM:
    sizes = {
        "vocab_size": _VOCABULARY,
        "hidden_size": _WIDTH,
        "intermediate_size": 3 * _WIDTH,
        "moe_intermediate_size": 768 // _NARROWER,
        "num_hidden_layers": layers,
        "num_attention_heads": 32 // _NARROWER,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _TOP_K,
        "norm_topk_prob": True,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(sizes)).float().eval()
    for name, parameter in model.named_parameters():
        if "embed" in name:
            parameter.normal_(0, embedding_std)
        elif parameter.dim() > 1:
            # Megatron draws what is added to the residual stream smaller.
            depth = math.sqrt(2 * layers) if name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")) else 1.0
            parameter.normal_(0, _STD * math.sqrt(_NARROWER) / depth)
    return model


if __name__ == "__main__":
    main()

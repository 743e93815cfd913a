"""One rank's aligned model as NeMo-RL's worker handles it: `... FOLDER` writes FOLDER/rank0.pt."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from support.megatron.models import (
    DEVICE,
    ON_GPU,
    TINY,
    Layout,
    gpt_model,
    load,
    megatron_model,
    parallel,
    plain_spec,
    transformer_config,
    weights_of,
)

# isort: split
from megatron.core.models.gpt.gpt_model import GPTModel

from qarl_kernels import get_format
from qarl_nemo.megatron.alignment import Alignment
from qarl_nemo.nemo_rl.aligned_model import aligned_provider, aligned_spec, executing, require_aligned
from qarl_nemo.nemo_rl.block import NemoQarlConfig
from qarl_nemo.nemo_rl.stages import Stages
from support.megatron import compare

FMT, BF16 = get_format("w4a16", group_size=32), get_format("bf16")
TOKENS = 12


def answer(model: torch.nn.Module) -> torch.Tensor:
    """The model's answer to fixed tokens."""
    tokens = torch.arange(TOKENS, device=DEVICE).unsqueeze(0) % TINY.vocab
    mask = torch.ones(1, 1, TOKENS, TOKENS, device=DEVICE).triu(1).bool()
    return model(tokens, tokens, mask)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """The same without a graph."""
    return answer(model)


def published(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the engine would be sent."""
    return {name: tensor.clone() for name, tensor in compare.published([model], vocab_size=TINY.vocab)}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two updates hold the same bytes."""
    return left.keys() == right.keys() and all(compare.same_bytes(one, right[name]) for name, one in left.items())


def other_formats() -> dict[str, bool]:
    """A quantized learner that runs as its reference does, and a BF16 learner that publishes for a quantized engine."""
    quantized = megatron_model(Layout(), Alignment(FMT, ("experts", "attention")))
    plain = megatron_model(Layout(), Alignment(BF16, ("experts", "attention")))
    own, reference = logits(quantized), logits(plain)
    with executing([quantized], BF16):
        inside = logits(quantized)
    with executing([plain], FMT):
        sent = published(plain)
    return {
        "formats_differ": not torch.equal(own, reference),
        "reference_is_unquantized": torch.equal(inside, reference),
        "own_format_is_back": torch.equal(logits(quantized), own),
        "publishes_the_engines_format": same(sent, published(quantized)),
        "executes_masters_again": torch.equal(logits(plain), reference),
    }


def built_by_a_worker() -> dict[str, Any]:
    """A worker module's `setup_model_and_optimizer`, with and without the aligned provider, and one that fails."""
    alignment = Alignment(FMT)
    provider = transformer_config(Layout(), torch.float32)
    if not ON_GPU:
        provider.transformer_impl = "local"
    provider.transformer_layer_spec = own = lambda _: plain_spec()

    def setup(policy_cfg: Any, megatron_cfg: Any, fail: bool = False) -> GPTModel:
        if fail:
            raise OSError("no checkpoint")
        spec = megatron_cfg.model.transformer_layer_spec
        return gpt_model(provider, spec(provider))

    worker = SimpleNamespace(setup_model_and_optimizer=setup)
    config = SimpleNamespace(model=provider)
    with aligned_provider(worker, alignment):
        model = worker.setup_model_and_optimizer({}, config)
    facts = {"aligned": require_aligned([model], alignment), "spec_is_back": provider.transformer_layer_spec is own}
    load(model, weights_of(torch.float32, TINY), TINY)
    facts["runs_the_format"] = torch.equal(logits(model), logits(megatron_model(Layout(), alignment)))
    try:
        with aligned_provider(worker, alignment):
            worker.setup_model_and_optimizer({}, config, fail=True)
    except OSError:
        facts["spec_is_back_after_failure"] = (
            provider.transformer_layer_spec is own and worker.setup_model_and_optimizer is setup
        )
    return facts


def refusals() -> dict[str, str]:
    """What is said of models that would not execute what they should."""
    config = transformer_config(Layout(), torch.float32)
    cases = {
        "plain": (gpt_model(config, plain_spec()), Alignment(FMT, engine_rounding=True)),
        "other format": (megatron_model(Layout(), Alignment(BF16)), Alignment(FMT)),
        "attention": (megatron_model(Layout(), Alignment(FMT)), Alignment(FMT, ("experts", "attention"))),
    }
    found = {}
    for name, (model, alignment) in cases.items():
        try:
            found[name] = require_aligned([model], alignment)
        except RuntimeError as error:
            found[name] = str(error)
    return found


def batches_kept() -> dict[str, int]:
    """How many layers still hold a graph of the batch after a recomputed forward and its backward."""
    options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    models = {
        kind: megatron_model(Layout(), Alignment(FMT), moe_token_dispatcher_type=kind, **options)
        for kind in ("alltoall", "allgather")
    }
    models["megatron"] = gpt_model(transformer_config(Layout(), torch.float32, **options), plain_spec())
    found = {}
    for name, model in models.items():
        answer(model).float().sum().backward()
        dispatchers = [layer.mlp.token_dispatcher for layer in model.decoder.layers]
        kept = [[v for v in vars(one).values() if isinstance(v, torch.Tensor) and v.grad_fn] for one in dispatchers]
        found[name] = sum(map(bool, kept))
    return found


def stages() -> dict[str, Any]:
    """A model that goes from stage to stage, from the start and from the middle of a run."""
    schedule = [{"from_step": 3, "bits": 3}, {"from_step": 5, "bits": 2, "reset_moments": True}]
    qarl = NemoQarlConfig.model_validate({"format": "w4a16", "group_size": 32, "schedule": schedule})
    alignment = Alignment(FMT)
    model, at = megatron_model(Layout(), alignment), Stages(qarl, alignment)
    facts: dict[str, Any] = {"said": [at.enter([model], step) for step in range(1, 6)], "due": at.reset_is_due}
    facts["bumps"] = alignment.changes.count
    narrow = Alignment(replace(FMT, grid_bits=2))
    reference = megatron_model(Layout(), narrow)
    facts["runs_the_stage"] = torch.equal(logits(model), logits(reference))
    facts["publishes_the_stage"] = at.served == narrow.format and same(published(model), published(reference))
    facts["is_another_grid"] = not torch.equal(logits(megatron_model(Layout(), Alignment(FMT))), logits(model))
    resumed = {}
    for step in (4, 5, 6):
        at = Stages(qarl, alignment)
        resumed[step] = [at.enter([model], step), at.served.grid_bits, at.reset_is_due]
    return facts | {"resumed": resumed}


def main(folder: str) -> None:
    """Write this rank's results."""
    dist.init_process_group("nccl" if ON_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    with parallel(Layout()):
        assert callable(aligned_spec(plain_spec(), Alignment(FMT)))
        results = {"formats": other_formats(), "built": built_by_a_worker(), "refusals": refusals()}
        results["batches_kept"] = batches_kept()
        results["stages"] = stages()
    torch.save(results, Path(folder) / "rank0.pt")


if __name__ == "__main__":
    main(sys.argv[1])

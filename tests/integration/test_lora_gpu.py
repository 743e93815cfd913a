"""Adapters over packed bases on one GPU: the learner's kernels, the built-in sampler's, and their memory."""

import pytest
import torch

from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.train.run import train_run
from qarl_nemo.train.sampling import SamplingParams
from qarl_nemo.train.trainer import Trainer
from support.engines import TOKENIZER, tiny_model
from support.runs import make_config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("odd_rewards")]

SIZES = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
FORMATS = ["w4a16", "nvfp4", "fp8_block", "int8"]
B = "model.layers.0.mlp.experts.lora.down_proj.lora_B.weight"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    tiny_model(dtype=torch.bfloat16, **SIZES).save_pretrained(folder / "source")
    TOKENIZER.save_pretrained(folder / "source")
    for name in FORMATS:
        quantize_checkpoint(folder / "source", folder / name, get_format(name), ["experts", "attention"], device="cuda")
    return folder


def config_of(run_dir, packed, name, steps=3, rank=16):
    return make_config(
        run_dir,
        device="cuda",
        qarl={"_override_": True, "format": name, "targets": ["experts", "attention"], "keep_operand": False},
        policy={
            "_override_": True,
            "model_path": str(packed / name),
            "precision": "bfloat16",
            "lora": {"rank": rank, "targets": ["attention", "experts"], "norms": True},
            "optimizer": {"name": "adamw", "lr": 1e-2},
            "activation_checkpointing": True,
            "train_micro_batch_size": 16,
        },
        rollout={"max_new_tokens": 8, "keep_operand": False},
        grpo={"max_num_steps": steps, "val_period": 0},
    )


@pytest.mark.parametrize("rank", [1, 16])
@pytest.mark.parametrize("name", FORMATS)
def test_both_sides_run_the_same_adapters(packed, tmp_path, name, rank):
    trainer = train_run(config_of(tmp_path, packed, name, rank=rank))
    adapter = trainer.sampler.model.get_parameter(B)
    assert adapter.abs().max() > 0
    params = SamplingParams(8, 1.0, 1.0)
    tasks = trainer.source.train(9, 32)

    def gap():
        rollouts = trainer.generate(tasks, params, torch.Generator("cuda").manual_seed(0))
        distance = (trainer.learner.prev_logprobs(rollouts) - rollouts.generation_logprobs).abs()
        return float(distance[rollouts.response_mask].mean())

    aligned = gap()
    for key, parameter in trainer.sampler.model.named_parameters():
        if ".lora." in key:
            parameter.data = torch.zeros_like(parameter)
    # Batches of other shapes round BF16 elsewhere; an engine without the adapters is another policy.
    assert gap() > 3 * aligned


def test_no_copy_in_bf16_is_ever_held(packed, tmp_path):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config_of(tmp_path, packed, "w4a16"))
    held = torch.cuda.max_memory_allocated() - before
    model = trainer.model
    block = 3 * SIZES["hidden_size"] * SIZES["moe_intermediate_size"]
    experts = SIZES["num_hidden_layers"] * SIZES["num_experts"] * block
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    # Packed once for both sides: 4.125 bits a weight; adapters with master and the sampler's copy; the rest is small.
    assert held < experts * (4.125 / 8 + 0.25) + 16 * trained + 64 * 2**20
    assert held < 2 * experts

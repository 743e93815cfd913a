"""What a rollout engine receives is, tensor by tensor, what the quantized checkpoint of the same model holds."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qarl_kernels import get_format
from qarl_nemo.checkpoints import quantize_checkpoint
from qarl_nemo.layers.install import install
from qarl_nemo.refit.convert import checkpoint_tensors
from qarl_nemo.refit.publish import publish
from qarl_nemo.train.config import ModelInit
from qarl_nemo.train.model import tiny_config
from qarl_nemo.train.tokenizer import character_tokenizer
from support.asserts import assert_bitwise_equal

CASES = {
    "w4a16 g64": ("w4a16", 64, ["experts"]),
    "w4a16 attention only": ("w4a16", 128, ["attention"]),
    "w4a16 all": ("w4a16", 64, ["experts", "attention"]),
    "fp8_block": ("fp8_block", None, ["experts"]),
    "nvfp4 all": ("nvfp4", None, ["experts", "attention"]),
    "bf16": ("bf16", None, ["experts"]),
}


@pytest.mark.parametrize("case", CASES)
def test_an_update_holds_the_checkpoints_tensors_bit_for_bit(case, tmp_path):
    name, group_size, targets = CASES[case]
    fmt = get_format(name, group_size=group_size)
    config = tiny_config(ModelInit(num_experts=3), character_tokenizer())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    report = install(model, targets, fmt)
    update = publish(report.weights, model.named_parameters(), fmt, version=4)
    model.save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "quantized", fmt, targets)
    stored = {}
    for path in sorted((tmp_path / "quantized").glob("*.safetensors")):
        stored |= load_file(path)
    sent = dict(checkpoint_tensors(update.layers))
    assert sorted(sent) == sorted(stored)
    for name, tensor in sent.items():
        assert_bitwise_equal(tensor.detach().contiguous(), stored[name])

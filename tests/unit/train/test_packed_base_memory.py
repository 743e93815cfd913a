"""Reading a frozen base takes the host's memory of one layer, however many there are."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from qarl_kernels import get_format
from qarl_nemo.checkpoints import open_checkpoint, quantize_checkpoint
from qarl_nemo.layers.install import install
from qarl_nemo.train.packed_base import PackedBase
from support.engines import tiny_model

SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "head_dim": 64}


@pytest.mark.parametrize("stored", ["packed", "source"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_layers_are_sent_one_after_another(num_layers, stored, tmp_path, monkeypatch):
    source = tiny_model(dtype=torch.bfloat16, num_hidden_layers=num_layers, **SIZES)
    source.save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "packed", get_format("w4a16"), ["experts"])
    checkpoint = open_checkpoint(tmp_path / stored)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(source.config, dtype=torch.bfloat16)
    base = PackedBase.of(model, install(model, ["experts"], get_format("w4a16")))
    filled = []
    monkeypatch.setattr(PackedBase, "_fill", lambda _, layer: filled.append(sum(one.nbytes for one in layer.values())))
    base.read(checkpoint, torch.device("cpu"))
    assert len(filled) == num_layers + 1
    # 8 experts of three matrices of 256 x 256 at 4.125 bits, attention in BF16 with two KV heads, router and norms.
    layer = 8 * 3 * 256**2 * 4.125 / 8 + 2 * (2 * 256 * 256 + 2 * 256 * 128) + 2 * (8 * 256 + 2 * 256 + 2 * 64)
    assert max(filled) == pytest.approx(layer, rel=1e-6)

"""What a refit puts into a layer beside its converted weight."""

import torch
from torch import nn

from qarl_nemo.refit.convert import overwrite, with_bias


def layer_of(value: float, *, bias: bool) -> nn.Module:
    layer = nn.Linear(4, 4, bias=bias)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, value)
    return layer


def test_a_bias_arrives_with_its_weight_at_the_address_that_graphs_read():
    live, loaded = layer_of(1.0, bias=True), layer_of(2.0, bias=True)
    address = live.bias.data_ptr()
    overwrite(live, with_bias({"weight": torch.full((4, 4), 3.0)}, loaded))
    assert live.weight.eq(3).all()
    assert live.bias.eq(2).all()
    assert live.bias.data_ptr() == address


def test_a_layer_without_a_bias_gets_none():
    assert with_bias({"weight": torch.ones(4, 4)}, layer_of(1.0, bias=False)).keys() == {"weight"}

"""NeMo-RL's optimizer gets update-aware rates: factors of what it has without, in the warm-up and after it."""

import json

import pytest

from support.needs import MEGATRON
from support.programs import run_program

pytestmark = [pytest.mark.slow, MEGATRON]
FAST = ("linear_qkv.weight", "linear_fc1.weight")
SLOW = ("input_layernorm.weight", "pre_mlp_layernorm.weight")


def test_rates_are_factors_of_the_schedules(tmp_path):
    # A process of its own: Megatron keeps global state.
    run_program("nemo_rl.run_update_aware", tmp_path)
    found = json.loads((tmp_path / "groups.json").read_text())
    assert found["None 1"] != found["None 6"]
    kinds = set()
    for steps in (1, 6):
        plain, aware = found[f"None {steps}"], found[f"1.5 {steps}"]
        assert plain.keys() == aware.keys()
        for name, (lr, decay) in plain.items():
            factor = 1.5 if any(one in name for one in FAST) else 1 / 1.5 if name.endswith(SLOW) else 1.0
            kinds.add(factor)
            assert aware[name] == pytest.approx([lr * factor, decay / factor if decay else 0.0], rel=1e-9), name
    assert len(kinds) == 3

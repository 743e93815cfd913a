"""The benches of the Megatron learner run on a CPU, tiny; what they measure there means nothing."""

import json

import pytest
import torch

from qarl_nemo.metrics.results import append_results
from support.needs import MEGATRON
from support.programs import run_program

pytestmark = [
    pytest.mark.slow,
    MEGATRON,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the benches themselves run on GPUs"),
]


def test_benches_and_streams(tools, tmp_path):
    tools("bench")
    run_program("megatron.run_benches", tmp_path, ranks=2)
    results = json.loads((tmp_path / "results.json").read_text())
    rows = append_results(tmp_path / "rows.json", results["step"] + results["publish"])
    figures = {row.name: row for row in rows}
    assert figures["w4a16_step_ratio_ep2_64"].goal == 1.05
    # Names without tokens are those of the most that are measured on GPUs, which the plan of whole steps reads.
    assert not [name for name in figures if name.endswith("_ep2") and not name.startswith("publish_")]
    assert figures["fp8_block_hp_step_ratio_ep2_32"].goal == 0.85
    assert "megatron_step_ratio_ep2_64" not in figures
    assert figures["engine_rounding_w4a16_step_ratio_ep2_32"].value > 0
    assert figures["engine_rounding_w4a16_step_ratio_ep2_64"].command.endswith(" --tokens 32,64 --recompute none")
    assert "engine_rounding_bf16_step_ratio_ep2_64" not in figures
    assert figures["publish_bytes_ratio_bf16_tp2_etp2"].value == 1
    assert figures["publish_bytes_ratio"].command.endswith("publish.py --layouts ep2,tp2_etp2 --layers 2")
    assert figures["publish_bytes_ratio"].value == figures["publish_bytes_ratio_w4a16_ep2"].value < 0.5
    assert results["streamed"] == dict.fromkeys(("held", "forgotten", "manifest", "bytes", "one layer"), True)

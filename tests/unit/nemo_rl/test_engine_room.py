"""What an engine takes of a GPU, by either of its keys, and what a refit needs beside one with GPUs of its own."""

import json
from pathlib import Path

import pytest
from test_layout import SHARE, WHOLE_NODES, launch, on_a_host_without_gpus  # noqa: F401 a fixture for every test
from test_nemo_rl_config import QWEN3_30B, problems

from qarl_nemo.memory import Learner, ModelSize, arriving_bytes
from qarl_nemo.nemo_rl.config import apply_qarl
from qarl_nemo.nemo_rl.layout_memory import DEFAULT_GIB, needed_memory

ROOT = Path(__file__).parents[3]


def test_a_cache_of_ones_own_size_decides_what_an_engine_takes():
    key, gib = "policy.generation.vllm_kwargs", 2**30
    too_large = {key: {"kv_cache_memory_bytes": 70 * gib}}
    (line,) = problems(launch({"resident": False}, **too_large))
    assert line.startswith(f"{key}.kv_cache_memory_bytes={70 * gib}: more than a GPU has beside the 6 GiB")
    most = int(line.rpartition("at most ")[2])
    apply_qarl(launch({"resident": False}, **{key: {"kv_cache_memory_bytes": most}}))
    # An answer of the largest length has no room in one byte.
    assert any("needs room beside them" in line for line in problems(launch(**{key: {"kv_cache_memory_bytes": 1}})))
    # The share is not read then; workers decide by what the cache amounts to.
    values = launch({"resident": False}, **{key: {"kv_cache_memory_bytes": 16 * gib}, SHARE: 0.01})
    apply_qarl(values)
    engine = needed_memory(values, apply_qarl(values), optimizer_stays=False).engine
    share = values["policy"]["generation"]["vllm_cfg"]["gpu_memory_utilization"]
    assert share == pytest.approx((engine + 21 * gib) / (DEFAULT_GIB * gib), abs=0.01)


def test_an_arriving_update_has_room_beside_an_engine_of_its_own():
    whole = {"policy.generation.vllm_kwargs": {}} | WHOLE_NODES
    for name, gib, largest in (("w4a16", 16.8, 0.78), ("bf16", 56.9, 0.28)):
        qarl = {"format": name, "alignment": "none"} if name == "bf16" else {}
        *_, line = problems(launch(qarl, **whole | {SHARE: 0.95}))
        assert f"beside the {gib} GiB of an arriving update" in line
        assert line.endswith(f"set at most {largest}")


def test_what_arrives_is_what_was_measured():
    rows = {row["name"]: row["value"] for row in json.loads((ROOT / "docs" / "results" / "vllm.json").read_text())}
    model = ModelSize.read(Path(QWEN3_30B))
    for name in ("w4a16", "w4a8", "fp8_block", "fp8_channel", "bf16"):
        served = Learner(format=name, targets=("experts", "attention"))
        measured = rows[f"refit_{name}_collective_peak_extra_bytes"]
        assert arriving_bytes(model, served, 1) == pytest.approx(measured, rel=0.025)
    # Half of the experts, and all else whole.
    assert 0.5 < arriving_bytes(model, served, 2) / arriving_bytes(model, served, 1) < 0.6


def test_an_optimizer_that_leaves_no_room_for_log_probabilities_goes():
    chunks = {"policy.logprob_chunk_size": 1024, "policy.megatron_cfg.defer_fp32_logits": True}
    # Beside this engine there is room for it, but not beside logits of four whole responses.
    assert not apply_qarl(launch(**{SHARE: 0.45})).resident
    assert apply_qarl(launch(**chunks | {SHARE: 0.45})).resident
    # Who asks for it gets the largest batch that fits.
    (line,) = problems(launch({"resident": True}, **{SHARE: 0.45}))
    assert "policy.logprob_batch_size=4: a learner rank needs" in line
    assert "set at most 3" in line

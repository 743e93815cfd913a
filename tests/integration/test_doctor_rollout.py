"""`qarl doctor --rollout` with the real vLLM on a CPU: every format is a row, and a second call starts nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qarl_nemo.measure.speed import run as rollout_speed
from qarl_nemo.measure.speed.run import measure_speed, num_steps
from qarl_nemo.measure.speed.settings import RolloutSpeedSettings, prepare_speed
from qarl_nemo.train.vllm.host import vllm_problem

PROBLEM = vllm_problem()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")]

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
SHOWN = []


def show(text: str, steps: int) -> None:
    SHOWN.append((text, steps))


@pytest.fixture
def settings(tmp_path) -> RolloutSpeedSettings:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    SHOWN.clear()
    formats = ("w4a8", "w4a16", "bf16")
    return RolloutSpeedSettings(
        tmp_path / "model", formats, batch_sizes=(2, 4), prompt_tokens=16, new_tokens=96, repeats=2
    )


def test_formats_are_measured_or_refused_with_the_engines_own_reason(settings, tmp_path):
    job = prepare_speed(settings)
    bf16, w4a16, w4a8 = measure_speed(job, tmp_path / "out", show)
    for measured in (bf16, w4a16):
        assert measured.reason is None
        for size in (2, 4):
            assert len(measured.batches[size]["decode_tokens_s"]) == 2
            assert min(measured.batches[size]["decode_tokens_s"] + measured.batches[size]["prefill_tokens_s"]) > 0
        assert measured.engine["kv_cache_tokens"] > 1000
        # 1 is an even load, 8 / 2 = 4 is every token at the same two experts
        assert 1 <= measured.engine["busiest_expert"] < 2
    # 4 of 16 bits in the experts, which are most of this model
    assert w4a16.engine["weights_gib"] < 0.5 * bf16.engine["weights_gib"]
    assert (w4a8.name, w4a8.batches[2]) == ("w4a8", {"reason": w4a8.reason})
    assert "No W4A8" in w4a8.reason
    assert sum(steps for _, steps in SHOWN) == num_steps(job)
    SHOWN.clear()
    again = measure_speed(replace(job, formats=job.formats[:2]), tmp_path / "out", show)
    assert again == [bf16, w4a16]
    assert [text for text, _ in SHOWN] == ["bf16: measured before", "w4a16: measured before"]


def test_an_engine_that_falls_back_is_no_measurement(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_speed, "model_quantization_config", lambda *_: None)
    (only,) = measure_speed(prepare_speed(replace(settings, formats=("w4a16",))), tmp_path, show)
    assert "other methods" in only.reason
    assert "routed_experts: UnquantizedFusedMoEMethod (CPU) in place of" in only.reason
    assert not (tmp_path / "w4a16.json").exists()


def test_a_batch_that_the_cache_cannot_hold_is_refused(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_speed, "_CPU_OPTIONS", {**rollout_speed._CPU_OPTIONS, "num_gpu_blocks_override": 3})
    (only,) = measure_speed(prepare_speed(replace(settings, formats=("bf16",))), tmp_path, show)
    assert only.reason is None
    assert "the KV cache holds" in only.batches[4]["reason"]


def test_the_command_writes_table_advice_files_and_figures(settings, tmp_path, qarl):
    arguments = ["--rollout", settings.model, "--format", "bf16", "--batch-size", 2, "--prompt-tokens", 16]
    arguments += ["--new-tokens", 64, "--output", tmp_path / "out", "--record", tmp_path / "figures.json"]
    code, printed = qarl("doctor", *arguments)
    assert code == 0, printed
    for text in ("ETA", "decode", "batch 2: bf16: the fastest of 1", "rollout_speed.png"):
        assert text in printed.replace("\n", " ")
    names = {row["name"] for row in json.loads((tmp_path / "figures.json").read_text())}
    assert {"rollout_tokens_s_bf16_b2", "rollout_kv_cache_tokens_bf16"} <= names
    assert Path(tmp_path / "out" / "rollout_speed.json").is_file()
